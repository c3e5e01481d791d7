"""Ranks that each hold a share of the experts against the references and one rank: tokens, logits, exchanges; float32, poisoned pages."""
import functools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kits.checkpoints import tiny
from kits.real_engine import TinyModel, full_logprobs, reported_logprobs
from sglane.forward import expert_rows

LENGTHS = (1, 7, 65, 200)
TOLERANCE = 1e-4


@functools.lru_cache(maxsize=2)
def load(family):
    path = tiny(family)
    return TinyModel(path), load_file(path / "ref.safetensors")


def answer_all(engine, ref, vocab):
    for n in LENGTHS:
        engine.add(f"r{n}", ref[f"prompt.{n}"].numpy(), len(ref[f"greedy.{n}"]), sampling=full_logprobs(vocab), logprob_start=0)
    engine.run()


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "deepseek_v32_fp8"])
def test_equal_to_one_rank_and_the_reference(family, cp_size):
    """Prompts from 1 to 200 tokens with every prompt log probability: ranks with no rows, one row and many share steps."""
    model, ref = load(family)
    vocab = model.config.vocab_size
    one, several = model.engine(page_size=16, chunk=64), model.ranks(cp_size, page_size=16, chunk=64)
    for engine in (one, several):
        answer_all(engine, ref, vocab)
    for n in LENGTHS:
        assert several.outputs[f"r{n}"] == one.outputs[f"r{n}"] == ref[f"greedy.{n}"].tolist(), n
        found, alone = (reported_logprobs(engine, f"r{n}", vocab) for engine in (several, one))
        assert found.shape == alone.shape and np.abs(found - alone).max() < TOLERANCE, n
        assert np.abs(found[:n] - torch.log_softmax(ref[f"logits.{n}"], -1).numpy()).max() < TOLERANCE, n


def test_more_ranks_than_experts():
    model, ref = load("glm_moe_dsa")
    held = [model.shards(9)[rank].shard.held(model.config.moe.num_experts) for rank in range(9)]
    assert min(len(part) for part in held) == 0
    engine = model.ranks(9, page_size=4, chunk=64, num_pages=180)
    engine.add("r", ref["prompt.65"].numpy(), len(ref["greedy.65"]))
    engine.run()
    assert engine.outputs["r"] == ref["greedy.65"].tolist()


def test_every_rank_gathers_only_the_rows_that_a_layer_computes(monkeypatch):
    """The last layer: none in a chunk that is not the last, one for a sampled token, all that are scored for prompt log probabilities."""
    model, ref = load("glm_moe_dsa")
    calls = []

    class Recorded(expert_rows.ExchangedRows):
        def __call__(self, experts, x, ids, weights):
            calls.append((self._exchange.rank, self._max_rows))
            return super().__call__(experts, x, ids, weights)

    monkeypatch.setattr(expert_rows, "ExchangedRows", Recorded)
    engine = model.ranks(2, page_size=4, chunk=32, overlap=False)
    engine.add("plain", ref["prompt.64"].numpy(), 2)
    engine.run()
    for rank in range(2):
        # Two chunks of 32 tokens in 8 pages, then one decode; three layers have experts.
        assert [rows for r, rows in calls if r == rank] == [16, 16, 0, 16, 16, 1, 1, 1, 1]
    calls.clear()
    engine = model.ranks(2, page_size=4, chunk=32, overlap=False)
    engine.add("scored", ref["prompt.64"].numpy(), 1, sampling={"logprobs": True}, logprob_start=51)
    engine.run()
    for rank in range(2):
        # Rows 50.. score tokens 51..: none in the first chunk; in the second, 6 in the pages of one lane and 8 in those of the other.
        assert [rows for r, rows in calls if r == rank] == [16, 16, 0, 16, 16, 8]


def test_each_rank_holds_its_share():
    """Bytes of all ranks = the whole model + the replicated part again for each further rank."""
    model, _ = load("deepseek_v32")
    moe = model.config.moe
    routed = len(moe.layers) * moe.num_experts * 3 * moe.intermediate_size * model.config.hidden_size * 4
    for cp_size in (2, 3, 8, 9):
        found = [weights.weight_bytes for weights in model.shards(cp_size)]
        assert sum(found) == routed + cp_size * (model.weights.weight_bytes - routed), cp_size
