#!/usr/bin/env python3
"""Ways in which every rank gets the prefix rows of one layer that the other ranks own, CPU ranks of one host.

    PYTHONPATH=python python benchmark/hicache/bench_cp_shared_kv_prefetch_collective.py --ranks 2 4

dense       all-reduce of a buffer for the rows of all ranks, zeros but for the own ones (gloo)
collective  all-gather of the own rows, packed (gloo)
peer copy   each rank writes its rows to shared memory, a barrier, each copies all rows out
peer        the same without copying out: the reader works on the rows where they lie
pool        rows of earlier steps are in the pools, which all ranks map: one barrier, nothing is written

Microseconds for one layer: the slowest rank's mean of a run, median of --repeats runs.
"""
import argparse
import multiprocessing as mp
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from sglane.distributed.exchange.peer import PeerExchange
from sglane.distributed.groups import close_groups, init_groups

WAYS = ("dense", "collective", "peer copy", "peer", "pool")
SIZES = tuple(1 << bits for bits in range(16, 27, 2))  # bytes per rank: 64 KiB to 64 MiB
#: Bytes that a run moves per rank, as far as MOST_CALLS allows.
RUN_BYTES = 1 << 28
MOST_CALLS, FEWEST_CALLS = 300, 4


def num_calls(num_bytes: int) -> int:
    return max(FEWEST_CALLS, min(MOST_CALLS, RUN_BYTES // num_bytes))


def run_us(call: Callable[[], object], calls: int) -> float:
    """Mean of a run, after two calls that take memory."""
    call(), call()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def dense(own: torch.Tensor, rank: int, size: int) -> Callable[[], object]:
    every = torch.zeros(size, own.numel())

    def call() -> None:
        every.zero_()
        every[rank] = own
        dist.all_reduce(every)
    return call


def rank_main(rank: int, size: int, folder: str, sizes: list[int], repeats: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    collective = init_groups(rank, size, f"file://{folder}/collective", "cpu", "collective")
    groups = init_groups(rank, size, f"file://{folder}/peer", "cpu", "peer")
    peer = groups.attention
    assert isinstance(peer, PeerExchange)
    for num_bytes in sizes:
        own = torch.rand(num_bytes // 4)
        ways: dict[str, Callable[[], object]] = {
            "dense": dense(own, rank, size),
            "collective": lambda own=own: collective.attention.all_gather(own),
            "peer copy": lambda own=own: peer.all_gather(own),
            "peer": lambda own=own: peer.gather_in_place(own),
            "pool": peer.barrier,
        }
        assert torch.equal(ways["collective"](), ways["peer copy"]()) and torch.equal(ways["peer"](), ways["collective"]())
        for _ in range(repeats):
            for name in WAYS:
                groups.step.barrier()
                pipe.send((num_bytes, name, run_us(ways[name], num_calls(num_bytes))))
    close_groups(groups)
    close_groups(collective)


def measure(size: int, sizes: list[int], repeats: int) -> dict[tuple[int, str], float]:
    """(bytes per rank, way) -> microseconds."""
    context = mp.get_context("spawn")
    runs: dict[tuple[int, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(size)]
        processes = [context.Process(target=rank_main, args=(rank, size, folder, sizes, repeats, end), daemon=True)
                     for rank, (_, end) in enumerate(pipes)]
        for process, (_, end) in zip(processes, pipes):
            process.start()
            end.close()
        for _ in range(len(sizes) * repeats * len(WAYS)):
            found = [pipe.recv() for pipe, _ in pipes]
            runs.setdefault(found[0][:2], []).append(max(us for _, _, us in found))
        for process in processes:
            process.join()
    return {key: statistics.median(values) for key, values in runs.items()}


def in_words(num_bytes: int) -> str:
    return f"{num_bytes >> 10} KiB" if num_bytes < 1 << 20 else f"{num_bytes >> 20} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes per rank")
    parser.add_argument("--max-total-bytes", type=int, default=1 << 28, help="sizes whose rows of all ranks are more than this are left out")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print("| ranks | bytes per rank | " + " | ".join(f"{way}, us" for way in WAYS) + " | dense/collective | collective/peer copy | collective/peer |")
    print("|" + "---|" * (len(WAYS) + 5))
    for size in args.ranks:
        sizes = [num_bytes for num_bytes in args.sizes if num_bytes * size <= args.max_total_bytes]
        found = measure(size, sizes, args.repeats)
        for num_bytes in sizes:
            times = {way: found[num_bytes, way] for way in WAYS}
            base = times["collective"]
            ratios = [f"{ratio:.1f}" for ratio in (times["dense"] / base, base / times["peer copy"], base / times["peer"])]
            cells = [str(size), in_words(num_bytes), *(f"{times[way]:.0f}" for way in WAYS), *ratios]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
