"""Context parallelism on one machine: prefill, decode and hits of long prefixes over ranks and transports, turn by turn in one run.

    python benchmark/cp/bench_scaling.py [--ranks 1 2 4] [--prompt 4096] [--repeats 3] [--model-path FOLDER_OR_GGUF] [--dtype bfloat16]

Every rank has one compute thread, so that ranks are what is compared; more ranks than cores show the cost of the exchange, not a gain. The servers
run side by side and are asked one after the other. Cases: time to first token of a cold prompt; of a suffix of 512 tokens after that prompt, with
prefix prefetch and without (mapped pages are not fetched ahead); tokens per second of 1 and 8 streams behind prompts of an eighth of the length.
"""
import argparse
import re
import sys
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from streams import decode_rate, machine, own_server, run_streams, spread  # noqa: E402

WAIT = re.compile(r"^sglang:cp_lane_prefix_wait_seconds_total{.*} (.*)$", re.M)

SUFFIX = 512
NUM_NEW = 32
NO_PREFETCH = {"SGLANE_CP_PREFETCH_MIN_TOKENS": str(1 << 40)}


@dataclass(frozen=True)
class Server:
    """One configuration under test."""

    name: str
    url: str

    def streams(self, prompts: list[list[int]], num_new: int) -> list[dict[str, object]]:
        sampling = {"max_new_tokens": num_new, "temperature": 0.0, "ignore_eos": True}
        return [{"input_ids": prompt, "stream": True, "sampling_params": sampling} for prompt in prompts]

    def first_token_ms(self, prompt: list[int]) -> float:
        return run_streams(f"{self.url}/generate", self.streams([prompt], 1))[0].ttft_s * 1e3

    def prefix_wait_ms(self, prompt: list[int]) -> float:
        """Time that the attention of the slowest rank waits for prefix pages of a prompt."""
        before = self._prefix_waits_s()
        self.first_token_ms(prompt)
        return max(after - begin for begin, after in zip(before, self._prefix_waits_s())) * 1e3

    def _prefix_waits_s(self) -> list[float]:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            return [float(value) for value in WAIT.findall(answer.read().decode())]

    def rate(self, prompts: list[list[int]]) -> float:
        return decode_rate(run_streams(f"{self.url}/generate", self.streams(prompts, NUM_NEW)))


def configurations(ranks: list[int]) -> list[tuple[str, tuple[str, ...], dict[str, str]]]:
    """Name, flags, variables."""
    found: list[tuple[str, tuple[str, ...], dict[str, str]]] = []
    for n in ranks:
        flags = ("--cp-size", str(n), "--enable-cp-shared-kv")
        if n == 1:
            found.append(("1 rank", (), {}))
            continue
        for transport in ("peer", "collective"):
            found.append((f"{n} ranks, {transport}", (*flags, "--cp-exchange", transport), {}))
        found.append((f"{n} ranks, collective, no prefetch", (*flags, "--cp-exchange", "collective"), NO_PREFETCH))
    return found


def measure(servers: list[Server], num_prompt: int, repeats: int, vocab_size: int) -> dict[str, dict[str, list[float]]]:
    generator = np.random.default_rng(0)

    def prompt(n: int) -> list[int]:
        return generator.integers(10, vocab_size, n).tolist()

    results: dict[str, dict[str, list[float]]] = {}
    for repeat in range(repeats + 1):
        cold, suffix, other = prompt(num_prompt), prompt(SUFFIX), prompt(SUFFIX)
        few, many = [prompt(num_prompt // 8)], [prompt(num_prompt // 8) for _ in range(8)]
        cases: dict[str, Callable[[Server], float]] = {
            f"TTFT cold {num_prompt} ms": lambda s, p=cold: s.first_token_ms(p),
            f"TTFT {SUFFIX} after {num_prompt} ms": lambda s, p=cold + suffix: s.first_token_ms(p),
            f"waiting for prefix pages in {SUFFIX} after {num_prompt}, ms": lambda s, p=cold + other: s.prefix_wait_ms(p),
            "decode b1 tok/s": lambda s, p=few: s.rate(p),
            "decode b8 tok/s": lambda s, p=many: s.rate(p),
        }
        for case, action in cases.items():
            for server in servers:
                value = action(server)
                if repeat:  # the first round warms up
                    results.setdefault(case, {}).setdefault(server.name, []).append(value)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--prompt", type=int, default=4096, help="tokens of the cold prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model-path")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--vocab-size", type=int, default=32000, help="ids of prompts are below this")
    args = parser.parse_args()
    print(f"{args.model_path or 'default model'}, {args.dtype}, one thread a rank; {machine()}")
    model = ("--model-path", args.model_path) if args.model_path else ()
    flags = (*model, "--dtype", args.dtype, "--max-total-tokens", str(64 * args.prompt), "--log-level", "warning", "--enable-metrics")
    with ExitStack() as stack:
        servers = []
        for name, own, variables in configurations(args.ranks):
            url, _ = stack.enter_context(own_server(*flags, *own, variables={"SGLANE_NUM_THREADS": "1", **variables}))
            servers.append(Server(name, url))
        results = measure(servers, args.prompt, args.repeats, args.vocab_size)
    print("| case | " + " | ".join(server.name for server in servers) + " |")
    print("|" + "---|" * (1 + len(servers)))
    for case, by_server in results.items():
        print(f"| {case} | " + " | ".join(spread(by_server[server.name]) for server in servers) + " |")


if __name__ == "__main__":
    main()
