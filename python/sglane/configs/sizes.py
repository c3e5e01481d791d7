"""Typed sizes of a model, whatever file format they came from."""
from dataclasses import dataclass
from typing import Literal, NamedTuple

#: Values of `model_type` that can be served.
SUPPORTED_MODEL_TYPES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "llama", "qwen3")


class ModelConfigError(ValueError):
    """A model cannot be served as it is described; the message names the key, the file and the reason."""


class KVPlane(NamedTuple):
    """One kind of bytes of a KV page."""

    name: str
    num_layers: int
    width: int  # elements per token and layer


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies. path: a folder (hf) or a file (gguf)."""

    path: str
    kind: Literal["hf", "gguf"]


@dataclass(frozen=True)
class RopeConfig:
    """Rotation frequencies. All families rotate by position * frequency in float32; only the frequencies differ."""

    theta: float
    kind: Literal["default", "yarn", "llama3", "factors"] = "default"
    factor: float = 1.0  # yarn, llama3: how much longer the context is than the original one
    original_positions: int = 0  # yarn, llama3: tokens of the original context
    beta_fast: float = 32.0  # yarn: rotations over the original context above which a frequency is kept
    beta_slow: float = 1.0  # yarn: ... below which it is divided by `factor`
    truncate: bool = True  # yarn: round the two borders outwards to whole dimensions
    amplitude: float = 1.0  # yarn: factor on cosine and sine
    mscale_all_dim: float = 0.0  # yarn with MLA: changes the softmax scale; 0 = it does not
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    factors: tuple[float, ...] = ()  # factors: divisor of each frequency


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention."""

    q_lora_rank: int | None  # None: queries come straight from the hidden states
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class IndexConfig:
    """The indexer of sparse attention, and which layers own one; the others reuse the selection of the last layer that does."""

    num_heads: int
    head_dim: int
    topk: int
    rope_interleave: bool  # rotate pairs (2j, 2j + 1); False: (j, j + d / 2)
    full_layers: tuple[int, ...]  # ascending; the first one is 0

    def plane_layer(self, layer: int) -> int | None:
        """The layer of the index plane that `layer` writes; None if it shares a selection."""
        return self.full_layers.index(layer) if layer in self.full_layers else None


@dataclass(frozen=True)
class MoeConfig:
    """Mixture of experts with a sigmoid router."""

    num_experts: int
    num_shared_experts: int
    topk: int
    intermediate_size: int  # of one expert
    num_groups: int
    topk_groups: int
    norm_topk_prob: bool
    scaling_factor: float  # on the routed experts only
    layers: frozenset[int]  # layers that have experts; the others are dense


@dataclass(frozen=True)
class DraftSource:
    """Where the draft layer lies. layers: numbers that it may have in the names of its tensors; the first one that is there counts."""

    path: str
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelConfig:
    """Everything that front and executors need to know of a model before its weights are read."""

    source: ModelSource
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of dense layers
    num_layers: int  # draft layers not counted
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of q and k; MLA: nope + rope
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_position_embeddings: int  # tokens
    context_length: int  # tokens; longest prompt + output that is served
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    num_draft_layers: int = 0  # declared; the weights may be absent
    mla: MlaConfig | None = None
    index: IndexConfig | None = None
    moe: MoeConfig | None = None
    draft: DraftSource | None = None  # None: the draft layer, if there is one, is not used

    def kv_planes(self) -> tuple[KVPlane, ...]:
        """Planes of a KV page.

        target.kv: [K | V] of all kv heads, or with MLA [latent | roped key]. target.index: index keys of the layers that own an indexer. draft.kv
        and draft.index: the same of the draft layer.
        """
        if self.mla is None:
            return (KVPlane("target.kv", self.num_layers, 2 * self.num_kv_heads * self.head_dim),)
        width = self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
        planes = [KVPlane("target.kv", self.num_layers, width)]
        if self.index is not None:
            planes.append(KVPlane("target.index", len(self.index.full_layers), self.index.head_dim))
        if self.draft is not None:
            planes.append(KVPlane("draft.kv", 1, width))
            if self.index is not None:
                planes.append(KVPlane("draft.index", 1, self.index.head_dim))
        return tuple(planes)

    def written_after(self) -> dict[str, tuple[int, ...]]:
        """For each layer of every plane the layer of the model after which its rows of a step are written; ascending. The draft layer comes last."""
        layers = {"target.kv": tuple(range(self.num_layers)), "draft.kv": (self.num_layers,), "draft.index": (self.num_layers,)}
        if self.index is not None:
            layers["target.index"] = self.index.full_layers
        return {plane.name: layers[plane.name] for plane in self.kv_planes()}

    def query_widths(self) -> tuple[int, int, int]:
        """Per token and layer: elements of the queries of all heads (those of the indexer and its head weights included), of their partial
        results with a log-sum-exp each, and keys that are selected (0: all)."""
        queries = self.num_heads * self.head_dim
        partial = self.num_heads * (self.head_dim if self.mla is None else self.mla.kv_lora_rank) + self.num_heads
        if self.index is None:
            return queries, partial, 0
        return queries + self.index.num_heads * (self.index.head_dim + 1), partial, self.index.topk
