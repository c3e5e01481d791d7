"""Conversations that together are larger than the device pool, with the host tier and without it, turn by turn in one run.

    python benchmark/hicache/bench_multiturn.py [--model-path FOLDER_OR_GGUF] [--dtype bfloat16] [--conversations 12] [--turns 4] [--ratio 3]

Two servers with the same device pool, a third of all conversations' tokens by default. Each turn goes once through all conversations, so a
conversation has left the device when its next turn comes. Each turn is asked of one server, then of the other. Hit rate: cached tokens / prompt
tokens of the turns after the first. Memory: proportional set size (shared pages count once) of all processes of a server, its largest value.
"""
import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from streams import machine, own_server, spread  # noqa: E402

from sglane.configs.model_config import load_model_config  # noqa: E402


@dataclass
class Server:
    """What one server was asked and what it gave."""

    url: str
    ttft_s: list[float] = field(default_factory=list)  # of the turns after the first
    cold_s: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_device: int = 0
    num_host: int = 0
    most_bytes: int = 0

    def ask(self, client: httpx.Client, ids: list[int], num_new: int, is_first: bool) -> list[int]:
        """Streamed, so that the first token is timed; returns the answer's tokens."""
        body = {"input_ids": ids, "stream": True, "sampling_params": {"max_new_tokens": num_new, "temperature": 0.0, "ignore_eos": True}}
        begin_s, first_s, last = time.perf_counter(), 0.0, ""
        with client.stream("POST", f"{self.url}/generate", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first_s = first_s or time.perf_counter() - begin_s
                    last = line
        event = json.loads(last.removeprefix("data: "))
        if is_first:
            self.cold_s.append(first_s)
        else:
            details = event["meta_info"]["cached_tokens_details"]
            self.ttft_s.append(first_s)
            self.num_prompt += len(ids)
            self.num_device += details["device"]
            self.num_host += details["host"]
        return list(event["output_ids"])

    def note_memory(self) -> None:
        port = int(self.url.rsplit(":")[-1])
        launcher = next(each.pid for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr.port == port)
        family = [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]
        self.most_bytes = max(self.most_bytes, sum(each.memory_full_info().pss for each in family))


def converse(servers: dict[str, Server], args: argparse.Namespace, vocab_size: int) -> None:
    random = np.random.default_rng(1)
    histories = [random.integers(10, vocab_size, args.first).tolist() for _ in range(args.conversations)]
    with httpx.Client(timeout=600) as client:
        for turn in range(args.turns):
            for i, history in enumerate(histories):
                answers = {}
                for name, server in servers.items():
                    answers[name] = server.ask(client, history, args.answer, turn == 0)
                    server.note_memory()
                histories[i] = history + next(iter(answers.values())) + random.integers(10, vocab_size, args.later).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--first", type=int, default=1536, help="tokens of the first message")
    parser.add_argument("--later", type=int, default=64, help="tokens of each later one")
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--ratio", type=float, default=3.0, help="tokens of all conversations / tokens of the device pool")
    args = parser.parse_args()
    config = load_model_config(args.model_path, None)
    num_tokens = args.conversations * (args.first + (args.turns - 1) * (args.later + args.answer))
    pool = int(num_tokens / args.ratio)
    model = ["--model-path", args.model_path] if args.model_path else []
    flags = [*model, "--dtype", args.dtype, "--max-total-tokens", str(pool), "--log-level", "warning"]
    host = ["--enable-hierarchical-cache", "--hicache-ratio", f"{args.ratio * 1.2:g}"]
    print(f"{config.source.path}, {args.dtype}; {machine()}")
    print(f"{args.conversations} conversations, {args.turns} turns, {num_tokens} tokens; device pool {pool} tokens")
    with own_server(*flags, *host) as (on, _), own_server(*flags) as (off, _):
        servers = {"host tier": Server(on), "device only": Server(off)}
        converse(servers, args, config.vocab_size)
    print("| | hit rate | of it from host | mean TTFT ms, later turns | median | first turn ms | memory MB |")
    print("|---|---|---|---|---|---|---|")
    for name, server in servers.items():
        cached = server.num_device + server.num_host
        print(f"| {name} | {cached / server.num_prompt:.3f} | {server.num_host / max(cached, 1):.2f} | {statistics.mean(server.ttft_s) * 1e3:.1f} | "
              f"{statistics.median(server.ttft_s) * 1e3:.1f} | {spread([s * 1e3 for s in server.cold_s])} | {server.most_bytes / 1e6:.0f} |")


if __name__ == "__main__":
    main()
