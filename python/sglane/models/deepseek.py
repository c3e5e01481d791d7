"""DeepSeek-V3, DeepSeek-V3.2 and GLM-5: latent attention, sparse selection by an indexer, mixture of experts."""
import torch
from torch import Tensor

from sglane.configs.hf_rope import magnitude
from sglane.configs.sizes import IndexConfig, MlaConfig, ModelConfig
from sglane.forward.forward_batch import SHARED_SELECTION, ForwardBatch, IndexInputs, SharedSelection
from sglane.layers.linear import Linear
from sglane.layers.mlp import DenseMLP
from sglane.layers.moe.experts import MoE
from sglane.layers.norm import LayerNorm, RMSNorm
from sglane.layers.rotary import Angles, rotate_halves, rotate_pairs
from sglane.layers.weights import WeightSource
from sglane.models.causal_lm import CausalLM, DecoderLayer
from sglane.models.nextn import NextnLayer

#: The norms of the two latents have this eps whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


class Indexer:
    """Index queries, keys and head weights of one layer. The rotated part comes first, unlike in the attention's heads."""

    def __init__(self, config: ModelConfig, index: IndexConfig, mla: MlaConfig, weights: WeightSource, prefix: str):
        """prefix: the indexer's module name with a dot at its end."""
        assert mla.q_lora_rank is not None
        self._num_heads, self._head_dim, self._topk = index.num_heads, index.head_dim, index.topk
        self._rope_sizes = [mla.qk_rope_head_dim, index.head_dim - mla.qk_rope_head_dim]
        self._rotate = rotate_pairs if index.rope_interleave else rotate_halves
        self._query = Linear.load(weights, {f"{prefix}wq_b": index.num_heads * index.head_dim}, mla.q_lora_rank)
        self._key = Linear.load(weights, {f"{prefix}wk": index.head_dim}, config.hidden_size)
        self._key_norm = LayerNorm.load(weights, f"{prefix}k_norm", index.head_dim)
        # float32 [heads, hidden]: the selection is sensitive to these few weights.
        self._head_weights = weights.tensor(f"{prefix}weights_proj.weight", (index.num_heads, config.hidden_size), torch.float32)

    def __call__(self, x: Tensor, q_latent: Tensor, angles: Angles, plane_layer: int) -> IndexInputs:
        """x [n, hidden], q_latent [n, q_lora_rank]: what the attention of the same layer uses."""
        q = self._query(q_latent).unflatten(1, (self._num_heads, self._head_dim))  # [n, Hi, Di]
        k = self._key_norm(self._key(x))  # [n, Di]
        head_weights = torch.nn.functional.linear(x.float(), self._head_weights) * self._num_heads ** -0.5  # [n, Hi]
        return IndexInputs(plane_layer, self._roped(q, angles), self._roped(k, angles), head_weights, self._head_dim ** -0.5, self._topk)

    def _roped(self, x: Tensor, angles: Angles) -> Tensor:
        rope, rest = x.split(self._rope_sizes, -1)
        return torch.cat((self._rotate(rope, angles), rest), -1)


