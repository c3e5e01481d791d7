"""Sizes and forward passes of tiny-dsa, see train_tiny_dsa.py."""
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "index_n_heads": 16, "index_head_dim": 64, "index_topk": 128,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "bos_token_id": 0, "eos_token_id": 1,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
}
LAYERS, HEADS, NOPE, ROPE, VALUE = (SIZES[key] for key in ("num_hidden_layers", "num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim",
                                                           "v_head_dim"))
LATENT, EXPERTS, INDEX_HEADS, INDEX_DIM, TOPK = (SIZES[key] for key in ("kv_lora_rank", "n_routed_experts", "index_n_heads", "index_head_dim",
                                                                        "index_topk"))
HIDDEN, MAX_POSITION = SIZES["hidden_size"], SIZES["max_position_embeddings"]
EPS = 1e-6
BIAS_RATE = 1e-3
Weights = dict[str, Tensor]


def new_weights(generator: torch.Generator) -> Weights:
    """Under the checkpoint's names, except that the experts of a layer are one tensor [experts, rows, columns] a kind."""
    w: Weights = {}

    def matrix(name: str, *shape: int, gain: float = 1.0) -> None:
        w[name] = torch.randn(shape, generator=generator) * (gain * shape[-1] ** -0.5)

    def norm(name: str, size: int) -> None:
        w[name] = torch.ones(size)

    matrix("model.embed_tokens.weight", SIZES["vocab_size"], HIDDEN, gain=2.0)
    matrix("lm_head.weight", SIZES["vocab_size"], HIDDEN, gain=0.2)
    norm("model.norm.weight", HIDDEN)
    for layer in range(LAYERS + 1):
        p = f"model.layers.{layer}."
        norm(p + "input_layernorm.weight", HIDDEN)
        norm(p + "post_attention_layernorm.weight", HIDDEN)
        a, rank = p + "self_attn.", SIZES["q_lora_rank"]
        matrix(a + "q_a_proj.weight", rank, HIDDEN)
        norm(a + "q_a_layernorm.weight", rank)
        matrix(a + "q_b_proj.weight", HEADS * (NOPE + ROPE), rank)
        matrix(a + "kv_a_proj_with_mqa.weight", LATENT + ROPE, HIDDEN)
        norm(a + "kv_a_layernorm.weight", LATENT)
        matrix(a + "kv_b_proj.weight", HEADS * (NOPE + VALUE), LATENT)
        matrix(a + "o_proj.weight", HIDDEN, HEADS * VALUE, gain=0.3)
        matrix(a + "indexer.wq_b.weight", INDEX_HEADS * INDEX_DIM, rank)
        matrix(a + "indexer.wk.weight", INDEX_DIM, HIDDEN)
        norm(a + "indexer.k_norm.weight", INDEX_DIM)
        w[a + "indexer.k_norm.bias"] = torch.zeros(INDEX_DIM)
        matrix(a + "indexer.weights_proj.weight", INDEX_HEADS, HIDDEN)
        if layer < SIZES["first_k_dense_replace"]:
            parts = [("mlp.", (), SIZES["intermediate_size"])]
        else:
            parts = [("mlp.experts.", (EXPERTS,), SIZES["moe_intermediate_size"]), ("mlp.shared_experts.", (), SIZES["moe_intermediate_size"])]
            matrix(p + "mlp.gate.weight", EXPERTS, HIDDEN)
        for name, lead, size in parts:
            matrix(p + name + "gate_proj.weight", *lead, size, HIDDEN)
            matrix(p + name + "up_proj.weight", *lead, size, HIDDEN)
            matrix(p + name + "down_proj.weight", *lead, HIDDEN, size, gain=0.3)
    p = f"model.layers.{LAYERS}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        norm(f"{p}{name}.weight", HIDDEN)
    matrix(p + "eh_proj.weight", HIDDEN, 2 * HIDDEN)
    return {name: value.requires_grad_() for name, value in w.items()}


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight, EPS)


def angles(positions: Tensor) -> Tensor:
    """positions int64 [B, T]; float32 [B, T, ROPE / 2]."""
    return positions[..., None] * SIZES["rope_theta"] ** -(torch.arange(0, ROPE, 2) / ROPE)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates (x0, x1), (x2, x3), ... as the attention has it."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates (x0, x[d/2]), ... as the index heads have it."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@dataclass
class Batch:
    """What the layers of one forward share, and what they leave behind for the losses."""

    positions: Tensor  # int64 [B, T]
    visible: Tensor  # bool [T, T]
    sparse: bool  # attention sees only what the index heads select
    num_indexed: int  # sequences whose index heads are trained
    index_losses: list[Tensor]
    loads: dict[str, Tensor]  # float32 [experts] by gate
    covered: list[float]  # share of the attention that a selection would keep; only filled when evaluating
    evaluate: bool = False

    @staticmethod
    def of(positions: Tensor, sparse: bool, num_indexed: int, evaluate: bool = False) -> "Batch":
        visible = torch.ones(positions.shape[1], positions.shape[1], dtype=torch.bool).tril()
        return Batch(positions, visible, sparse, num_indexed, [], {}, [], evaluate)


