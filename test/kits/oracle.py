"""Plain-torch model that reads nothing but a checkpoint folder: the reference for engine tests, with no transformers needed.

One sequence, one call per chunk, absorbed latent attention, float32. Selections break ties by lower position. It shares no code with the
engine on purpose. On the way it records margins: how close a selection, a routing or an argmax was to being another one.
"""
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from kits.fp8_blocks import dequantised

LATENT_EPS = 1e-6  # of the two latent norms and the index key norm, whatever rms_norm_eps says
Cache = dict[Any, Any]


class Oracle:
    """`run` feeds a chunk through the main model, `mtp` through the draft layer; a cache is an empty dict at first."""

    def __init__(self, path: str | Path):
        self.config: dict[str, Any] = json.loads(Path(path, "config.json").read_text())
        self.weights = read_weights(Path(path))
        self.num_layers: int = self.config["num_hidden_layers"]
        self.is_mla = "kv_lora_rank" in self.config
        self.is_sparse = "index_topk" in self.config
        self.index_pairs = self.config.get("indexer_rope_interleave", self.config["model_type"] == "glm_moe_dsa")
        self.frequencies = frequencies(self.config, self.config["qk_rope_head_dim"] if self.is_mla else self.config["head_dim"])
        self.full_layers = [kind == "full" for kind in self.config.get("indexer_types") or ["full"] * self.num_layers]
        self.margins = {"index": math.inf, "router": math.inf, "zero_ties": 0.0}

    def run(self, ids: Tensor, cache: Cache, selections: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """ids int64 [n]; returns logits [n, V] and hidden [n, hidden] after the final norm. selections gets bool [n, T] per layer."""
        positions = torch.arange(len(ids)) + cache.get("length", 0)
        h, selected = self.weights["model.embed_tokens.weight"][ids], None
        for layer in range(self.num_layers):
            h, selected = self._layer(h, positions, cache, layer, selected, self.full_layers[layer])
            if selections is not None and selected is not None:
                selections.append(selected)
        cache["length"] = cache.get("length", 0) + len(ids)
        hidden = rms(h, self.weights["model.norm.weight"], self.config["rms_norm_eps"])
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return hidden @ head.T, hidden

    def mtp(self, next_ids: Tensor, hidden: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """Draft rows (token i + 1, hidden i); returns logits for position i + 2 and the hidden that the next draft step takes."""
        p, eps, w = f"model.layers.{self.num_layers}.", self.config["rms_norm_eps"], self.weights
        embedding = w.get(p + "embed_tokens.weight", w["model.embed_tokens.weight"])[next_ids]
        x = torch.cat((rms(embedding, w[p + "enorm.weight"], eps), rms(hidden, w[p + "hnorm.weight"], eps)), -1)
        positions = torch.arange(len(next_ids)) + cache.get("length", 0)
        h, _ = self._layer(x @ w[p + "eh_proj.weight"].T, positions, cache, self.num_layers, None, True)
        cache["length"] = cache.get("length", 0) + len(next_ids)
        out = rms(h, w[p + "shared_head.norm.weight"], eps)
        return out @ w.get(p + "shared_head.head.weight", w["lm_head.weight"]).T, out

    def _layer(self, h: Tensor, positions: Tensor, cache: Cache, layer: int, selected: Tensor | None, full: bool) -> tuple[Tensor, Tensor | None]:
        p, eps = f"model.layers.{layer}.", self.config["rms_norm_eps"]
        x = rms(h, self.weights[p + "input_layernorm.weight"], eps)
        if self.is_mla:
            out, selected = self._latent_attention(x, positions, cache, layer, selected, full)
        else:
            out = self._grouped_attention(x, positions, cache, layer)
        h = h + out
        x = rms(h, self.weights[p + "post_attention_layernorm.weight"], eps)
        routed = p + "mlp.gate.weight" in self.weights
        return h + (self._experts(x, p + "mlp.") if routed else self._mlp(x, p + "mlp.")), selected

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name + ".weight"].T

    def _mlp(self, x: Tensor, p: str) -> Tensor:
        return self._linear(F.silu(self._linear(x, p + "gate_proj")) * self._linear(x, p + "up_proj"), p + "down_proj")

    def _angles(self, positions: Tensor) -> Tensor:
        return positions[:, None].float() * self.frequencies

    def _grouped_attention(self, x: Tensor, positions: Tensor, cache: Cache, layer: int) -> Tensor:
        p, d, n = f"model.layers.{layer}.self_attn.", self.config["head_dim"], len(x)
        q, k, v = (self._linear(x, p + name).view(n, -1, d) for name in ("q_proj", "k_proj", "v_proj"))
        if p + "q_norm.weight" in self.weights:
            eps = self.config["rms_norm_eps"]
            q, k = rms(q, self.weights[p + "q_norm.weight"], eps), rms(k, self.weights[p + "k_norm.weight"], eps)
        angles = self._angles(positions)[:, None]
        k, v = grow(cache, ("k", layer), rope_halves(k, angles)), grow(cache, ("v", layer), v)
        groups = q.shape[1] // k.shape[1]
        scores = torch.einsum("nhd,thd->hnt", rope_halves(q, angles), k.repeat_interleave(groups, 1)) * d ** -0.5
        visible = torch.arange(len(k))[None] <= positions[:, None]
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        return self._linear(torch.einsum("hnt,thd->nhd", weights, v.repeat_interleave(groups, 1)).reshape(n, -1), p + "o_proj")

    def _latent_attention(self, x: Tensor, positions: Tensor, cache: Cache, layer: int, selected: Tensor | None,
                          full: bool) -> tuple[Tensor, Tensor]:
        c, n, p = self.config, len(x), f"model.layers.{layer}.self_attn."
        heads, nope, value, latent_dim = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"], c["kv_lora_rank"]
        angles = self._angles(positions)
        q_latent = x
        if c.get("q_lora_rank"):
            q_latent = rms(self._linear(x, p + "q_a_proj"), self.weights[p + "q_a_layernorm.weight"], LATENT_EPS)
        q = self._linear(q_latent, p + ("q_b_proj" if c.get("q_lora_rank") else "q_proj")).view(n, heads, -1)
        kv = self._linear(x, p + "kv_a_proj_with_mqa")
        latent = grow(cache, ("latent", layer), rms(kv[:, :latent_dim], self.weights[p + "kv_a_layernorm.weight"], LATENT_EPS))
        key = grow(cache, ("key", layer), rope_pairs(kv[:, latent_dim:], angles))
        visible = torch.arange(len(latent))[None] <= positions[:, None]
        if not self.is_sparse:
            selected = visible
        elif full:
            selected = self._select(x, q_latent, angles, cache, layer, visible)
        assert selected is not None
        up = self.weights[p + "kv_b_proj.weight"].view(heads, nope + value, latent_dim)
        absorbed = torch.einsum("nhd,hdc->nhc", q[..., :nope], up[:, :nope])
        scores = torch.einsum("nhc,tc->nht", absorbed, latent)
        scores = (scores + torch.einsum("nhr,tr->nht", rope_pairs(q[..., nope:], angles[:, None]), key)) * softmax_scale(c)
        weights = scores.masked_fill(~selected[:, None], -math.inf).softmax(-1)
        out = torch.einsum("nhc,hdc->nhd", torch.einsum("nht,tc->nhc", weights, latent), up[:, nope:])
        return self._linear(out.reshape(n, -1), p + "o_proj"), selected

    def _select(self, x: Tensor, q_latent: Tensor, angles: Tensor, cache: Cache, layer: int, visible: Tensor) -> Tensor:
        """bool [n, T]: the index_topk best visible keys, ties to the lower position."""
        c, p = self.config, f"model.layers.{layer}.self_attn.indexer."
        d, r = c["index_head_dim"], c["qk_rope_head_dim"]
        rotate = rope_pairs if self.index_pairs else rope_halves
        k = F.layer_norm(self._linear(x, p + "wk"), (d,), self.weights[p + "k_norm.weight"], self.weights[p + "k_norm.bias"], LATENT_EPS)
        k = grow(cache, ("index", layer), torch.cat((rotate(k[:, :r], angles), k[:, r:]), -1))
        q = self._linear(q_latent, p + "wq_b").view(len(x), -1, d)
        q = torch.cat((rotate(q[..., :r], angles[:, None]), q[..., r:]), -1)
        head_weights = self._linear(x, p + "weights_proj") * c["index_n_heads"] ** -0.5
        scores = torch.einsum("nhd,td->nht", q, k).mul(d ** -0.5).relu()
        scores = torch.einsum("nh,nht->nt", head_weights, scores).masked_fill(~visible, -math.inf)
        keep = min(c["index_topk"], len(k))
        order = torch.argsort(scores, dim=-1, descending=True, stable=True)
        self._note_selection(scores.gather(1, order), keep)
        return torch.zeros_like(visible).scatter(1, order[:, :keep], True) & visible

    def _note_selection(self, ranked: Tensor, keep: int) -> None:
        """ranked [n, T]: scores of each query, best first, -inf for what it cannot see."""
        if ranked.shape[1] <= keep:
            return
        last, first_out = ranked[:, keep - 1], ranked[:, keep]
        cut = torch.isfinite(first_out)
        if cut.any():
            size = ranked[cut].masked_fill(~torch.isfinite(ranked[cut]), 0.0).abs().amax(-1).clamp_min(1e-20)
            self.margins["index"] = min(self.margins["index"], ((last - first_out)[cut] / size).min().item())
            self.margins["zero_ties"] += ((last == first_out) & cut).sum().item()

    def _experts(self, x: Tensor, p: str) -> Tensor:
        c = self.config
        scores = self._linear(x, p + "gate").sigmoid()
        groups = (scores + self.weights[p + "gate.e_score_correction_bias"]).view(len(x), c["n_group"], -1)
        kept = groups.topk(2, -1).values.sum(-1).topk(c["topk_group"], -1).indices
        in_group = torch.zeros(len(x), c["n_group"], dtype=torch.bool).scatter(1, kept, True)
        biased = groups.masked_fill(~in_group[..., None], -math.inf).flatten(1)
        k = c["num_experts_per_tok"]
        ranked = biased.sort(-1, descending=True).values
        self.margins["router"] = min(self.margins["router"], (ranked[:, k - 1] - ranked[:, k]).min().item())
        chosen = biased.topk(k, -1).indices
        weights = scores.gather(1, chosen)
        if c["norm_topk_prob"]:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, slots = (chosen == expert).nonzero(as_tuple=True)
            out[rows] += weights[rows, slots, None] * c["routed_scaling_factor"] * self._mlp(x[rows], f"{p}experts.{expert}.")
        return out + self._mlp(x, p + "shared_experts.")


def read_weights(path: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's model files in float32, FP8 dequantised."""
    stored: dict[str, Tensor] = {}
    for file in sorted(path.glob("model*.safetensors")):
        stored.update(load_file(file))
    scales = {name.removesuffix("_scale_inv"): value for name, value in stored.items() if name.endswith("_scale_inv")}
    return {name: dequantised(value, scales[name]) if name in scales else value.float()
            for name, value in stored.items() if not name.endswith("_scale_inv")}


def rope_parameters(config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """(theta, scaling; empty for plain rope) of either config style."""
    new = config.get("rope_parameters") or {}
    scaling = new if new.get("rope_type", "default") != "default" else config.get("rope_scaling") or {}
    return new.get("rope_theta", config.get("rope_theta", 10000.0)), scaling


def frequencies(config: dict[str, Any], dim: int) -> Tensor:
    theta, scaling = rope_parameters(config)
    f = theta ** -(torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "yarn":
        original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        fast, slow = (dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
                      for turns in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)))
        low, high = max(math.floor(fast), 0), min(math.ceil(slow), dim - 1)
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
        return f / factor * ramp + f * (1 - ramp)
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = ((scaling["original_max_position_embeddings"] * f / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * f / scaling["factor"] + smooth * f
    return f


def softmax_scale(config: dict[str, Any]) -> float:
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    _, scaling = rope_parameters(config)
    if scaling.get("mscale_all_dim"):
        scale *= (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0) ** 2
    return scale


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rope_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates (x0, x1), (x2, x3), ..."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1).flatten(-2)


def rope_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates (x0, x[d/2]), (x1, x[d/2 + 1]), ..."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def grow(cache: Cache, key: Any, rows: Tensor) -> Tensor:
    """Append to the cache; returns all rows so far."""
    cache[key] = rows if key not in cache else torch.cat((cache[key], rows), 0)
    return cache[key]
