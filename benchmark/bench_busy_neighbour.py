"""Decode throughput of a server alone and beside one busy process of equal niceness, turn by turn in one run.

    python benchmark/bench_busy_neighbour.py [--repeats 7] [--num-new 96] [--model-path FOLDER_OR_GGUF]

Two models (random with 2 layers; the default one or --model-path), 1 and 16 streams. Every pair is one measurement alone and one with the neighbour,
in alternating order; the ratio of a pair is what counts, not the rates: the machine must be quiet otherwise.

The fair share. The neighbour is one thread that never sleeps. On a machine of 2 cores it can take one of them at most, and the scheduler gives equal
weight to every runnable thread. A step of one compute thread needs one core, and there are two: with the planner and the front, which sleep while the
executor computes, it should keep nearly all of its rate (share 1). A step of two compute threads needs both cores: its two threads and the neighbour
are three runnable threads on two cores, so each gets two thirds of a core, but the threads wait for one another at the end of every
operation. If the neighbour stays on one core, one thread has half a core and the step takes twice as long: share 1/2. That is the least that is
fair; below it the engine loses time by waiting, not by working: a thread that waits with its eyes open (spins) burns its own share, and one that
sleeps through each of many short operations is woken behind the neighbour, up to a scheduler's tick (some ms) later.
"""
import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from bench_engine_overhead import VOCAB, write_checkpoint
from streams import decode_rate, machine, own_server, run_streams, spread

from sglane.configs.model_config import load_model_config

FAIR_SHARE = 0.5
NUM_PROMPT = 32
#: Runs until it is ended, and gives nothing back to the operating system on its own.
SPIN = "print('on', flush=True)\nwhile True: pass"


@contextmanager
def neighbour() -> Iterator[None]:
    """One busy process, as nice as this one."""
    process = subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        process.stdout.readline()  # it runs
        yield
    finally:
        process.kill()
        process.wait()


def pairs(url: str, vocab_size: int, num_streams: int, num_new: int, repeats: int) -> list[tuple[float, float]]:
    """(tokens/s alone, tokens/s beside the neighbour) of every repeat."""
    generator = np.random.default_rng(0)
    sampling = {"max_new_tokens": num_new, "temperature": 0.0, "ignore_eos": True}

    def rate() -> float:
        prompts = [generator.integers(10, vocab_size, NUM_PROMPT).tolist() for _ in range(num_streams)]
        return decode_rate(run_streams(f"{url}/generate", [{"input_ids": prompt, "stream": True, "sampling_params": sampling} for prompt in prompts]))

    def busy() -> float:
        with neighbour():
            return rate()

    rate()  # warm up
    found = []
    for number in range(repeats):
        if number % 2:
            beside = busy()
            found.append((rate(), beside))
        else:
            alone = rate()
            found.append((alone, busy()))
    return found


def report(name: str, num_streams: int, found: list[tuple[float, float]]) -> None:
    ratios = [beside / alone for alone, beside in found]
    verdict = "fair" if statistics.median(ratios) >= FAIR_SHARE else "LESS THAN FAIR"
    rates = (spread([pair[place] for pair in found]) for place in (0, 1))
    print(f"| {name} | {num_streams} | {' | '.join(rates)} | {spread(ratios, 2)} | {verdict} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", help="the larger model; default: the default model")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--num-new", type=int, default=96, help="tokens of a stream of the larger model; the small one gets 8 times as many")
    args = parser.parse_args()
    print(f"{args.dtype}, nice {os.nice(0)}, OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY', '(unset)')}; {machine()}")
    print("| model | streams | alone tok/s | beside a busy process tok/s | ratio | fair share 0.5 |\n|---|---|---|---|---|---|")
    flags = ("--dtype", args.dtype, "--skip-tokenizer-init", "--max-total-tokens", "32768", "--log-level", "warning")
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        with own_server("--model-path", folder, *flags) as (url, _):
            for num_streams in (1, 16):
                report("2 layers, random", num_streams, pairs(url, VOCAB, num_streams, 8 * args.num_new, args.repeats))
    config = load_model_config(args.model_path, None)
    with own_server(*(("--model-path", args.model_path) if args.model_path else ()), *flags) as (url, _):
        for num_streams in (1, 16):
            report(Path(config.source.path).stem, num_streams, pairs(url, config.vocab_size, num_streams, args.num_new, args.repeats))


if __name__ == "__main__":
    main()
