"""Make tiny random checkpoints with references: python -m kits.make_tiny --out FOLDER [--family NAME ...] [--search]

Per family a folder in the layout of a Hugging Face checkpoint (shards, index, draft layer in a file of its own), and for the latent
families also NAME_bf16, NAME_fp8 (stored as released; references from the stored values, so that loading is tested and not bfloat16
arithmetic) and NAME_released (config.json with the released keys). In each:
    ref.safetensors  for n in PROMPT_LENGTHS: prompt.n [n], logits.n [n, V], hidden.n [n, H] after the final norm, greedy.n [GREEDY],
                     topk.n int32 [layers, n, k] selected positions, ascending, -1 padded (sparse families),
                     mtp_logits.n [n, V] and mtp_chain.n [CHAIN] (latent families)
    ref.json         seed, margins, largest differences between transformers and the oracle
"""
import argparse
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kits.fp8_blocks import dequantised, quantise
from kits.oracle import Oracle
from kits.tiny_configs import FAMILIES, LATENT_FAMILIES, SEEDS, VARIANTS, released_style, transformers_config
from kits.tiny_reference import DraftLayer, draft_references, full_forward, greedy_tokens

PROMPT_LENGTHS = (1, 7, 64, 65, 200)
GREEDY = 12
CHAIN = 3
INDEX_FILE = "model.safetensors.index.json"
DRAFT_FILE = "model-mtp.safetensors"
#: Matrices that released FP8 checkpoints leave in bfloat16.
NOT_FP8 = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "weights_proj", "eh_proj", "shared_head")
#: Two independent float32 implementations agree to this.
AGREEMENT = 1e-4
MAX_SEEDS = 400


def healthy(margins: dict[str, float]) -> bool:
    """No selection, routing or argmax is so close that rounding could change it."""
    return margins["index"] > 1e-5 and margins["router"] > 2e-5 and margins["argmax"] > 2e-3 and margins["zero_ties"] == 0


def randomise(module: Any, generator: torch.Generator, tied: bool = False) -> None:
    """Weights with enough spread that attention, index scores and routing are far from uniform."""
    named = [*module.named_parameters(), *((n, b) for n, b in module.named_buffers() if n.endswith("e_score_correction_bias"))]
    for name, value in named:
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            value.copy_(0.1 * noise)
        elif name.endswith("bias"):
            value.copy_(0.2 * noise)
        elif "norm" in name.rsplit(".", 2)[-2] or value.ndim == 1:
            value.copy_(1.0 + 0.2 * noise)
        elif "embed_tokens" in name:
            value.copy_(noise * (0.1 if tied else 1.0))  # a large tied embedding makes the model repeat its input
        else:
            gain = 2.0 if any(part in name for part in ("q_b_proj", "q_proj", "wq_b")) else 1.0
            value.copy_(gain * noise / math.sqrt(value.shape[-1]))


def build(family: str, out: Path, seed: int) -> dict[str, float]:
    """Make the family's float32 checkpoint and its references; returns the margins."""
    from transformers import AutoModelForCausalLM

    config = transformers_config(family)
    config._attn_implementation = "sdpa"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    randomise(model, generator, config.tie_word_embeddings)
    model.tie_weights()
    draft = None
    if family in LATENT_FAMILIES:
        draft = DraftLayer(model).eval()
        randomise(draft, generator)
    out.mkdir(parents=True, exist_ok=True)
    write_checkpoint(model, draft, out / family, family.startswith("deepseek"))
    return write_references(model, draft, out / family, seed)


