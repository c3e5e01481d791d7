"""A thousand mixed requests on a pool small enough to evict and retract: answers, books and canary must hold."""
import asyncio
import json
import random

import httpx
import pytest

from kits.audit import assert_clean, wait_idle
from kits.canary import Canary
from kits.checkpoints import tiny
from kits.server import Server

NUM_REQUESTS = 1000
CONCURRENCY = 24


def make_request(rng: random.Random, index: int) -> dict:
    shared = [2 + (7 * i + 13 * rng.randrange(4)) % 500 for i in range(rng.choice([0, 5, 16, 33, 60]))]
    prompt = shared + [rng.randrange(2, 500) for _ in range(rng.randint(1, 60))]
    sampling = {"max_new_tokens": rng.randint(1, 48), "temperature": rng.choice([0, 0, 0.8]), "ignore_eos": rng.random() < 0.7}
    if rng.random() < 0.2:
        sampling["stop_token_ids"] = [rng.randrange(2, 500) for _ in range(40)]
    return {"input_ids": prompt, "sampling_params": sampling, "rid": f"soak-{index}", "stream": rng.random() < 0.5}


async def one(client: httpx.AsyncClient, rng: random.Random, index: int) -> str:
    """Returns how it ended: ok, aborted, left."""
    body = make_request(rng, index)
    fate = rng.random()
    if fate < 0.05:
        body["sampling_params"] |= {"max_new_tokens": 400, "ignore_eos": True}
        task = asyncio.create_task(client.post("/generate", json={**body, "stream": False}))
        await asyncio.sleep(rng.random() * 0.3)
        await client.post("/abort_request", json={"rid": body["rid"]})
        response = await task
        return "aborted" if response.status_code != 200 or response.json()["meta_info"]["finish_reason"]["type"] == "abort" else "ok"
    if fate < 0.10:
        body["sampling_params"] |= {"max_new_tokens": 400, "ignore_eos": True}
        async with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
            async for _ in response.aiter_lines():
                break
        return "left"
    if body["stream"]:
        async with client.stream("POST", "/generate", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert response.status_code == 200 and lines[-1] == "data: [DONE]", lines[-2:]
    else:
        response = await client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        meta = response.json()["meta_info"]
        assert meta["completion_tokens"] == len(response.json()["output_ids"]) and 0 <= meta["cached_tokens"] < meta["prompt_tokens"]
    return "ok"


async def load(url: str, num_requests: int, seed: int) -> list[str]:
    gate = asyncio.Semaphore(CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=CONCURRENCY), trust_env=False) as client:

        async def guarded(index: int) -> str:
            async with gate:
                return await one(client, random.Random(seed * 100_003 + index), index)

        return await asyncio.gather(*(guarded(index) for index in range(num_requests)))


async def crowd(url: str) -> None:
    """Requests that come in together and grow beyond the pool, however slow the machine is."""
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        bodies = [{"input_ids": [20 + index] * 40, "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}} for index in range(16)]
        for response in await asyncio.gather(*(client.post("/generate", json=body) for body in bodies)):
            assert response.status_code == 200, response.text


@pytest.mark.timeout(900)
@pytest.mark.parametrize("family, num_requests, slow_rank", [("llama", NUM_REQUESTS, None), ("glm_moe_dsa", 200, None), ("glm_moe_dsa", 100, 1)])
def test_soak(family, num_requests, slow_rank):
    """slow_rank: two ranks, and that one sleeps before every step exchange, so that the other runs ahead as far as it may."""
    flags = ["--model-path", str(tiny(family)), "--skip-tokenizer-init", "--dtype", "float32", "--page-size", "16", "--max-total-tokens", "1024",
             "--max-running-requests", "16", "--chunked-prefill-size", "64", "--schedule-conservativeness", "0.1"]
    env = {"SGLANE_POISON": "1", "SGLANE_DEBUG_LEDGER": "1"}
    if slow_rank is not None:
        flags += ["--cp-size", "2", "--enable-cp-shared-kv"]
        env["SGLANE_HOLD"] = json.dumps({"rank": slow_rank, "point": "exchange", "sleep_ms": 10})
    with Server(*flags, env=env) as server:
        prompts = [[5, 9, 11], list(range(2, 70)), list(range(2, 100)), [7] * 33]
        canary = Canary.record(server, prompts)
        ends = asyncio.run(load(server.url, num_requests, seed=1))
        asyncio.run(crowd(server.url))
        assert len(ends) == num_requests
        assert ends.count("ok") > num_requests * 0.8 and ends.count("left") > 0 and ends.count("aborted") > 0
        state = server.server_info()["internal_states"][0]
        assert_clean(wait_idle(server), allowed_fallbacks=["tail_copy_skipped"])
        assert state["totals"]["num_retractions"] > 0, "the pool was not small enough to retract"
        canary.check(server)
        server.flush_cache()
        assert_clean(wait_idle(server), allowed_fallbacks=["tail_copy_skipped"])
        canary.check(server)
