"""Prompts of up to 200,000 tokens, streamed in tiles: the same answers as with all of a layer's prefix at once, and no more rows held than tiles."""
import numpy as np
import pytest

from kits.real_engine import TinyModel, full_logprobs, reported_logprobs
from kits.slim_checkpoint import slim
from sglane.layers.attention.keys import ExtendKeys

PAGE_SIZE = 64
NUM_NEW = 4


def run(model, prompt, cp_size, scratch_tokens, chunk, monkeypatch):
    """Tokens, log probabilities [NUM_NEW, vocab] of the outputs, and the largest number of prefix rows that one call held."""
    held = []
    filled = ExtendKeys._filled

    def spy(self, tile, places, num_rows):
        held.append(len(places) * PAGE_SIZE)
        return filled(self, tile, places, num_rows)

    monkeypatch.setattr(ExtendKeys, "_filled", spy)
    num_pages = -(-len(prompt) // PAGE_SIZE) + 16
    limits = {"page_size": PAGE_SIZE, "chunk": chunk, "num_pages": num_pages, "num_slots": 2, "scratch_tokens": scratch_tokens}
    engine = model.engine(**limits) if cp_size == 1 else model.ranks(cp_size, mapped=True, **limits)
    engine.add("long", prompt, NUM_NEW, sampling=full_logprobs(model.config.vocab_size))
    engine.run(max_turns=100_000)
    monkeypatch.setattr(ExtendKeys, "_filled", filled)
    return engine.outputs["long"], reported_logprobs(engine, "long", model.config.vocab_size), max(held)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("family", "cp_size", "num_tokens", "scratch_tokens", "chunk"), [
    ("llama", 1, 3000, 512, 500), ("glm_moe_dsa_share", 2, 3000, 512, 500), pytest.param("llama", 1, 200_000, 16384, 8192, marks=pytest.mark.slow),
    pytest.param("glm_moe_dsa_share", 2, 50_000, 8192, 4096, marks=pytest.mark.slow),  # every query chooses among all keys before it
])
def test_a_long_prompt_is_streamed_in_tiles(family, cp_size, num_tokens, scratch_tokens, chunk, monkeypatch, tmp_path):
    model = TinyModel(slim(family, tmp_path))
    prompt = np.random.default_rng(5).integers(2, model.config.vocab_size, num_tokens)
    whole, logprobs, most = run(model, prompt, cp_size, 1 << 20, chunk, monkeypatch)
    tiled, found, bounded = run(model, prompt, cp_size, scratch_tokens, chunk, monkeypatch)
    assert tiled == whole
    assert np.abs(found - logprobs).max() < 1e-4
    assert bounded <= scratch_tokens < most
