"""Extends over prefixes: lanes that map each other's pools or gather, tiles of bounded scratch memory, prefetch; everything invalid is NaN."""
import functools
import itertools

import numpy as np
import pytest
import torch

from kits.attention_world import NUM_LAYERS, MlaCall, MlaData, World, assign_pages, dense_gqa
from sglane import environ
from sglane.layers.attention.cost import RowWidths, gathers_queries, queries_move_less
from sglane.utils import fallback

CPU = torch.device("cpu")
SCALE, INDEX_SCALE, TOPK = 0.3, 0.25, 12
KINDS = ["gqa", "mla", "dsa", "indexshare"]


def lengths_around(page_size: int, cp_size: int) -> list[int]:
    """Prompts shorter than a page, around a page per lane and two, and a long one."""
    some = cp_size * page_size
    return [max(1, page_size - 1), max(1, some - 1), some, some + 1, 2 * some, 2 * some + 1, 5 * some + 3]


class Scene:
    """Slots of random data, the last one a twin that shares the long slot's first pages, and what attention must give."""

    def __init__(self, kind: str, page_size: int, cp_size: int, ties: bool = False, **options: object):
        lengths = lengths_around(page_size, cp_size)
        gen = torch.Generator().manual_seed(1)
        self.kind, self.page_size = kind, page_size
        self.shared = 3 * cp_size * page_size  # tokens of the twin's prefix
        self.lengths = [*lengths, self.shared + 2 * page_size + 1]
        pages = assign_pages(np.random.default_rng(2), self.lengths, page_size, cp_size)
        pages[-1] = np.concatenate([pages[-2][:3 * cp_size], pages[-1][3 * cp_size:]])
        data = [MlaData.random(gen, n, ties=ties) for n in self.lengths]
        for rows in (data[-1].kv, data[-1].index_k):  # the twin's first tokens have the same keys
            rows[:self.shared] = (data[-2].kv if rows is data[-1].kv else data[-2].index_k)[:self.shared]
        self.world = World(page_size, cp_size, pages, 32 if kind == "gqa" else 20, 8, **options)
        self.seen: dict[tuple[int, int, int], set[int]] = {}
        if kind == "gqa":
            self._call, self.expected = self._gqa(gen)
        else:
            w_uk, w_uv = torch.randn(4, 8, 16, generator=gen) / 4, torch.randn(4, 6, 16, generator=gen) / 4
            topk = None if kind == "mla" else TOPK
            self.sets = [None if topk is None else d.selected(INDEX_SCALE, TOPK) for d in data]
            self._call = MlaCall(data, w_uk, w_uv, SCALE, topk, share=kind == "indexshare")
            self.expected = [d.dense(w_uk, w_uv, SCALE, found) for d, found in zip(data, self.sets)]

    def _gqa(self, gen: torch.Generator):
        q = [torch.randn(n, 4, 8, generator=gen) for n in self.lengths]
        k, v = ([torch.randn(n, 2, 8, generator=gen) for n in self.lengths] for _ in range(2))
        for rows in (k, v):
            rows[-1][:self.shared] = rows[-2][:self.shared]

        def call(attention, layer, slots, positions):
            found = [torch.stack([x[s][p] for s, p in zip(slots, positions)]) if len(slots) else x[0][:0] for x in (q, k, v)]
            return attention.gqa(layer, *found, SCALE)
        return call, [dense_gqa(*x, SCALE) for x in zip(q, k, v)]

    def tap(self, layer, slot, positions, chosen):
        for i, position in enumerate(positions.tolist()):
            found = range(position + 1) if chosen is None else [p for p in chosen[i].tolist() if p >= 0]
            self.seen.setdefault((layer, slot, position), set()).update(found)

    def step(self, extends: list[tuple[int, int]], continues: list[int]) -> None:
        out, tokens = self.world.step(extends, continues, self._call, self.tap)
        for layer in range(NUM_LAYERS):
            want = torch.stack([self.expected[slot][position] for slot, position in tokens])
            torch.testing.assert_close(out[layer], want, atol=1e-5, rtol=1e-5)

    def run(self, chunk: int, num_continues: int = 3) -> None:
        """Slots start one after another, so that cold extends, later chunks and continues meet in one step. The twin starts when its prefix
        is there."""
        done = dict.fromkeys(range(len(self.lengths)), 0)
        long, twin = len(done) - 2, len(done) - 1
        for number in itertools.count():
            extends, continues = [], []
            twin_can_start = done[long] >= self.shared
            for slot, length in enumerate(self.lengths):
                if slot == twin and done[twin] == 0:
                    if not twin_can_start:
                        continue
                    done[twin] = self.world.lengths[twin] = self.shared
                if done[slot] == length or (slot > number and slot < long):
                    continue
                prompt = max(1, length - num_continues)
                n = min(chunk, prompt - done[slot])
                if n > 0:
                    extends.append((slot, n))
                else:
                    continues.append(slot)
                done[slot] += max(n, 1)
            if not extends and not continues:
                break
            self.step(extends, continues)
        if self.kind in ("dsa", "indexshare"):
            layers = range(1 if self.kind == "indexshare" else NUM_LAYERS)
            assert {key: sorted(found) for key, found in self.seen.items()} == {
                (layer, slot, p): self.sets[slot][p].tolist() for layer in layers for slot, n in enumerate(self.lengths)
                for p in range(self.shared if slot == twin else 0, n)}


