"""Slots, pages and steps of random data for attention tests, with a dense reference."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kits.thread_ranks import ThreadGroup
from sglane.distributed.groups import Groups, local_groups
from sglane.forward.forward_batch import SHARED_SELECTION, IndexInputs
from sglane.forward.token_split import Entry, split_tokens
from sglane.layers.attention.paged import PagedAttention
from sglane.layers.attention.plane import Plane
from sglane.layers.attention.prefetch import PrefetchThread, PrefixReader
from sglane.layers.attention.prefix import prefix_pages
from sglane.layers.attention.step_view import StepRules, build_view

torch.set_num_threads(1)
NUM_LAYERS = 2


def assign_pages(rng: np.random.Generator, lengths: list[int], page_size: int, cp_size: int) -> list[np.ndarray]:
    """Random distinct pages for slots of these lengths; no page of a sink row."""
    counts = [-(-length // page_size) for length in lengths]
    ids = rng.permutation(np.arange(cp_size, cp_size + sum(counts) + 7)).astype(np.int32)
    return np.split(ids[:sum(counts)], np.cumsum(counts)[:-1])


def poisoned_plane(name: str, num_rows: int, page_size: int, width: int, dtype: torch.dtype = torch.float32) -> Plane:
    buffer = torch.full((num_rows, NUM_LAYERS, page_size, width), float("nan"), dtype=dtype)
    buffer[0] = 0.0
    return Plane(name, buffer)


@dataclass
class World:
    """`steps`: lists of (slot, number of tokens); one token of a slot that has a prefix may be a continue."""

    page_size: int
    cp_size: int
    pages: list[np.ndarray]
    kv_width: int
    index_width: int = 1  # 1: there is no such plane
    mapped: bool = False  # lanes read each other's planes
    scratch_tokens: int = 1 << 17
    gathers_queries: Callable[[Sequence[tuple[int, int]]], list[bool]] = lambda extends: [False] * len(extends)
    lengths: dict[int, int] = field(default_factory=dict)
    planes: list[tuple[Plane, Plane]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows = 2 + max(int(page.max()) for page in self.pages) // self.cp_size
        self.planes = [(poisoned_plane("target.kv", rows, self.page_size, self.kv_width),
                        poisoned_plane("target.index", rows, self.page_size, self.index_width)) for _ in range(self.cp_size)]
        self._threads = [PrefetchThread() for _ in range(self.cp_size)] if self.cp_size > 1 else [None]

    def step(self, extends: list[tuple[int, int]], continues: list[int], call, tap=None) -> tuple[Tensor, list[tuple[int, int]]]:
        """call(attention, layer, slots [n], positions [n]) -> o [n, ...] for local tokens.

        Returns o of all tokens in global order, for each layer [NUM_LAYERS, T, ...], and (slot, position) of each token.
        """
        entries = [Entry(slot, self.lengths.get(slot, 0), n, self.pages[slot]) for slot, n in extends]
        entries += [Entry(slot, self.lengths[slot], 1, self.pages[slot]) for slot in continues]
        split = split_tokens(entries, self.page_size, self.cp_size)
        slots = np.array([entry.slot for entry in entries])[split.entries]

        def rank_work(rank: int, groups: Groups):
            local = split.local(rank)
            view = build_view(entries, len(extends), split, rank, self.cp_size, self.page_size, torch.device("cpu"),
                              StepRules(self.scratch_tokens, self.gathers_queries))
            lanes = list(zip(*self.planes)) if self.mapped else [[], []]
            sources = {plane.name: prefix_pages(plane, lane, groups.prefetch) for plane, lane in zip(self.planes[rank], lanes) if plane.width > 1}
            with PrefixReader(sources, view.prefix, self._threads[rank]) as prefix:
                attention = PagedAttention(*self.planes[rank], view, groups.attention, prefix, tap)
                return torch.stack([call(attention, layer, slots[local], split.positions[local]) for layer in range(NUM_LAYERS)])

        if self.cp_size == 1:
            self.last_groups = local_groups()
            results = [rank_work(0, self.last_groups)]
        else:
            group = ThreadGroup(self.cp_size)
            self.last_groups = group.groups(0)
            results = group.run(lambda rank: rank_work(rank, group.groups(rank)))
        joined = torch.cat(results, 1)
        out = torch.empty_like(joined)
        out[:, split.order] = joined
        for entry in entries:
            self.lengths[entry.slot] = entry.start + entry.num_tokens
        return out, list(zip(slots.tolist(), split.positions.tolist()))


def dense_gqa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [T, H, D], k and v [T, Hkv, D] of one slot in float64; causal; returns [T, H, D]."""
    rep = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(rep, 1).double(), v.repeat_interleave(rep, 1).double()
    scores = torch.einsum("shd,thd->hst", q.double(), k) * scale
    mask = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hst,thd->shd", scores.masked_fill(mask, float("-inf")).softmax(-1), v).float()


