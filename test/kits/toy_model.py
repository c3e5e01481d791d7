"""A small language model without a checkpoint, written against AttentionOps, and a naive AttentionOps as its reference."""
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kits.attention_world import MlaData, dense_gqa
from sglane.forward.forward_batch import SHARED_SELECTION, AttentionOps, ForwardBatch, IndexInputs

HEADS, KV_HEADS, DIM, LATENT, ROPE, INDEX_HEADS, INDEX_DIM, TOPK = 4, 2, 8, 12, 4, 6, 8, 10
INDEX_SCALE = INDEX_DIM ** -0.5
SHARED_LAYERS = (2,)


def prompt(seed: int, length: int) -> list[int]:
    """Random tokens of ToyConfig's vocabulary."""
    return np.random.default_rng(seed).integers(0, 61, length).tolist()


@dataclass(frozen=True)
class ToyConfig:
    """kind: gqa, mla (dense) or dsa (layer 2 shares layer 1's selection). has_draft: there is a draft layer, of the same kind."""

    kind: str
    has_draft: bool = False
    hidden_size: int = 32
    vocab_size: int = 61
    num_layers: int = 3
    context_length: int = 2048
    dtype: str = "float32"

    def kv_planes(self) -> tuple[tuple[str, int, int], ...]:
        width = 2 * KV_HEADS * DIM if self.kind == "gqa" else LATENT + ROPE
        num_index_layers = self.num_layers - len(SHARED_LAYERS) if self.kind == "dsa" else 0
        num_draft_layers = int(self.has_draft)
        return (("target.kv", self.num_layers, width), ("target.index", num_index_layers, INDEX_DIM),
                ("draft.kv", num_draft_layers, width), ("draft.index", num_draft_layers * (self.kind == "dsa"), INDEX_DIM))

    def written_after(self) -> dict[str, tuple[int, ...]]:
        return {name: (self.num_layers,) if name.startswith("draft.") else tuple(range(num_layers)) for name, num_layers, _ in self.kv_planes()}

    def query_widths(self) -> tuple[int, int, int]:
        if self.kind == "gqa":
            return HEADS * DIM, HEADS * (DIM + 1), 0
        queries, partial = HEADS * (DIM + ROPE), HEADS * (LATENT + 1)
        return (queries + INDEX_HEADS * (INDEX_DIM + 1), partial, TOPK) if self.kind == "dsa" else (queries, partial, 0)


class ToyModel:
    """Random weights from a fixed seed."""

    def __init__(self, config: ToyConfig):
        gen = torch.Generator().manual_seed(11)
        hidden = config.hidden_size
        self.config = config
        self.weight_bytes = 0
        self._embedding = torch.randn(config.vocab_size, hidden, generator=gen)
        self._positions = torch.randn(config.context_length, hidden, generator=gen)
        sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM, "q_rope": HEADS * ROPE, "kv": LATENT + ROPE,
                 "iq": INDEX_HEADS * INDEX_DIM, "ik": INDEX_DIM, "iw": INDEX_HEADS}
        self._weights = [{name: torch.randn(hidden, size, generator=gen) * hidden ** -0.5 for name, size in sizes.items()}
                         for _ in range(config.num_layers)]
        self._out = [torch.randn(HEADS * DIM, hidden, generator=gen) for _ in range(config.num_layers)]
        self._w_uk, self._w_uv = (torch.randn(HEADS, DIM, LATENT, generator=gen) for _ in range(2))
        self._draft_weights = {name: torch.randn(hidden, size, generator=gen) * hidden ** -0.5 for name, size in sizes.items()}
        self._draft_out = torch.randn(HEADS * DIM, hidden, generator=gen) * 0.3

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self._embedding[batch.tokens] + self._positions[batch.positions]
        for layer in range(self.config.num_layers):
            h = torch.nn.functional.layer_norm(x, x.shape[-1:])
            x = x + self._attend(batch.attention, layer, h, self._weights[layer]).flatten(1) @ self._out[layer]
            batch.hooks.layer_end(layer)
        return torch.nn.functional.layer_norm(x, x.shape[-1:])[batch.outputs]

    def draft(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        x = self._embedding[batch.tokens] + self._positions[batch.positions] + 2.0 * hidden
        h = torch.nn.functional.layer_norm(x, x.shape[-1:])
        x = x + self._attend(batch.attention, 0, h, self._draft_weights).flatten(1) @ self._draft_out
        batch.hooks.layer_end(self.config.num_layers)
        return torch.nn.functional.layer_norm(x, x.shape[-1:])[batch.outputs]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._embedding.T

    def _attend(self, attention: AttentionOps, layer: int, h: Tensor, weights: dict[str, Tensor]) -> Tensor:
        w = {name: h @ weight for name, weight in weights.items()}
        q = w["q"].unflatten(1, (HEADS, DIM))
        if self.config.kind == "gqa":
            return attention.gqa(layer, q, w["k"].unflatten(1, (KV_HEADS, DIM)), w["v"].unflatten(1, (KV_HEADS, DIM)), 0.4)
        index: object = None
        if self.config.kind == "dsa":
            index = SHARED_SELECTION
            if layer not in SHARED_LAYERS or weights is self._draft_weights:
                index = IndexInputs(layer, w["iq"].unflatten(1, (INDEX_HEADS, INDEX_DIM)), w["ik"], w["iw"], INDEX_SCALE, TOPK)
        return attention.mla(layer, q, w["q_rope"].unflatten(1, (HEADS, ROPE)), w["kv"], self._w_uk, self._w_uv, 0.4, index)

    def reference(self, tokens: list[int]) -> Tensor:
        """Logits [T, V] of a whole sequence, by naive attention."""
        ids, every = torch.tensor(tokens), torch.arange(len(tokens))
        return self.logits(self.forward(ForwardBatch(ids, every, every, NaiveAttention(), NoHooks())))

    def draft_states(self, tokens: list[int], chained: int = 0) -> tuple[Tensor, list[int]]:
        """The draft layer's output for rows [0, T - 1), [T - 1, hidden], by naive attention, and `chained` drafts."""
        ids, every = torch.tensor(tokens), torch.arange(len(tokens))
        hidden = self.forward(ForwardBatch(ids, every, every, NaiveAttention(), NoHooks()))[:-1]
        following, drafts = list(tokens[1:]), []
        while True:
            rows = torch.arange(len(following))
            found = self.draft(ForwardBatch(torch.tensor(following), rows, rows, NaiveAttention(), NoHooks()), hidden)
            if len(drafts) == chained:
                return found[:len(tokens) - 1], drafts
            drafts.append(int(self.logits(found[-1]).argmax()))
            following, hidden = [*following, drafts[-1]], torch.cat((hidden, found[-1:]))

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """What an undisturbed greedy run gives."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.reference(tokens)[-1].argmax()))
        return tokens[len(prompt):]


class NoHooks:
    def layer_end(self, layer: int) -> None:
        pass


class NaiveAttention:
    """AttentionOps of one whole sequence in one call, without a cache."""

    def gqa(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return dense_gqa(q, k, v, scale)

    def mla(self, layer: int, q_nope: Tensor, q_rope: Tensor, kv: Tensor, w_uk: Tensor, w_uv: Tensor, scale: float, index: object) -> Tensor:
        if isinstance(index, IndexInputs):
            data = MlaData(q_nope, q_rope, kv, index.q, index.k, index.weights)
            self._sets = data.selected(index.scale, index.topk)
        empty = q_nope[:0]
        sets = None if index is None else self._sets
        return MlaData(q_nope, q_rope, kv, empty, empty, empty).dense(w_uk, w_uv, scale, sets)