#: Which extends gather queries.
DIRECTIONS = {
    "keys": lambda extends: [False] * len(extends),
    "queries": lambda extends: [True] * len(extends),
    "both": lambda extends: [sum(tokens) % 2 == 1 for tokens in extends],
    "auto": functools.partial(gathers_queries, widths=RowWidths(28, 40, 50, TOPK), num_ranks=2, num_bytes_per_element=4),
}


def options_of(transport: str, page_size: int, cp_size: int, tiled: bool, direction: str = "keys") -> dict[str, object]:
    """tiled: one page of each lane in a tile."""
    return {"mapped": transport == "mapped", "scratch_tokens": 2 * page_size * cp_size if tiled else 1 << 17,
            "gathers_queries": DIRECTIONS[direction]}


@pytest.fixture(autouse=True)
def prefetch_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environ, "SGLANE_CP_PREFETCH_MIN_TOKENS", 1)


@pytest.mark.parametrize(("cp_size", "page_size", "transport", "direction", "tiled"), [
    (1, 4, "gathered", "keys", False), (1, 4, "gathered", "keys", True), (2, 1, "gathered", "auto", False), (2, 1, "gathered", "both", True),
    (2, 16, "mapped", "keys", True), (2, 16, "mapped", "queries", False), (3, 4, "mapped", "keys", False), (3, 4, "gathered", "keys", True),
    (3, 4, "gathered", "both", False), (4, 4, "gathered", "keys", False), (4, 4, "mapped", "queries", True)])
@pytest.mark.parametrize("kind", KINDS)
def test_extends_over_prefixes(kind: str, cp_size: int, page_size: int, transport: str, direction: str, tiled: bool) -> None:
    before = fallback.counts()
    Scene(kind, page_size, cp_size, **options_of(transport, page_size, cp_size, tiled, direction)).run(2 * page_size + 3)
    assert fallback.counts() == before


@pytest.mark.slow
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("direction", sorted(DIRECTIONS))
@pytest.mark.parametrize("transport", ["mapped", "gathered"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_combination(kind, cp_size, page_size, transport, direction, tiled, ties, monkeypatch) -> None:
    if cp_size == 1 and (transport, direction) != ("gathered", "keys"):
        pytest.skip("one rank has no such choice")
    if ties:  # and, to halve the number of runs, without prefetch
        monkeypatch.setattr(environ, "SGLANE_CP_PREFETCH_MIN_TOKENS", 1 << 30)
    for chunk in (page_size + 1, 3 * page_size * cp_size, 1 << 20):
        Scene(kind, page_size, cp_size, ties, **options_of(transport, page_size, cp_size, tiled, direction)).run(chunk)


@pytest.mark.parametrize(("cp_size", "direction"), [(1, "keys"), (2, "keys"), (2, "queries")])
def test_ties_across_tiles(cp_size: int, direction: str) -> None:
    Scene("dsa", 4, cp_size, True, scratch_tokens=8 * cp_size, gathers_queries=DIRECTIONS[direction]).run(11)


def test_one_call_per_direction_and_layer() -> None:
    """Extends of both directions and continues in one batch: the current rows, then the queries and the answers of all that ask, once a layer."""
    scene = Scene("gqa", 4, 2, gathers_queries=lambda extends: [num_new == 3 for _, num_new in extends])
    slots = range(4, 7)
    scene.step([(slot, 8) for slot in slots], [])
    scene.step([(4, 3), (5, 3), (6, 4)], [])
    assert scene.world.last_groups.attention.num_calls == NUM_LAYERS * 3
    scene.world.lengths[4] -= 1
    scene.step([(5, 3), (6, 4)], [4])
    assert scene.world.last_groups.attention.num_calls == NUM_LAYERS * 3


def test_the_cost_of_the_directions() -> None:
    """The longer the prefix and the fewer the new tokens, the better it is to send queries."""
    deepseek = RowWidths(576 + 128, 128 * 192 + 64 * 129, 128 * 513, 2048)
    asks = functools.partial(queries_move_less, widths=deepseek, num_ranks=8, num_bytes_per_element=2)
    assert not asks(0, 1) and not asks(100, 100)
    assert asks(1 << 17, 4) and not asks(1 << 10, 4)
    thresholds = [next(prefix for prefix in range(0, 1 << 24, 1 << 10) if asks(prefix, n)) for n in (1, 2, 4, 8, 64)]
    assert thresholds == sorted(thresholds) and len(set(thresholds)) == 5
    assert not queries_move_less(1 << 20, 1, deepseek, 1, 2)
    assert gathers_queries([(1 << 22, 200), (1 << 22, 100), (1 << 10, 8), (1 << 22, 100), (1 << 22, 100)], deepseek, 8, 2) == [
        False, True, False, True, False]