def write_checkpoint(model: Any, draft: DraftLayer | None, path: Path, with_copies: bool) -> None:
    shutil.rmtree(path, ignore_errors=True)
    model.save_pretrained(path, max_shard_size="4MB")
    if (path / INDEX_FILE).exists():
        index = json.loads((path / INDEX_FILE).read_text())
    else:
        with safe_open(path / "model.safetensors", "pt") as file:
            index = {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), "model.safetensors")}
    if draft is not None:
        tensors = draft.tensors(model.config.num_hidden_layers, with_copies)
        save_file(tensors, path / DRAFT_FILE, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(tensors, DRAFT_FILE)
    (path / INDEX_FILE).write_text(json.dumps(index, indent=1))


def write_references(model: Any, draft: DraftLayer | None, path: Path, seed: int) -> dict[str, float]:
    """ref.safetensors and ref.json. Without `draft`, the draft layer's references come from the oracle. Returns the margins."""
    oracle, worst = Oracle(path), dict.fromkeys(("logits", "chunked", "mtp"), 0.0)
    found: dict[str, Tensor] = {}
    argmax = math.inf
    for n, ids in prompts(model.config.vocab_size):
        logits, hidden = full_forward(model, ids)
        greedy, gap = greedy_tokens(model, ids, GREEDY)
        argmax = min(argmax, gap)
        found |= {f"prompt.{n}": ids, f"logits.{n}": logits, f"hidden.{n}": hidden, f"greedy.{n}": greedy}
        selections: list[Tensor] = []
        own, _ = oracle.run(torch.cat((ids, greedy[:-1])), {}, selections)  # margins also cover the continuation
        worst["logits"] = max(worst["logits"], (own[:n] - logits).abs().max().item())
        cache: dict[Any, Any] = {}
        pieces = torch.cat([oracle.run(ids[begin:begin + 9], cache)[0] for begin in range(0, n, 9)])
        worst["chunked"] = max(worst["chunked"], (pieces - logits).abs().max().item())
        if oracle.is_sparse:
            found[f"topk.{n}"] = positions_of(selections, n, model.config.index_topk)
        if oracle.is_mla:
            next_ids = torch.cat((ids[1:], greedy[:1]))
            drafted, chain = oracle_draft(oracle, next_ids, hidden)
            if draft is not None:
                expected, expected_chain = draft_references(draft, next_ids, hidden, CHAIN)
                worst["mtp"] = max(worst["mtp"], (drafted - expected).abs().max().item())
                drafted, chain = expected, expected_chain
            found |= {f"mtp_logits.{n}": drafted, f"mtp_chain.{n}": chain}
    save_file({name: value.contiguous() for name, value in found.items()}, path / "ref.safetensors")
    margins = {**oracle.margins, "argmax": argmax}
    (path / "ref.json").write_text(json.dumps({"seed": seed, "margins": margins, "differences": worst}, indent=1))
    if healthy(margins) and max(worst.values()) > AGREEMENT:
        raise AssertionError(f"{path.name}: transformers and the oracle disagree: {worst}")
    return margins


def prompts(vocab_size: int) -> Iterator[tuple[int, Tensor]]:
    generator = torch.Generator().manual_seed(1234)
    for n in PROMPT_LENGTHS:
        yield n, torch.randint(2, vocab_size, (n,), generator=generator)


def positions_of(selections: list[Tensor], n: int, topk: int) -> Tensor:
    """int32 [layers, n, k] of the first n rows, ascending, -1 padded."""
    k = min(topk, n)
    found = torch.full((len(selections), n, k), -1, dtype=torch.int32)
    for layer, selected in enumerate(selections):
        for row in range(n):
            chosen = selected[row].nonzero().flatten().to(torch.int32)
            found[layer, row, :len(chosen)] = chosen
    return found


def oracle_draft(oracle: Oracle, next_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What draft_references gives, by the oracle."""
    cache: dict[Any, Any] = {}
    logits, h = oracle.mtp(next_ids, hidden, cache)
    tokens, h = [int(logits[-1].argmax())], h[-1:]
    for _ in range(1, CHAIN):
        row, h = oracle.mtp(torch.tensor(tokens[-1:]), h, cache)
        tokens.append(int(row[-1].argmax()))
    return logits, torch.tensor(tokens)


def derive(family: str, variant: str, out: Path, seed: int) -> dict[str, float]:
    """FAMILY_bf16 or FAMILY_fp8 from the float32 checkpoint; returns the margins."""
    from transformers import AutoModelForCausalLM

    source, path, plain = out / family, out / f"{family}_{variant}", out / f"{family}_{variant}_plain"
    for folder in (path, plain):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
    powers_of_two = family.startswith("deepseek")
    index = json.loads((path / INDEX_FILE).read_text())
    for file in sorted(source.glob("model*.safetensors")):
        stored, values = {}, {}
        for name, value in load_file(file).items():
            if variant == "fp8" and value.ndim == 2 and name.endswith(".weight") and not any(part in name for part in NOT_FP8):
                stored[name], stored[f"{name}_scale_inv"] = quantise(value, powers_of_two)
                values[name] = dequantised(stored[name], stored[f"{name}_scale_inv"])
            else:
                stored[name] = value if name.endswith("e_score_correction_bias") else value.to(torch.bfloat16)
                values[name] = stored[name].float()
        index["weight_map"] |= dict.fromkeys(stored, file.name)
        save_file(stored, path / file.name, metadata={"format": "pt"})
        save_file(values, plain / file.name, metadata={"format": "pt"})
    (path / INDEX_FILE).write_text(json.dumps(index, indent=1))
    config = json.loads((path / "config.json").read_text()) | {"dtype": "bfloat16"}
    if variant == "fp8":
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        if powers_of_two:
            config["quantization_config"]["scale_fmt"] = "ue8m0"
    (path / "config.json").write_text(json.dumps(config, indent=1))
    # transformers reads dequantised values: its own block sizes are wrong where the last block is short.
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="sdpa").eval()
    margins = write_references(model, None, path, seed)
    shutil.rmtree(plain)
    return margins


def write_released(family: str, out: Path) -> None:
    """FAMILY_released: the same weights and references under a config.json with the released keys."""
    source, path = out / family, out / f"{family}_released"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for file in source.iterdir():
        if file.name != "config.json":
            (path / file.name).symlink_to(Path("..", family, file.name))
    config = released_style(json.loads((source / "config.json").read_text()))
    (path / "config.json").write_text(json.dumps(config, indent=1))


@torch.no_grad()
def make(name: str, out: Path, search: bool) -> int:
    """One of CHECKPOINTS with the first seed that is healthy, the known one first. A variant needs no float32 sibling: it makes its own.

    Returns the seed.
    """
    family = max((family for family in FAMILIES if name.startswith(family)), key=len)
    for seed in [*([] if search else [SEEDS[name]]), *range(MAX_SEEDS)]:
        if name == family:
            margins = build(family, out, seed)
        else:
            build(family, out / name, seed)
            margins = derive(family, name.removeprefix(f"{family}_"), out / name, seed)
        if healthy(margins):
            return seed
    raise SystemExit(f"{name}: no seed below {MAX_SEEDS} has healthy margins")


def make_family(family: str, out: Path, search: bool) -> dict[str, int]:
    """All checkpoints of a family; returns their seeds."""
    seeds = {family: make(family, out, search)}
    if family in LATENT_FAMILIES:
        write_released(family, out)
        scratch = out / "scratch"
        for variant in VARIANTS:
            name = f"{family}_{variant}"
            seeds[name] = make(name, scratch, search)
            shutil.rmtree(out / name, ignore_errors=True)
            (scratch / name / name).rename(out / name)
        shutil.rmtree(scratch)
    return seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--family", nargs="*", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--search", action="store_true", help="do not begin with the known seeds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for family in arguments.family:
        print(make_family(family, arguments.out, arguments.search), flush=True)


if __name__ == "__main__":
    main()
