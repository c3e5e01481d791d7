"""What a model's forward sees of a step: its local tokens, and attention and layer hooks to call."""
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sglane.forward.expert_rows import ExpertRows, LocalRows


@dataclass(frozen=True)
class IndexInputs:
    """Inputs of a DSA full layer's indexer for the n local tokens of this step.

    The score of query s for key t is sum over heads h of weights[s, h] * relu(scale * q[s, h] . k[t]), in float32.
    """

    layer: int  # layer of the index plane, counted over full layers only
    q: Tensor  # [n, Hi, Di] roped
    k: Tensor  # [n, Di] after k_norm and rope
    weights: Tensor  # [n, Hi] float32, Hi ** -0.5 included
    scale: float  # Di ** -0.5
    topk: int  # keys selected per query, the query's own position competes


class SharedSelection:
    """Marker type of an IndexShare layer: attend over the set that the last full layer selected."""


#: Pass this as `index` for an IndexShare layer.
SHARED_SELECTION = SharedSelection()


class AttentionOps(Protocol):
    """Attention of one step. Each call first writes the layer's new rows into the pools.

    All tensors have one row per local token of the step, in the order of `ForwardBatch.tokens`; n may be 0, and the calls
    must be made nevertheless, because ranks exchange rows inside them.
    """

    def gqa(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [n, H, D], k and v [n, Hkv, D], normed and roped; returns o [n, H, D] in q's type."""
        ...

    def mla(self, layer: int, q_nope: Tensor, q_rope: Tensor, kv: Tensor, w_uk: Tensor, w_uv: Tensor, scale: float,
            index: "IndexInputs | SharedSelection | None") -> Tensor:
        """q_nope [n, H, dn], q_rope [n, H, dr] roped, kv [n, ck + dr] = [latent | roped key], w_uk [H, dn, ck], w_uv [H, dv, ck];
        returns o [n, H, dv]. index: IndexInputs (DSA full layer), SHARED_SELECTION (IndexShare layer) or None (dense)."""
        ...


class LayerHooks(Protocol):
    """Called by the model at layer boundaries."""

    def layer_end(self, layer: int) -> None:
        """All of layer `layer` of this step has been computed by this rank."""
        ...


@dataclass(frozen=True)
class ForwardBatch:
    """The local tokens of one step. n = number of local tokens, possibly 0."""

    tokens: Tensor  # int64 [n]
    positions: Tensor  # int64 [n]
    outputs: Tensor  # int64 [m], ascending: the tokens whose final hidden states are wanted
    attention: AttentionOps
    hooks: LayerHooks
    experts: ExpertRows = LocalRows()  # for layers that compute all n tokens
    output_experts: ExpertRows = LocalRows()  # for the last layer, which computes `outputs` only
