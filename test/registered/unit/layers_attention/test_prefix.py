"""Extends over prefixes: lanes that map each other's pools or gather, tiles of bounded scratch memory, prefetch; everything invalid is NaN."""
import itertools

import numpy as np
import pytest
import torch

from kits.attention_world import NUM_LAYERS, MlaCall, MlaData, World, assign_pages, dense_gqa
from sglane import environ
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


def options_of(transport: str, page_size: int, cp_size: int, tiled: bool) -> dict[str, object]:
    """tiled: one page of each lane in a tile."""
    return {"mapped": transport == "mapped", "scratch_tokens": 2 * page_size * cp_size if tiled else 1 << 17}


@pytest.fixture(autouse=True)
def prefetch_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environ, "SGLANE_CP_PREFETCH_MIN_TOKENS", 1)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(("cp_size", "page_size", "transport"), [
    (1, 4, "gathered"), (2, 1, "gathered"), (2, 16, "mapped"), (3, 4, "mapped"), (3, 4, "gathered"), (4, 4, "gathered")])
@pytest.mark.parametrize("kind", KINDS)
def test_extends_over_prefixes(kind: str, cp_size: int, page_size: int, transport: str, tiled: bool) -> None:
    before = fallback.counts()
    Scene(kind, page_size, cp_size, **options_of(transport, page_size, cp_size, tiled)).run(2 * page_size + 3)
    assert fallback.counts() == before


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("transport", ["mapped", "gathered"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_combination(kind, cp_size, page_size, transport, tiled, ties, prefetch, monkeypatch) -> None:
    if not prefetch:
        monkeypatch.setattr(environ, "SGLANE_CP_PREFETCH_MIN_TOKENS", 1 << 30)
    for chunk in (page_size + 1, 3 * page_size * cp_size, 1 << 20):
        Scene(kind, page_size, cp_size, ties, **options_of(transport, page_size, cp_size, tiled)).run(chunk)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_ties_across_tiles(cp_size: int) -> None:
    Scene("dsa", 4, cp_size, True, scratch_tokens=8 * cp_size).run(11)
