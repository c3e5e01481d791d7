"""Decoding with speculation beside decoding without, on servers that run at the same time and answer in turn.

    python benchmark/bench_speculation.py [--model-path tiny-dsa] [--dtype bfloat16] [--steps 0 1 2 3] [--batch 1 4 16] [--tokens 256] [--repeats 5]

Each row: tokens per second of all streams together (median and range), the ratio to the server without speculation (median of paired ratios), and the
mean tokens that a verify step yields. Prompts are texts that the model knows how to go on with; greedy, the end token is ignored. --algorithm NGRAM
measures prompt lookup, for models without a NextN layer.
"""
import argparse
import contextlib
import statistics
import sys
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent))

from streams import decode_rate, machine, own_server, run_streams, spread  # noqa: E402

PROMPTS = (
    "KING RICHARD:\nWhat says my lord?\n", "ROMEO:\nBut soft, what light", "First Citizen:\nBefore we proceed any further, hear me speak.\n",
    "JULIET:\nO, where is", "The queen came into the hall, and", "HAMLET:\nTo be, or not to be", "Second Servant:\nMy lord, the duke",
    "Enter the messenger, and",
)


def bodies(batch: int, num_tokens: int, shift: int) -> list[dict[str, object]]:
    sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
    return [{"text": f"{PROMPTS[(i + shift) % len(PROMPTS)]}", "stream": True, "sampling_params": sampling} for i in range(batch)]


def verify_steps(url: str) -> tuple[int, int]:
    """Tokens of decode steps and verify steps so far."""
    found = httpx.get(f"{url}/server_info").json()["internal_states"][0].get("speculation")
    return (found["num_tokens"], found["num_verify_steps"]) if found else (0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="tiny-dsa")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--algorithm", default="NEXTN", choices=["NEXTN", "NGRAM"])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 3], help="drafts per step")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of each request")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-rows", type=int, help="--speculative-max-rows of the servers that speculate")
    parser.add_argument("--server-args", nargs=argparse.REMAINDER, default=[], help="further flags of all servers; comes last")
    args = parser.parse_args()
    flags = ["--model-path", args.model_path, "--dtype", args.dtype, "--disable-radix-cache", "--log-level", "warning", *args.server_args]
    print(f"{args.model_path}, {args.dtype}, {args.algorithm}, {args.tokens} tokens; {machine()}")
    with contextlib.ExitStack() as stack:
        urls = {0: stack.enter_context(own_server(*flags))[0]}
        for steps in args.steps:
            spec = ["--speculative-algorithm", args.algorithm, "--speculative-num-steps", str(steps)]
            spec += ["--speculative-max-rows", str(args.max_rows)] if args.max_rows else []
            urls[steps] = stack.enter_context(own_server(*flags, *spec))[0]
        for batch in args.batch:
            measure(urls, batch, args)


def measure(urls: dict[int, str], batch: int, args: argparse.Namespace) -> None:
    rates: dict[int, list[float]] = {steps: [] for steps in urls}
    before = {steps: verify_steps(url) for steps, url in urls.items()}
    for url in urls.values():
        run_streams(f"{url}/generate", bodies(batch, args.tokens, 0))
    for repeat in range(args.repeats):
        for steps, url in urls.items():
            rates[steps].append(decode_rate(run_streams(f"{url}/generate", bodies(batch, args.tokens, repeat))))
    for steps, url in urls.items():
        tokens, num_steps = (now - then for now, then in zip(verify_steps(url), before[steps]))
        ratio = statistics.median(rate / plain for rate, plain in zip(rates[steps], rates[0]))
        accept = f", {tokens / num_steps:.2f} tokens a verify step" if num_steps else ""
        print(f"batch {batch}, {steps} drafts: {spread(rates[steps])} tokens/s, {ratio:.2f} x without{accept}")


if __name__ == "__main__":
    main()