class LatentAttention:
    """MLA projections; with a sparse model also the indexer, or the marker that the last selection is used again."""

    def __init__(self, config: ModelConfig, mla: MlaConfig, weights: WeightSource, prefix: str, layer: int, plane_layer: int | None):
        """prefix: module name with a dot at its end. layer: of the plane target.kv. plane_layer: of the index plane, None without an indexer."""
        self._layer, self._plane_layer = layer, plane_layer
        self._num_heads, self._head_dim = config.num_heads, config.head_dim
        self._query_sizes = [mla.qk_nope_head_dim, mla.qk_rope_head_dim]
        self._scale = softmax_scale(config)
        kv_size = mla.kv_lora_rank + mla.qk_rope_head_dim
        down = {f"{prefix}kv_a_proj_with_mqa": kv_size}
        query_rows, query_name = config.num_heads * config.head_dim, "q_proj"
        self._query_norm, query_input = None, config.hidden_size
        if mla.q_lora_rank is not None:
            down = {f"{prefix}q_a_proj": mla.q_lora_rank, **down}
            query_name, query_input = "q_b_proj", mla.q_lora_rank
            self._query_norm = RMSNorm.load(weights, f"{prefix}q_a_layernorm", mla.q_lora_rank, LATENT_NORM_EPS)
        self._down_sizes = [mla.q_lora_rank or 0, mla.kv_lora_rank, mla.qk_rope_head_dim]
        self._down = Linear.load(weights, down, config.hidden_size)
        self._query = Linear.load(weights, {f"{prefix}{query_name}": query_rows}, query_input)
        self._latent_norm = RMSNorm.load(weights, f"{prefix}kv_a_layernorm", mla.kv_lora_rank, LATENT_NORM_EPS)
        rows = mla.qk_nope_head_dim + mla.v_head_dim
        up = weights.tensor(f"{prefix}kv_b_proj.weight", (config.num_heads * rows, mla.kv_lora_rank)).unflatten(0, (config.num_heads, rows))
        self._w_uk, self._w_uv = up.split([mla.qk_nope_head_dim, mla.v_head_dim], 1)  # [H, dn, ck], [H, dv, ck]
        self._out = Linear.load(weights, {f"{prefix}o_proj": config.hidden_size}, config.num_heads * mla.v_head_dim)
        self._shares = config.index is not None and plane_layer is None
        self._indexer = None
        if config.index is not None and plane_layer is not None:
            self._indexer = Indexer(config, config.index, mla, weights, f"{prefix}indexer.")

    def __call__(self, x: Tensor, angles: Angles, batch: ForwardBatch) -> Tensor:
        q_latent, latent, key = self._down(x).split(self._down_sizes, -1)
        q_latent = x if self._query_norm is None else self._query_norm(q_latent)
        q = self._query(q_latent).unflatten(1, (self._num_heads, self._head_dim))  # [n, H, dn + dr]
        q_nope, q_rope = q.split(self._query_sizes, -1)
        kv = torch.cat((self._latent_norm(latent), rotate_pairs(key, angles)), -1)  # [n, ck + dr]
        index: IndexInputs | SharedSelection | None = SHARED_SELECTION if self._shares else None
        if self._indexer is not None and self._plane_layer is not None:
            index = self._indexer(x, q_latent, angles, self._plane_layer)
        o = batch.attention.mla(self._layer, q_nope, rotate_pairs(q_rope, angles), kv, self._w_uk, self._w_uv, self._scale, index)
        return self._out(o.flatten(1))


def softmax_scale(config: ModelConfig) -> float:
    """head_dim^-0.5; YaRN models with mscale_all_dim sharpen it."""
    scale = config.head_dim ** -0.5
    rope = config.rope
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale *= magnitude(rope.factor, rope.mscale_all_dim) ** 2
    return scale


class DeepseekForCausalLM(CausalLM):
    """deepseek_v3 (dense attention), deepseek_v32 and glm_moe_dsa (sparse attention)."""

    @staticmethod
    def rope_dim(config: ModelConfig) -> int:
        assert config.mla is not None
        return config.mla.qk_rope_head_dim

    def load_layer(self, weights: WeightSource, layer: int) -> DecoderLayer:
        config = self.config
        assert config.moe is not None
        plane_layer = None if config.index is None else config.index.plane_layer(layer)
        return self._decoder(weights, f"model.layers.{layer}.", layer, plane_layer, has_experts=layer in config.moe.layers)

    def load_draft_layer(self, weights: WeightSource, prefix: str) -> NextnLayer:
        """It has experts and, in sparse models, an indexer, whatever the main model's layers have; its planes have one layer."""
        decoder = self._decoder(weights, prefix, 0, None if self.config.index is None else 0, has_experts=True)
        return NextnLayer(self.config, weights, prefix, decoder)

    def _decoder(self, weights: WeightSource, prefix: str, layer: int, plane_layer: int | None, *, has_experts: bool) -> DecoderLayer:
        """layer and plane_layer: see LatentAttention."""
        config = self.config
        assert config.mla is not None and config.moe is not None
        attention = LatentAttention(config, config.mla, weights, f"{prefix}self_attn.", layer, plane_layer)
        mlp: MoE | DenseMLP
        if has_experts:
            mlp = MoE.load(weights, f"{prefix}mlp.", config.hidden_size, config.moe, self.shard)
        else:
            mlp = DenseMLP.load(weights, f"{prefix}mlp.", config.hidden_size, config.intermediate_size)
        return DecoderLayer.load(weights, config, prefix, attention, mlp)
