"""The first request, sent to ourselves through the public socket: what works for us works for others."""
import asyncio
import logging
import urllib.error
import urllib.request
from typing import Any

import orjson

from sglane.entrypoints.server_state import Engine

logger = logging.getLogger(__name__)

NUM_TRIES = 120  # for the HTTP server to answer, one a second
GENERATE_TIMEOUT_S = 600.0
PROMPT = "The capital city of France is"
PROMPT_IDS = [10, 11, 12]
NUM_NEW_TOKENS = 8
FLUSH_TIMEOUT_S = 10


class WarmupFailed(RuntimeError):
    """The first request failed; the message carries the answer."""


async def warm_up(address: Any, engine: Engine, key: str | None) -> None:
    """GET /model_info until it answers, one short generation, then an empty cache again.

    address: of the listening socket. key: one that opens all routes.
    """
    host, port = address[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    for _ in range(NUM_TRIES):
        try:
            await asyncio.to_thread(ask, f"{url}/model_info", None, 10.0, key)
            break
        except WarmupFailed:
            await asyncio.sleep(1.0)
    sampling = {"temperature": 0, "max_new_tokens": NUM_NEW_TOKENS}
    if engine.tokenizer is None:
        body: dict[str, Any] = {"input_ids": [token % engine.facts.vocab_size for token in PROMPT_IDS], "sampling_params": sampling}
    else:
        body = {"text": PROMPT, "sampling_params": sampling}
    await asyncio.to_thread(ask, f"{url}/generate", orjson.dumps(body), GENERATE_TIMEOUT_S, key)
    await asyncio.to_thread(ask, f"{url}/flush_cache?timeout={FLUSH_TIMEOUT_S}", b"", FLUSH_TIMEOUT_S + 10.0, key)


def ask(url: str, data: bytes | None, timeout_s: float, key: str | None) -> bytes:
    """GET, or POST with data. Raises WarmupFailed on anything but a 2xx."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, data, headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy of the environment is not for us
    try:
        with opener.open(request, timeout=timeout_s) as response:
            answer: bytes = response.read()
            return answer
    except urllib.error.HTTPError as error:
        raise WarmupFailed(f"the warm-up request to {url} got {error.code}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise WarmupFailed(f"the warm-up request to {url} failed: {error}") from error
