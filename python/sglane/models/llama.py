"""Llama and Qwen3: grouped-query attention, half-split rope, dense feed-forward layers."""
import torch
from torch import Tensor

from sglane.configs.sizes import ModelConfig
from sglane.forward.forward_batch import ForwardBatch
from sglane.layers.linear import Linear
from sglane.layers.mlp import DenseMLP
from sglane.layers.norm import RMSNorm
from sglane.layers.rotary import Angles, rotate_halves
from sglane.layers.weights import WeightSource
from sglane.models.causal_lm import CausalLM, DecoderLayer


class GroupedQueryAttention:
    """One product for q, k and v; q and k may be normed per head."""

    def __init__(self, config: ModelConfig, weights: WeightSource, prefix: str, layer: int, head_norms: bool):
        self._layer = layer
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._scale = config.head_dim ** -0.5
        self._sizes = [config.num_heads * config.head_dim] + 2 * [config.num_kv_heads * config.head_dim]
        names = dict(zip((f"{prefix}q_proj", f"{prefix}k_proj", f"{prefix}v_proj"), self._sizes))
        self._qkv = Linear.load(weights, names, config.hidden_size, config.attention_bias)
        self._o = Linear.load(weights, {f"{prefix}o_proj": config.hidden_size}, self._sizes[0], config.attention_bias)
        self._norms = [RMSNorm.load(weights, f"{prefix}{name}_norm", config.head_dim, config.rms_norm_eps) for name in "qk"] if head_norms else None

    def __call__(self, x: Tensor, angles: Angles, batch: ForwardBatch) -> Tensor:
        heads = self._qkv(x).unflatten(1, (-1, self._head_dim))  # [n, H + 2 * Hkv, D]
        qk, v = heads.split([self._num_heads + self._num_kv_heads, self._num_kv_heads], 1)
        if self._norms is not None:
            qk = torch.cat((self._norms[0](qk[:, :self._num_heads]), self._norms[1](qk[:, self._num_heads:])), 1)
        q, k = rotate_halves(qk, angles).split([self._num_heads, self._num_kv_heads], 1)
        o = batch.attention.gqa(self._layer, q, k, v, self._scale)
        return self._o(o.flatten(1))


class LlamaForCausalLM(CausalLM):
    """Llama 2, 3 and relatives."""

    head_norms = False

    def load_layer(self, weights: WeightSource, layer: int) -> DecoderLayer:
        config, prefix = self.config, f"model.layers.{layer}."
        attention = GroupedQueryAttention(config, weights, f"{prefix}self_attn.", layer, self.head_norms)
        mlp = DenseMLP.load(weights, f"{prefix}mlp.", config.hidden_size, config.intermediate_size, config.mlp_bias)
        return DecoderLayer.load(weights, config, prefix, attention, mlp)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with normed queries and keys."""

    head_norms = True