class Model:
    """The forward passes. Everything is [batch, tokens, ...]."""

    def __init__(self, weights: Weights):
        self.weights = weights
        self.bias = {f"model.layers.{layer}.mlp.gate": torch.zeros(EXPERTS) for layer in range(SIZES["first_k_dense_replace"], LAYERS + 1)}

    def main(self, ids: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """ids int64 [B, T]; hidden float32 [B, T, H] after the final norm and logits [B, T, V]."""
        h = F.embedding(ids, self.weights["model.embed_tokens.weight"])
        for layer in range(LAYERS):
            h = self._layer(h, f"model.layers.{layer}.", batch, batch.positions, None)
        hidden = rms(h, self.weights["model.norm.weight"])
        return hidden, F.linear(hidden, self.weights["lm_head.weight"])

    def draft(self, ids: Tensor, hidden: Tensor, batch: Batch, step: int, chain: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Rows (token i + step, hidden i) for n of the T positions. step: 1 for the main model's hiddens, then on with what this returned.

        ids int64 [B, n], hidden [B, n, H]. chain: keys and values of the rows before, first those of step 1; this one's are appended.
        """
        p, w = f"model.layers.{LAYERS}.", self.weights
        embedding = F.embedding(ids, w["model.embed_tokens.weight"].detach())
        x = F.linear(torch.cat((rms(embedding, w[p + "enorm.weight"]), rms(hidden, w[p + "hnorm.weight"])), -1), w[p + "eh_proj.weight"])
        n = ids.shape[1]
        out = rms(self._layer(x.float(), p, batch, batch.positions[:, step - 1:step - 1 + n], chain), w[p + "shared_head.norm.weight"])
        return F.linear(out, w["lm_head.weight"].detach()), out

    def _layer(self, h: Tensor, p: str, batch: Batch, positions: Tensor, chain: list[tuple[Tensor, Tensor]] | None) -> Tensor:
        h = h + self._attention(rms(h, self.weights[p + "input_layernorm.weight"]), p + "self_attn.", batch, positions, chain)
        x = rms(h, self.weights[p + "post_attention_layernorm.weight"])
        if p + "mlp.gate.weight" in self.weights:
            return h + self._experts(x.flatten(0, 1), p + "mlp.", batch).view_as(h)
        return h + self._mlp(x, p + "mlp.")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name + ".weight"])

    def _attention(self, x: Tensor, p: str, batch: Batch, positions: Tensor, chain: list[tuple[Tensor, Tensor]] | None) -> Tensor:
        size, n = x.shape[:2]
        turned = angles(positions)
        cos, sin = turned.cos(), turned.sin()
        q_latent = rms(self._linear(x, p + "q_a_proj"), self.weights[p + "q_a_layernorm.weight"])
        q = self._linear(q_latent, p + "q_b_proj").view(size, n, HEADS, NOPE + ROPE).transpose(1, 2)
        q = torch.cat((q[..., :NOPE], rotate_pairs(q[..., NOPE:].float(), cos[:, None], sin[:, None]).to(q.dtype)), -1)  # [B, heads, n, 64]
        latent, key = self._linear(x, p + "kv_a_proj_with_mqa").split([LATENT, ROPE], -1)
        key = rotate_pairs(key.float(), cos, sin).to(q.dtype)
        up = self._linear(rms(latent, self.weights[p + "kv_a_layernorm.weight"]), p + "kv_b_proj")
        k, v = up.view(size, n, HEADS, NOPE + VALUE).transpose(1, 2).split([NOPE, VALUE], -1)
        k = torch.cat((k, key[:, None].expand(-1, HEADS, -1, -1)), -1)
        first = chain is None or not chain
        if chain is not None:
            chain.append((k, v))
            k, v = chain[0]
        scores = (q @ k.transpose(-1, -2)).float() * (NOPE + ROPE) ** -0.5  # [B, heads, n, n]
        visible = batch.visible[:n, :n].expand(size, n, n)
        index = self._index(x, q_latent, p + "indexer.", batch, cos, sin) if first else None
        if index is not None and batch.sparse:
            visible = selected(index, visible)
        scores = scores.masked_fill(~visible[:, None], -math.inf)
        if not first:
            assert chain is not None  # the row of each later step sees its own predecessors, on the diagonal
            scores = torch.cat((scores, *((q * row).sum(-1, keepdim=True).float() * (NOPE + ROPE) ** -0.5 for row, _ in chain[1:])), -1)
        attention = scores.softmax(-1)
        if index is not None:
            self._teach_index(index, attention, visible, batch)
        out = attention[..., :n].to(v.dtype) @ v
        if not first:
            assert chain is not None
            out = out + sum(attention[..., n + i, None] * row for i, (_, row) in enumerate(chain[1:]))
        return self._linear(out.transpose(1, 2).flatten(2), p + "o_proj").float()

    def _index(self, x: Tensor, q_latent: Tensor, p: str, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor | None:
        """Scores float32 [b, n, n]: of all sequences where they are needed for a selection, else of those that are trained."""
        count = len(x) if batch.sparse or batch.evaluate else batch.num_indexed
        if not count:
            return None
        x, q_latent, cos, sin = x[:count].detach(), q_latent[:count].detach(), cos[:count], sin[:count]
        train = torch.is_grad_enabled()
        parts = []
        for begin, end, grad in ((0, min(batch.num_indexed, count), train), (min(batch.num_indexed, count), count, False)):
            if end > begin:
                with torch.set_grad_enabled(grad):
                    parts.append(self._index_scores(x[begin:end], q_latent[begin:end], p, cos[begin:end], sin[begin:end]))
        return torch.cat(parts)

    def _index_scores(self, x: Tensor, q_latent: Tensor, p: str, cos: Tensor, sin: Tensor) -> Tensor:
        w, (size, n) = self.weights, x.shape[:2]
        k = F.layer_norm(self._linear(x, p + "wk").float(), (INDEX_DIM,), w[p + "k_norm.weight"], w[p + "k_norm.bias"], EPS)
        k = torch.cat((rotate_halves(k[..., :ROPE], cos, sin), k[..., ROPE:]), -1).to(torch.bfloat16)
        q = self._linear(q_latent, p + "wq_b").float().view(size, n, INDEX_HEADS, INDEX_DIM).transpose(1, 2)
        q = torch.cat((rotate_halves(q[..., :ROPE], cos[:, None], sin[:, None]), q[..., ROPE:]), -1).to(torch.bfloat16)
        head = self._linear(x, p + "weights_proj").float() * (INDEX_HEADS * INDEX_DIM) ** -0.5  # [b, n, heads]
        return (F.relu(q @ k[:, None].transpose(-1, -2)) * head.transpose(1, 2)[..., None]).float().sum(1)

    def _teach_index(self, index: Tensor, attention: Tensor, visible: Tensor, batch: Batch) -> None:
        count = min(batch.num_indexed, len(index))
        wanted = attention[:len(index)].detach().mean(1)
        if batch.evaluate:
            n = index.shape[1]
            rows = slice(min(TOPK, n - 1), None)
            keep = selected(index, batch.visible[:n, :n].expand_as(index))
            batch.covered.append((wanted * keep)[:, rows].sum(-1).mean().item())
        elif count:
            log = index[:count].masked_fill(~visible[:count], -math.inf).log_softmax(-1)
            wanted = wanted[:count]
            gap = wanted * (wanted.clamp_min(1e-9).log() - log.masked_fill(~visible[:count], 0.0))
            batch.index_losses.append(gap.sum(-1).mean())

    def _experts(self, x: Tensor, p: str, batch: Batch) -> Tensor:
        """x [n, H]."""
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(x, self.weights[p + "gate.weight"]).sigmoid()
        chosen = (scores + self.bias[p + "gate"]).topk(SIZES["num_experts_per_tok"], -1).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        batch.loads[p + "gate"] = batch.loads.get(p + "gate", torch.zeros(EXPERTS)) + counts
        order = chosen.flatten().argsort(stable=True)
        rows = order // chosen.shape[1]
        parts, w = [], self.weights
        for expert, part in enumerate(x.to(torch.bfloat16)[rows].split(counts.tolist())):
            gate, up, down = (w[f"{p}experts.{name}_proj.weight"][expert] for name in ("gate", "up", "down"))
            parts.append(F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down))
        routed = torch.cat(parts).float() * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, rows, routed) + self._mlp(x, p + "shared_experts.")

    def _mlp(self, x: Tensor, p: str) -> Tensor:
        return self._linear(F.silu(self._linear(x, p + "gate_proj")) * self._linear(x, p + "up_proj"), p + "down_proj").float()

    def balance(self, batch: Batch) -> None:
        """Experts with less than their share become easier to choose; this is outside of the gradient."""
        for name, load in batch.loads.items():
            self.bias[name] += BIAS_RATE * (load.mean() - load).sign()


def selected(index: Tensor, visible: Tensor) -> Tensor:
    """bool [b, n, n]: the index_topk best of what is visible."""
    keep = index.detach().masked_fill(~visible, -math.inf).topk(min(TOPK, index.shape[-1]), -1).indices
    return torch.zeros_like(visible).scatter(-1, keep, True) & visible
