"""Cost of the radix tree's verbs, beside a plain memcmp of the same bytes and beside per-token Python.

    PYTHONPATH=python python benchmark/radix/bench_radix.py [--num-tokens 131072] [--page-size 64] [--repeats 15]

Times are medians in microseconds. Only ratios inside one run mean anything on a busy machine.
"""
import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from sglane.mem_cache.page_layout import PageLayout, Pages
from sglane.mem_cache.radix_cache import RadixCache
from sglane.mem_cache.radix_key import RadixKey, bigram_key

CP_SIZE = 4


def median_us(action: Callable[[], object], repeats: int, prepare: Callable[[], object] | None = None) -> float:
    """Median wall time of one call; `prepare` runs before each and is not timed."""
    times = []
    for _ in range(repeats):
        if prepare is not None:
            prepare()
        start = time.perf_counter_ns()
        action()
        times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)


def plain_prefix(a: list[int], b: list[int]) -> int:
    """What a tree of Python lists does."""
    length = 0
    for left, right in zip(a, b):
        if left != right:
            break
        length += 1
    return length


class Bench:
    def __init__(self, num_tokens: int, page_size: int, repeats: int) -> None:
        self.repeats = repeats
        self.layout = PageLayout(page_size, CP_SIZE)
        self.rng = np.random.default_rng(7)
        self.key: RadixKey = self.rng.integers(0, 150_000, num_tokens, dtype=np.int64)
        self.next_page = CP_SIZE
        self.rows: list[tuple[str, float, float]] = []  # name, us, memcmp of the same bytes in us

    def pages(self, num_tokens: int) -> Pages:
        num_pages = self.layout.num_pages(num_tokens)
        self.next_page += num_pages
        return np.arange(self.next_page - num_pages, self.next_page, dtype=np.int32)

    def insert(self, tree: RadixCache, key: RadixKey) -> None:
        """Insert as a request does: lease the root, give the pages, end the lease."""
        hit = tree.match(key[:0], "")
        tree.insert(hit.node, key, self.pages(len(key)))
        tree.unpin(hit.node)

    def match_and_unpin(self, tree: RadixCache, key: RadixKey, num_expected: int) -> float:
        """Median of match alone; the lease is ended outside the timed part, so each match pins its whole path anew."""
        held = []

        def end_leases() -> None:
            for hit in held:
                assert hit.num_tokens == num_expected, f"hit {hit.num_tokens}, not {num_expected}"
                tree.unpin(hit.node)
                if hit.source is not None:
                    tree.unpin(hit.source.node)
            held.clear()

        time_us = median_us(lambda: held.append(tree.match(key, "")), self.repeats, end_leases)
        end_leases()
        return time_us

    def memcmp_us(self, key: RadixKey) -> float:
        ours, theirs = key.tobytes(), bytes(bytearray(key.tobytes()))
        return median_us(lambda: ours == theirs, self.repeats)

    def report(self, name: str, time_us: float, memcmp_us: float) -> None:
        self.rows.append((name, time_us, memcmp_us))

    def one_node(self) -> None:
        tree = RadixCache(self.layout)
        self.insert(tree, self.key)
        memcmp = self.memcmp_us(self.key)
        query = self.key.copy()
        self.report("match, one node", self.match_and_unpin(tree, query, len(query)), memcmp)
        self.report("hint, one node", median_us(lambda: tree.hint(query, ""), self.repeats), memcmp)
        ours, theirs = self.key.tolist(), query.tolist()
        self.report("per-token Python, same compare", median_us(lambda: plain_prefix(ours, theirs), self.repeats), memcmp)
        broken = self.key.copy()
        broken[len(broken) * 9 // 10 + 3] += 1
        common = len(broken) * 9 // 10 + 3
        self.report("hint, breaks at 90 %", median_us(lambda: tree.hint(broken, ""), self.repeats), self.memcmp_us(self.key[:common]))

    def path_of_nodes(self, num_nodes: int) -> None:
        """A path whose nodes all have a second child, so that they stay apart."""
        tree = RadixCache(self.layout)
        step = len(self.key) // num_nodes
        for index in range(1, num_nodes + 1):
            self.insert(tree, self.key[: index * step])
            branch = self.key[: index * step + 1].copy()
            branch[-1:] = 200_000
            self.insert(tree, branch)
        query = self.key[: num_nodes * step].copy()
        self.report(f"match, path of {num_nodes} nodes", self.match_and_unpin(tree, query, len(query)), self.memcmp_us(query))

    def wide_tree(self, num_leaves: int) -> None:
        """Many children of the root; the query follows one of them."""
        tree = RadixCache(self.layout)
        short = 4 * self.layout.page_size
        for _ in range(num_leaves - 1):
            self.insert(tree, self.rng.integers(0, 150_000, short, dtype=np.int64))
        self.insert(tree, self.key)
        query = self.key.copy()
        self.report(f"match, tree of {num_leaves} leaves", self.match_and_unpin(tree, query, len(query)), self.memcmp_us(query))
        other = self.key[: 4 * self.layout.page_size].copy()
        other[-1] += 1
        self.report(f"hint of {len(other)}, tree of {num_leaves}", median_us(lambda: tree.hint(other, ""), self.repeats), self.memcmp_us(other))
        per_lane = -(-1024 // self.layout.page_size // CP_SIZE)
        deficit = np.full(CP_SIZE, max(per_lane, 1), np.int64)
        self.report(f"evict {int(deficit.sum())} pages of {num_leaves} leaves", median_us(lambda: tree.evict(deficit), self.repeats), 0)

    def insert_fresh(self) -> None:
        """Into an empty tree, in memory that was in use before (else page faults of the copied key are most of the cost)."""
        pages, tree = self.pages(len(self.key)), RadixCache(self.layout)
        leases = []

        def empty() -> None:
            for lease in leases:
                tree.unpin(lease)
            leases.clear()
            tree.clear()
            leases.append(tree.match(self.key[:0], "").node)

        self.report("insert, fresh", median_us(lambda: tree.insert(leases[0], self.key, pages), self.repeats, empty), self.memcmp_us(self.key))

    def packing(self) -> None:
        tokens = self.key.astype(np.int32)
        as_list = tokens.tolist()
        fast = median_us(lambda: bigram_key(tokens), self.repeats)
        slow = median_us(lambda: list(zip(as_list, as_list[1:])), self.repeats)
        print(f"bigram packing: {fast * 1000 / len(tokens):.2f} ns a token; list of tuples {slow * 1000 / len(tokens):.1f} ns a token")

    def print_table(self) -> None:
        print(f"{len(self.key)} tokens, page size {self.layout.page_size}, {CP_SIZE} lanes, median of {self.repeats}")
        print(f"{'':36}{'us':>10}{'memcmp us':>12}{'ratio':>8}")
        for name, time_us, memcmp_us in self.rows:
            compare = f"{memcmp_us:12.1f}{time_us / memcmp_us:8.2f}" if memcmp_us else f"{'-':>12}{'-':>8}"
            print(f"{name:36}{time_us:10.1f}{compare}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-tokens", type=int, default=131072)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    bench = Bench(args.num_tokens, args.page_size, args.repeats)
    bench.one_node()
    bench.path_of_nodes(64)
    bench.wide_tree(4096)
    bench.insert_fresh()
    bench.print_table()
    bench.packing()


if __name__ == "__main__":
    main()
