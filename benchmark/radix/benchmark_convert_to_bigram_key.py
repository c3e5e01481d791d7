"""Keys of pairs of neighbouring tokens: `bigram_key` against a list of Python tuples and against integers packed in Python.

    PYTHONPATH=python python benchmark/radix/benchmark_convert_to_bigram_key.py [--check] [--num-tokens 128 1024 8192 32768 131072] [--repeats 9]

With --check the keys are compared instead of timed, byte for byte; exit code 1 if one differs. Times are medians in microseconds; only ratios inside
one run mean anything on a busy machine.
"""
import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from sglane.mem_cache.radix_key import bigram_key

SIZES = (128, 1024, 8192, 32768, 131072)
VOCAB_SIZE = 152_064
LARGEST_ID = 2**31 - 1


def tuples_of(tokens: list[int]) -> list[tuple[int, int]]:
    return [(tokens[i], tokens[i + 1]) for i in range(len(tokens) - 1)]


def packed_of(tokens: list[int]) -> list[int]:
    return [(tokens[i] << 32) | tokens[i + 1] for i in range(len(tokens) - 1)]


def median_us(action: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        action()
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)


def is_right(tokens: np.ndarray) -> bool:
    """tokens int32 [n]. The key has the bytes of the packed integers, and its elements are the pairs."""
    key, plain = bigram_key(tokens), tokens.tolist()
    pairs = list(zip((key >> 32).tolist(), (key & 0xFFFFFFFF).tolist()))
    return key.tobytes() == b"".join(element.to_bytes(8, sys.byteorder) for element in packed_of(plain)) and pairs == tuples_of(plain)


def check(sizes: list[int]) -> int:
    """Returns the exit code."""
    rng = np.random.default_rng(7)
    print("| tokens | ids | key |")
    print("|---:|---|---|")
    failed = False
    for num_tokens in sizes:
        for ids, limit in (("of a vocabulary", VOCAB_SIZE), ("any int32", LARGEST_ID + 1)):
            tokens = rng.integers(0, limit, num_tokens, dtype=np.int64).astype(np.int32)
            tokens[:1], tokens[-1:] = limit - 1, limit - 1
            right = is_right(tokens)
            failed |= not right
            print(f"| {num_tokens} | {ids} | {'equal' if right else 'DIFFERENT'} |")
    return int(failed)


def times_of(tokens: np.ndarray, repeats: int) -> tuple[float, float, float]:
    """Microseconds of bigram_key, of tuples, of integers packed in Python. tokens int32 [n]."""
    plain = tokens.tolist()
    ours = median_us(lambda: bigram_key(tokens), max(repeats, 101))
    return ours, median_us(lambda: tuples_of(plain), repeats), median_us(lambda: packed_of(plain), repeats)


def measure(sizes: list[int], repeats: int) -> None:
    rng = np.random.default_rng(7)
    print("| tokens | bigram_key us | tuples us | packed in Python us | tuples / bigram_key |")
    print("|---:|---:|---:|---:|---:|")
    for num_tokens in sizes:
        ours, tuples, packed = times_of(rng.integers(0, VOCAB_SIZE, num_tokens, dtype=np.int32), repeats)
        print(f"| {num_tokens} | {ours:.1f} | {tuples:.1f} | {packed:.1f} | {tuples / ours:.0f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of timing")
    parser.add_argument("--num-tokens", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    if args.check:
        return check(args.num_tokens)
    measure(args.num_tokens, args.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
