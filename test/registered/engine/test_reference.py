"""Scheduler + executor against the references of the tiny checkpoints: logits, greedy tokens, selected index sets; float32."""
import functools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kits.checkpoints import CHECKPOINTS, FAMILIES, tiny
from kits.real_engine import TinyModel, full_logprobs, reported_logprobs

LENGTHS = (1, 7, 64, 65, 200)
WHOLE = 1 << 20
TOLERANCE = 1e-4


@functools.lru_cache(maxsize=2)
def load(family):
    path = tiny(family)
    return TinyModel(path), load_file(path / "ref.safetensors")


class SelectionLog:
    """Collects the selected sets of extends and decodes: one dict (layer, position) -> set for each request, in order of admission."""

    def __init__(self):
        self.requests = []
        self._current = {}  # slot -> the request that has it now

    def __call__(self, layer, slot, positions, selected):
        if layer == 0 and positions[0] == 0:
            self._current[slot] = {}
            self.requests.append(self._current[slot])
        for i, position in enumerate(positions.tolist()):
            chosen = np.arange(position + 1) if selected is None else selected[i][selected[i] >= 0]
            self._current[slot][layer, position] = np.sort(chosen)

    def assert_equal(self, index, topk):
        """topk int32 [layers, n, k] of the reference, -1 padded; layers that share a selection repeat it."""
        found = self.requests[index]
        assert {layer for layer, _ in found}, "no selection was reported"
        for layer in {layer for layer, _ in found}:
            for position in range(topk.shape[1]):
                expected = topk[layer, position]
                assert np.array_equal(found[layer, position], expected[expected >= 0]), (index, layer, position)


@pytest.mark.parametrize("chunk", [8, 64, WHOLE])
@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_logits_tokens_and_sets(family, page_size, chunk):
    """All five prompts at once: chunks, decodes and prompts of different lengths share steps."""
    model, ref = load(family)
    vocab = model.config.vocab_size
    tap = SelectionLog()
    engine = model.engine(page_size=page_size, chunk=chunk, num_pages=640 // page_size + 10, tap=tap, overlap=chunk != 64)
    for n in LENGTHS:
        num_new = len(ref[f"greedy.{n}"])
        engine.add(f"r{n}", ref[f"prompt.{n}"].numpy(), num_new, sampling=full_logprobs(vocab), logprob_start=0)
    engine.run()
    for index, n in enumerate(LENGTHS):
        assert engine.outputs[f"r{n}"] == ref[f"greedy.{n}"].tolist()
        found = reported_logprobs(engine, f"r{n}", vocab)[:n]  # rows of positions 0..n-1
        expected = torch.log_softmax(ref[f"logits.{n}"], -1).numpy()
        assert np.abs(found - expected).max() < TOLERANCE, n
        if f"topk.{n}" in ref:
            tap.assert_equal(index, ref[f"topk.{n}"].numpy())


def check_hits(family, hits, page_size):
    """A prefix of each of these lengths is in the tree; the hit is exact and the answer is the cold one."""
    model, ref = load(family)
    n = 65
    prompt, greedy = ref[f"prompt.{n}"].numpy(), ref[f"greedy.{n}"].tolist()
    for hit in hits:
        engine = model.engine(page_size=page_size, chunk=64, num_pages=1024 // page_size)
        other = prompt.copy()
        if hit < n:
            other[hit] = (other[hit] + 1) % model.config.vocab_size
        engine.add("seed", other, 1)
        engine.run()
        engine.add("hit", prompt, len(greedy))
        engine.run()
        assert engine.last["hit"].num_cached_tokens == min(hit, n - 1), hit
        assert engine.outputs["hit"] == greedy, hit


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_hit_lengths(family):
    every = range(0, 66, 1 if family in ("llama", "glm_moe_dsa") else 6)
    check_hits(family, [*every, 64, 65], page_size=16)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_every_hit_length(family, page_size):
    check_hits(family, range(66), page_size)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS if name not in FAMILIES)])
def test_after_retraction_and_eviction(family, overlap):
    """A pool that holds two of the requests: evictions and retractions happen, no answer changes."""
    model, ref = load(family)
    engine = model.engine(page_size=4, chunk=16, num_pages=40, overlap=overlap, conservativeness=0.0)
    for turn in range(3):
        for n in (64, 65, 7, 1):
            engine.add(f"{turn}.{n}", ref[f"prompt.{n}"].numpy(), len(ref[f"greedy.{n}"]))
    for i in range(4):  # fillers that grow beside them
        engine.add(f"filler{i}", np.arange(20) + 30 * i + 2, 60)
    engine.run()
    assert engine.scheduler.totals.num_retractions > 0
    for turn in range(3):
        for n in (64, 65, 7, 1):
            assert engine.outputs[f"{turn}.{n}"] == ref[f"greedy.{n}"].tolist(), (turn, n)


@pytest.mark.parametrize("family", ["llama", "glm_moe_dsa"])
def test_prompt_logprobs_with_hits(family):
    """Prompt log probabilities from any start equal the cold ones, and the hit is used as far as it may be."""
    model, ref = load(family)
    vocab, n = model.config.vocab_size, 65
    prompt = ref[f"prompt.{n}"].numpy()
    expected = torch.log_softmax(ref[f"logits.{n}"], -1).numpy()
    engine = model.engine(page_size=16, chunk=16)
    engine.add("seed", prompt, 1)
    engine.run()
    for start in (0, 1, 2, 16, 17, 40, n - 1, n):
        engine.add(f"r{start}", prompt, 1, sampling=full_logprobs(vocab), logprob_start=start)
        engine.run()
        assert engine.last[f"r{start}"].num_cached_tokens == min(max(start - 1, 0), n - 1)
        found = reported_logprobs(engine, f"r{start}", vocab)  # positions max(start, 1) .. n
        rows = expected[max(start, 1) - 1 :]
        assert found.shape == rows.shape and np.abs(found - rows).max() < TOLERANCE, start
