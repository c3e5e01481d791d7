"""Every tiny checkpoint, loaded in float32, against its references: logits, greedy tokens, selected sets; whole prompts and chunks."""
import dataclasses
import functools

import pytest
import torch
from safetensors.torch import load_file

from kits.checkpoints import CHECKPOINTS, RELEASED, tiny
from kits.dense_attention import DenseAttention
from sglane.configs.model_config import load_model_config
from sglane.model_executor.loader import load_model

LENGTHS = (1, 7, 64, 65, 200)
WHOLE = 1 << 20
TOLERANCE = 1e-4
CPU = torch.device("cpu")


@functools.lru_cache(maxsize=2)
def load(name):
    path = tiny(name)
    return load_model(load_model_config(str(path), None), CPU, torch.float32, show_progress=False), load_file(path / "ref.safetensors")


def feed(model, attention, ids, chunk):
    """Logits [n, V], and the selected sets of each layer and row."""
    logits, sets = [], []
    for begin in range(0, len(ids), chunk):
        logits.append(attention.run(model, ids[begin:begin + chunk]))
        sets.append([[row.nonzero().flatten().tolist() for row in selected] for selected in attention.selections])
    return torch.cat(logits), [[row for part in sets for row in part[layer]] for layer in range(len(sets[0]))]


@pytest.mark.parametrize("chunk", [WHOLE, 8])
@pytest.mark.parametrize("name", CHECKPOINTS + RELEASED)
def test_against_references(name, chunk):
    model, ref = load(name)
    for n in LENGTHS:
        attention = DenseAttention()
        logits, sets = feed(model, attention, ref[f"prompt.{n}"], chunk)
        assert (logits - ref[f"logits.{n}"]).abs().max() < TOLERANCE, n
        if f"topk.{n}" in ref:
            expected = [[row[row >= 0].tolist() for row in layer] for layer in ref[f"topk.{n}"]]
            assert sets == expected, n
        tokens = []
        for _ in ref[f"greedy.{n}"]:
            tokens.append(int(logits[-1].argmax()))
            logits = attention.run(model, torch.tensor(tokens[-1:]))
        assert tokens == ref[f"greedy.{n}"].tolist(), n


@pytest.mark.parametrize("name", ["deepseek_v32", "llama"])
def test_hidden_states_and_hooks(name):
    """Hidden states are those after the final norm; hooks are called once a layer, in order."""
    model, ref = load(name)
    attention = DenseAttention()
    hidden = attention.hidden(model, ref["prompt.65"])
    assert (hidden - ref["hidden.65"]).abs().max() < TOLERANCE
    assert attention.hooks.layers == list(range(model.config.num_layers))


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa_share", "qwen3"])
def test_no_tokens(name):
    """A rank without tokens of a step runs the same calls."""
    model, _ = load(name)
    attention = DenseAttention()
    assert attention.run(model, torch.zeros(0, dtype=torch.int64)).shape == (0, 512)
    assert attention.hooks.layers == list(range(model.config.num_layers))


@pytest.mark.parametrize("name", ["deepseek_v32_bf16", "deepseek_v3_fp8", "llama"])
def test_bfloat16_runs(name):
    """Types only: sets and routes flip in bfloat16, so the numbers say little. Dense llama stays close."""
    path = tiny(name)
    model, ref = load_model(load_model_config(str(path), None), CPU, torch.bfloat16, show_progress=False), load_file(path / "ref.safetensors")
    logits = DenseAttention().run(model, ref["prompt.64"])
    assert logits.dtype == torch.float32 and torch.isfinite(logits).all()
    if name == "llama":
        assert (logits - ref["logits.64"]).abs().max() < 0.2


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_references_see_the_indexer(name):
    """The wrong rope layout of the indexer, or all keys instead of the selected ones, is far outside the tolerance."""
    config, (_, ref) = load_model_config(str(tiny(name)), None), load(name)
    for wrong in ({"rope_interleave": not config.index.rope_interleave}, {"topk": 10 ** 6}):
        changed = dataclasses.replace(config, index=dataclasses.replace(config.index, **wrong))
        model = load_model(changed, CPU, torch.float32, show_progress=False)
        assert (DenseAttention().run(model, ref["prompt.200"]) - ref["logits.200"]).abs().max() > 0.1, wrong
