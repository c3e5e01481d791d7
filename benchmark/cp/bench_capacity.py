"""Tokens served at once on real servers of 1, 2, 4 ranks with the same KV bytes a rank.

    PYTHONPATH=python python benchmark/cp/bench_capacity.py --rank-tokens 4096 -- --model-path FOLDER [flags of the server]

`mixed`: prompts of mixed sizes come one after another, each with an answer that does not end, until a request has to wait for pages; counted are
the tokens of those that run then, prompts and answers so far. `one prompt`: the longest prompt that the server takes, which it must answer.
`KV bytes` are those of one rank. Ratios are to the first server, divided by the ranks: 1.00 is N times the tokens on N ranks.
"""
import argparse
import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from streams import machine, own_server  # noqa: E402

#: Prompt lengths, as shares of a rank's tokens.
SHARES = (0.003, 0.01, 0.02, 0.04, 0.08)
MAX_REQUESTS = 512
PATIENCE_S = 120.0


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600.0) as answer:
        return json.loads(answer.read() or b"null")


def load_of(url: str) -> Any:
    return ask(f"{url}/v1/loads?include=memory,totals")["loads"][0]


def send(url: str, prompt: list[int], num_new: int) -> None:
    """In the background; the answer does not matter (it is aborted at the end)."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": num_new, "temperature": 0, "ignore_eos": True}}
    threading.Thread(target=ask, args=(f"{url}/generate", body), daemon=True).start()


def mixed(url: str, rank_tokens: int) -> int:
    """Tokens of the requests that run when the first one has to wait."""
    rng, served = np.random.default_rng(0), 0
    for num_sent in range(1, MAX_REQUESTS + 1):
        length = max(int(rng.choice(SHARES) * rank_tokens), 2)
        send(url, rng.integers(3, 200, length).tolist(), 1 << 20)
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            load = load_of(url)
            if load["memory"]["lane_work"]["page_waits"]["counts"]:
                return int(served + load["totals"]["output_tokens"])
            if load["num_running_reqs"] == num_sent:
                break
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"request {num_sent} neither runs nor waits for pages: {load}")
            time.sleep(0.005)
        served += length
    raise RuntimeError(f"{MAX_REQUESTS} requests did not fill the pool: choose fewer --rank-tokens")


def quiet(url: str) -> None:
    ask(f"{url}/abort_request", {"abort_all": True})
    while load_of(url)["num_total_reqs"]:
        time.sleep(0.02)


def one_prompt(url: str) -> int:
    """Tokens of the longest prompt."""
    length = ask(f"{url}/server_info")["max_req_input_len"] - 1
    prompt = np.random.default_rng(1).integers(3, 200, length).tolist()
    answer = ask(f"{url}/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
    if answer["meta_info"]["prompt_tokens"] != length:
        raise RuntimeError(f"the server answered for {answer['meta_info']['prompt_tokens']} of {length} tokens")
    return int(length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank-tokens", type=int, default=4096, help="KV tokens of one rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("flags", nargs="*", help="for the server, after --")
    given = parser.parse_args()
    print(machine())
    print("ranks   KV bytes   mixed  ratio   one prompt  ratio", flush=True)
    first: tuple[float, float] | None = None
    for num_ranks in given.ranks:
        flags = ["--cp-size", str(num_ranks), "--max-total-tokens", str(num_ranks * given.rank_tokens), "--max-running-requests", str(MAX_REQUESTS),
                 "--schedule-conservativeness", "0.0", "--skip-server-warmup", *(["--enable-cp-shared-kv"] if num_ranks > 1 else []), *given.flags]
        with own_server(*flags) as (url, _):
            (num_bytes,) = set(ask(f"{url}/server_info")["memory_usage"]["kvcache_bytes"])
            served = mixed(url, given.rank_tokens)
            quiet(url)
            length = one_prompt(url)
        first = first or (served / num_ranks, length / num_ranks)
        ratios = served / num_ranks / first[0], length / num_ranks / first[1]
        print(f"{num_ranks:5} {num_bytes:10} {served:7} {ratios[0]:6.2f} {length:12} {ratios[1]:6.2f}", flush=True)


if __name__ == "__main__":
    main()