def naive_topk(scores: np.ndarray, topk: int) -> np.ndarray:
    """Positions of the best keys by (score descending, position ascending), ascending."""
    return np.sort(np.lexsort((np.arange(len(scores)), -scores))[:topk])


@dataclass
class MlaData:
    """Random inputs of one slot for all positions, all layers alike."""

    q_nope: Tensor
    q_rope: Tensor
    kv: Tensor
    index_q: Tensor
    index_k: Tensor
    index_w: Tensor

    @staticmethod
    def random(gen: torch.Generator, length: int, heads: int = 4, nope: int = 8, rope: int = 4, latent: int = 16, index_heads: int = 4,
               index_dim: int = 8, ties: bool = False) -> "MlaData":
        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen)
        index_q, index_k, index_w = rand(length, index_heads, index_dim), rand(length, index_dim), rand(length, index_heads)
        if ties:  # small integers: scores are exact in float32 and tie often
            index_q, index_k, index_w = index_q.round().clamp(-1, 1), index_k.round().clamp(-1, 1), index_w.round().clamp(-1, 1)
        return MlaData(rand(length, heads, nope), rand(length, heads, rope), rand(length, latent + rope), index_q, index_k, index_w)

    def selected(self, scale: float, topk: int) -> list[np.ndarray]:
        """Per position, the exact set."""
        dots = torch.einsum("shd,td->sht", self.index_q.double() * scale, self.index_k.double()).relu()
        scores = torch.einsum("sh,sht->st", self.index_w.double(), dots).float().numpy()
        return [naive_topk(scores[i, :i + 1], topk) for i in range(len(scores))]

    def dense(self, w_uk: Tensor, w_uv: Tensor, scale: float, sets: list[np.ndarray] | None) -> Tensor:
        """[T, H, dv], expanded form in float64."""
        latent, rope = self.kv[:, :w_uk.shape[2]].double(), self.kv[:, w_uk.shape[2]:].double()
        k = torch.einsum("tc,hdc->thd", latent, w_uk.double())
        v = torch.einsum("tc,hdc->thd", latent, w_uv.double())
        scores = torch.einsum("shd,thd->hst", self.q_nope.double(), k) + torch.einsum("shd,td->hst", self.q_rope.double(), rope)
        visible = torch.ones(len(latent), len(latent)).tril().bool()
        if sets is not None:
            visible = torch.zeros_like(visible)
            for i, chosen in enumerate(sets):
                visible[i, torch.from_numpy(chosen)] = True
        return torch.einsum("hst,thd->shd", (scores * scale).masked_fill(~visible, float("-inf")).softmax(-1), v).float()


class MlaCall:
    """Feeds the data of the slots to `mla`; layer 1 is an IndexShare layer where `share`."""

    def __init__(self, data: list[MlaData], w_uk: Tensor, w_uv: Tensor, scale: float, topk: int | None, share: bool = False):
        self._data, self._weights, self._scale = data, (w_uk, w_uv), scale
        self._topk, self._share = topk, share

    def __call__(self, attention: PagedAttention, layer: int, slots: np.ndarray, positions: np.ndarray) -> Tensor:
        def rows(name: str) -> Tensor:
            every = [getattr(self._data[slot], name)[position] for slot, position in zip(slots, positions)]
            return torch.stack(every) if every else getattr(self._data[0], name)[:0]
        index: object = None
        if self._topk is not None:
            index = IndexInputs(layer, rows("index_q"), rows("index_k"), rows("index_w"), 0.25, self._topk)
            if self._share and layer == 1:
                index = SHARED_SELECTION
        return attention.mla(layer, rows("q_nope"), rows("q_rope"), rows("kv"), *self._weights, self._scale, index)
