"""Cost of the radix tree's verbs for token keys and for bigram keys, beside a plain memcmp of the same bytes and beside per-token Python.

    PYTHONPATH=python python benchmark/radix/bench_radix.py [--num-tokens 131072] [--page-size 64] [--repeats 15]

Times are medians in microseconds. Only ratios inside one run mean anything on a busy machine.
"""
import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from sglane.mem_cache.page_layout import PageLayout, Pages
from sglane.mem_cache.radix_cache import RadixCache
from sglane.mem_cache.radix_key import BIGRAM_BYTES, TOKEN_BYTES, RadixKey, bigram_key, token_key

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
    def __init__(self, num_tokens: int, page_size: int, repeats: int, bigram_keys: bool) -> None:
        self.repeats = repeats
        self.layout = PageLayout(page_size, CP_SIZE)
        self.rng = np.random.default_rng(7)
        self.kind, self.element_bytes = ("bigram", BIGRAM_BYTES) if bigram_keys else ("token", TOKEN_BYTES)
        self.key = self.random_key(num_tokens)
        self.next_page = CP_SIZE
        self.rows: list[tuple[str, float, float]] = []  # name, us, memcmp of the same bytes in us

    def random_key(self, num_elements: int) -> RadixKey:
        if self.element_bytes == TOKEN_BYTES:
            return token_key(self.rng.integers(0, 150_000, num_elements, dtype=np.int32))
        return bigram_key(self.rng.integers(0, 150_000, num_elements + 1, dtype=np.int32))

    def new_tree(self) -> RadixCache:
        return RadixCache(self.layout, self.element_bytes)

    def pages(self, num_tokens: int) -> Pages:
        num_pages = self.layout.num_pages(num_tokens)
        self.next_page += num_pages
        return np.arange(self.next_page - num_pages, self.next_page, dtype=np.int32)

    def insert(self, tree: RadixCache, key: RadixKey) -> None:
        """Insert as a request does: lease the root, give the pages, end the lease."""
        hit = tree.match(key[:0], "")
        tree.insert(hit.node, key, self.pages(len(key)))
        tree.unpin(hit.node)

    def match_and_unpin(self, tree: RadixCache, key: RadixKey, num_expected: int, met_before: Sequence[RadixKey] = ()) -> float:
        """Median of match alone; the lease is ended outside the timed part, so each match pins its whole path anew. met_before: keys that are
        looked up before each match, so that their nodes were met last."""
        held = []

        def prepare() -> None:
            for hit in held:
                assert hit.num_tokens == num_expected, f"hit {hit.num_tokens}, not {num_expected}"
                tree.unpin(hit.node)
                if hit.source is not None:
                    tree.unpin(hit.source.node)
            held.clear()
            for other in met_before:
                tree.hint(other, "")

        time_us = median_us(lambda: held.append(tree.match(key, "")), self.repeats, prepare)
        prepare()
        return time_us

    def memcmp_us(self, key: RadixKey) -> float:
        ours, theirs = key.tobytes(), bytes(bytearray(key.tobytes()))
        return median_us(lambda: ours == theirs, self.repeats)

    def report(self, name: str, time_us: float, memcmp_us: float) -> None:
        self.rows.append((name, time_us, memcmp_us))

    def one_node(self) -> None:
        tree = self.new_tree()
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
        tree = self.new_tree()
        step, page_size = len(self.key) // num_nodes, self.layout.page_size
        branches = []
        for index in range(1, num_nodes + 1):
            self.insert(tree, self.key[: index * step])
            if index < num_nodes:
                branches.append(self.key[: index * step + page_size].copy())
                branches[-1][index * step] = 200_000
                self.insert(tree, branches[-1])
        query = self.key[: num_nodes * step].copy()
        memcmp = self.memcmp_us(query)
        self.report(f"match, path of {num_nodes} nodes", self.match_and_unpin(tree, query, len(query)), memcmp)
        self.report("  after a match of each branch", self.match_and_unpin(tree, query, len(query), branches), memcmp)

    def wide_tree(self, num_leaves: int) -> None:
        """Many children of the root; the query follows one of them."""
        tree = self.new_tree()
        short = 4 * self.layout.page_size
        for _ in range(num_leaves - 1):
            self.insert(tree, self.random_key(short))
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
        pages, tree = self.pages(len(self.key)), self.new_tree()
        leases = []

        def empty() -> None:
            for lease in leases:
                tree.unpin(lease)
            leases.clear()
            tree.clear()
            leases.append(tree.match(self.key[:0], "").node)

        self.report("insert, fresh", median_us(lambda: tree.insert(leases[0], self.key, pages), self.repeats, empty), self.memcmp_us(self.key))

    def packing(self) -> None:
        tokens = self.rng.integers(0, 150_000, len(self.key), dtype=np.int32)
        as_list = tokens.tolist()
        fast = median_us(lambda: bigram_key(tokens), self.repeats)
        slow = median_us(lambda: list(zip(as_list, as_list[1:])), self.repeats)
        print(f"bigram packing: {fast * 1000 / len(tokens):.2f} ns a token; list of tuples {slow * 1000 / len(tokens):.1f} ns a token")

    def print_table(self) -> None:
        sizes = f"{len(self.key)} of {self.element_bytes} bytes, page size {self.layout.page_size}, {CP_SIZE} lanes"
        print(f"{self.kind} keys: {sizes}, median of {self.repeats}")
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
    for bigram_keys in (False, True):
        bench = Bench(args.num_tokens, args.page_size, args.repeats, bigram_keys)
        bench.one_node()
        bench.path_of_nodes(64)
        bench.wide_tree(4096)
        bench.insert_fresh()
        bench.print_table()
        if bigram_keys:
            bench.packing()


if __name__ == "__main__":
    main()
