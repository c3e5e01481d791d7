"""AttentionOps of one sequence: every layer keeps growing tensors of keys and values. Slow, simple, nothing shared with the engine's."""
import torch
from torch import Tensor

from sglane.forward.forward_batch import ForwardBatch, IndexInputs, SharedSelection


class NoHooks:
    """LayerHooks that record what was called."""

    def __init__(self):
        self.layers: list[int] = []

    def layer_end(self, layer: int) -> None:
        self.layers.append(layer)


class DenseAttention:
    """Feed chunks in order through `run`. `selections` has bool [n, T] per MLA layer of the last chunk, for sparse models."""

    def __init__(self):
        self.hooks = NoHooks()
        self.selections: list[Tensor] = []
        self._rows: dict[tuple[str, int], Tensor] = {}
        self._length = 0
        self._positions = torch.zeros(0, dtype=torch.int64)

    def run(self, model, tokens: Tensor) -> Tensor:
        """Feed tokens int64 [n] at the next positions; returns float32 logits [n, V]."""
        with torch.inference_mode():
            return model.logits(self.hidden(model, tokens))

    def hidden(self, model, tokens: Tensor) -> Tensor:
        """Feed tokens int64 [n] at the next positions; returns hidden [n, hidden] after the final norm."""
        with torch.inference_mode():
            return model.forward(self._batch(tokens))

    def draft(self, model, following: Tensor, hidden: Tensor) -> Tensor:
        """Feed the draft layer its next rows: the tokens after them int64 [n], and hidden [n, hidden]; returns [n, hidden]."""
        with torch.inference_mode():
            return model.draft(self._batch(following), hidden)

    def _batch(self, tokens: Tensor) -> ForwardBatch:
        self._positions = torch.arange(self._length, self._length + len(tokens))
        self._length += len(tokens)
        self.selections = []
        return ForwardBatch(tokens, self._positions, torch.arange(len(tokens)), self, self.hooks)

    def gqa(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        repeat = q.shape[1] // k.shape[1]
        keys = self._grow("k", layer, k).repeat_interleave(repeat, 1)  # [T, H, D]
        values = self._grow("v", layer, v).repeat_interleave(repeat, 1)
        scores = torch.einsum("nhd,thd->nht", q, keys).float() * scale
        weights = scores.masked_fill(~self._causal()[:, None], float("-inf")).softmax(-1)
        return torch.einsum("nht,thd->nhd", weights.to(q.dtype), values)

    def mla(self, layer: int, q_nope: Tensor, q_rope: Tensor, kv: Tensor, w_uk: Tensor, w_uv: Tensor, scale: float,
            index: IndexInputs | SharedSelection | None) -> Tensor:
        rows = self._grow("kv", layer, kv)
        latent, rope = rows.split([w_uk.shape[2], q_rope.shape[2]], 1)  # [T, ck], [T, dr]
        visible = self._causal()
        if isinstance(index, IndexInputs):
            visible = self._select(index)
        elif index is not None:
            visible = self.selections[-1]
        if index is not None:
            self.selections.append(visible)
        keys = torch.einsum("tc,hdc->thd", latent, w_uk)
        scores = (torch.einsum("nhd,thd->nht", q_nope, keys) + torch.einsum("nhr,tr->nht", q_rope, rope)).float() * scale
        weights = scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1)
        return torch.einsum("nht,thd->nhd", weights.to(kv.dtype), torch.einsum("tc,hdc->thd", latent, w_uv))

    def _select(self, index: IndexInputs) -> Tensor:
        """The topk best visible keys of each query, ties to the lower position."""
        keys = self._grow("index", index.layer, index.k)
        scores = torch.einsum("nhd,td->nht", index.q.float(), keys.float()).mul(index.scale).relu()
        scores = torch.einsum("nh,nht->nt", index.weights, scores).masked_fill(~self._causal(), float("-inf"))
        order = torch.argsort(scores, dim=-1, descending=True, stable=True)[:, :index.topk]
        return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, True) & self._causal()

    def _causal(self) -> Tensor:
        """bool [n, T]."""
        return torch.arange(self._length)[None] <= self._positions[:, None]

    def _grow(self, name: str, layer: int, new: Tensor) -> Tensor:
        old = self._rows.get((name, layer))
        self._rows[name, layer] = new if old is None else torch.cat((old, new))
        return self._rows[name, layer]
