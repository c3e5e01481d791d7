"""Several lanes over one shared KV cache against the references: tokens, logits, hits, evictions, retractions; float32, poisoned pages."""
import functools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kits.checkpoints import tiny
from kits.real_engine import TinyModel, full_logprobs, reported_logprobs
from sglane import environ

LENGTHS = (1, 7, 64, 65, 200)
TOLERANCE = 1e-4


@functools.lru_cache(maxsize=2)
def load(family):
    path = tiny(family)
    return TinyModel(path), load_file(path / "ref.safetensors")


@pytest.mark.parametrize("chunk", [8, 64, 1 << 20])
@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("family", ["llama", "glm_moe_dsa"])
def test_two_lanes_equal_the_reference(family, page_size, chunk):
    model, ref = load(family)
    vocab = model.config.vocab_size
    engine = model.ranks(2, page_size=page_size, chunk=chunk, num_pages=640 // page_size + 12, overlap=chunk != 64)
    for n in LENGTHS:
        engine.add(f"r{n}", ref[f"prompt.{n}"].numpy(), len(ref[f"greedy.{n}"]), sampling=full_logprobs(vocab), logprob_start=0)
    engine.run()
    for n in LENGTHS:
        assert engine.outputs[f"r{n}"] == ref[f"greedy.{n}"].tolist(), n
        found = reported_logprobs(engine, f"r{n}", vocab)[:n]
        assert np.abs(found - torch.log_softmax(ref[f"logits.{n}"], -1).numpy()).max() < TOLERANCE, n
    cached = engine.scheduler.kv_ledger()["device"]["cached"]
    assert min(cached) > 0, f"a lane owns nothing: {cached}"


@pytest.mark.parametrize("family, cp_size", [("llama", 2), ("glm_moe_dsa", 2), ("glm_moe_dsa", 3)])
def test_hits_of_many_lengths(family, cp_size):
    """Tail copies stay in their lane; a hit of any length gives the cold answer."""
    model, ref = load(family)
    prompt, greedy = ref["prompt.65"].numpy(), ref["greedy.65"].tolist()
    for hit in [1, 3, 4, 15, 16, 17, 31, 33, 48, 63, 64, 65]:
        engine = model.ranks(cp_size, page_size=4, chunk=16, num_pages=90)
        other = prompt.copy()
        other[hit:] = (other[hit:] + 1) % model.config.vocab_size
        engine.add("seed", other, 1)
        engine.run()
        engine.add("hit", prompt, len(greedy))
        engine.run()
        assert engine.last["hit"].num_cached_tokens == min(hit, 64), hit
        assert engine.outputs["hit"] == greedy, hit


@pytest.mark.parametrize("family", ["llama", "glm_moe_dsa"])
def test_retraction_eviction_and_lane_moves(family):
    model, ref = load(family)
    engine = model.ranks(2, page_size=4, chunk=16, num_pages=44, conservativeness=0.0)
    for turn in range(2):
        for n in (64, 65, 7, 1):
            engine.add(f"{turn}.{n}", ref[f"prompt.{n}"].numpy(), len(ref[f"greedy.{n}"]))
    for i in range(4):
        engine.add(f"filler{i}", np.arange(20) + 30 * i + 2, 60)
    engine.run()
    assert engine.scheduler.totals.num_retractions > 0
    for turn in range(2):
        for n in (64, 65, 7, 1):
            assert engine.outputs[f"{turn}.{n}"] == ref[f"greedy.{n}"].tolist(), (turn, n)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("family", ["llama", "glm_moe_dsa_share"])
def test_prefixes_in_tiles_fetched_ahead(family, cp_size, monkeypatch):
    """Scratch memory of 32 tokens: everything longer is streamed, on several ranks a tile ahead."""
    monkeypatch.setattr(environ, "SGLANE_CP_PREFETCH_MIN_TOKENS", 1)
    model, ref = load(family)
    size = {"page_size": 4, "chunk": 24, "num_pages": 220, "scratch_tokens": 32}
    engine = model.engine(**size) if cp_size == 1 else model.ranks(cp_size, **size)
    for turn in range(2):  # the second one hits the cache
        for n in LENGTHS:
            engine.add(f"{turn}.{n}", ref[f"prompt.{n}"].numpy(), len(ref[f"greedy.{n}"]))
        engine.run()
        for n in LENGTHS:
            assert engine.outputs[f"{turn}.{n}"] == ref[f"greedy.{n}"].tolist(), (turn, n)
