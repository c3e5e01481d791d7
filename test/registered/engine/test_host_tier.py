"""Fill, evict, replay over real weights: whatever comes back from the host gives what computing it gave, for every family, lanes and page size."""
from functools import cache

import numpy as np
import pytest

from kits.checkpoints import FAMILIES, tiny
from kits.real_engine import TinyModel, full_logprobs, reported_logprobs
from sglane import environ

#: One copy is late at a time; acks of the others overtake it.
HOLDS = ("", *(f'{{"rank": 0, "point": "{point}", "sleep_ms": {ms}}}' for point, ms in (("load", 2), ("backup", 5), ("ack", 8))))
NUM_NEW = 4


@cache
def model(family):
    return TinyModel(tiny(family))


def make(family, cp_size, page_size, mapped, **limits):
    sizes = {"page_size": page_size, "chunk": 4 * page_size, "num_pages": 24 * cp_size, "num_slots": 4, **limits}
    return model(family).engine(**sizes) if cp_size == 1 else model(family).ranks(cp_size, mapped=mapped, **sizes)


def prompt_of(family, seed, length):
    return np.random.default_rng(seed).integers(8, model(family).config.vocab_size, length)


def ask(engine, family, rid, prompt):
    """(tokens, log probabilities [NUM_NEW, vocab], cached tokens on device, in the host)"""
    vocab_size = model(family).config.vocab_size
    engine.add(rid, prompt, NUM_NEW, sampling=full_logprobs(vocab_size))
    engine.run(max_turns=100_000)
    last = engine.last[rid]
    return engine.outputs[rid], reported_logprobs(engine, rid, vocab_size), last.num_cached_device, last.num_cached_host


def push_out(engine, family, page_size, cp_size, seed):
    """Twice what the device holds."""
    for i in range(4):
        engine.add(f"other{seed}.{i}", prompt_of(family, 1000 + 10 * seed + i, 12 * cp_size * page_size - 3), 1)
        engine.run(max_turns=100_000)


def check(family, cp_size, page_size, mapped, hold, lengths, monkeypatch):
    """Prompts one after the other, each longer one beginning with the one before: their tails end at the offsets of `lengths`."""
    monkeypatch.setattr(environ, "SGLANE_HOLD", hold)
    base = prompt_of(family, 3, max(lengths) + 1)
    cold = make(family, cp_size, page_size, mapped)
    expected = {n: ask(cold, family, f"cold{n}", base[:n])[:2] for n in lengths}
    engine = make(family, cp_size, page_size, mapped, num_host_pages=40 * 24 * cp_size)
    for n in lengths:
        assert ask(engine, family, f"fill{n}", base[:n])[0] == expected[n][0]
    from_host = []  # a page or two may have stayed where a lane had room
    for turn in range(2):
        for n in lengths:
            push_out(engine, family, page_size, cp_size, 10 * turn + n % 10)
            tokens, logprobs, device, host = ask(engine, family, f"again{turn}.{n}", base[:n])
            assert device + host == n - 1, (n, device, host)
            from_host.append(host)
            assert tokens == expected[n][0], n
            assert np.abs(logprobs - expected[n][1]).max() < 1e-4, n
    assert np.count_nonzero(from_host) > len(from_host) // 2 and engine.ledger.host_report()["load_tokens"] > 0
    assert engine.scheduler.flush()
    assert sum(engine.ledger.snapshot()["host"]["cached"]) == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("hold", [0, 1])
@pytest.mark.parametrize(("cp_size", "page_size", "mapped"), [(1, 4, False), (2, 4, True), (2, 16, False), (4, 4, True)])
@pytest.mark.parametrize("family", ["llama", "glm_moe_dsa_share"])
def test_fill_evict_replay(family, cp_size, page_size, mapped, hold, monkeypatch):
    check(family, cp_size, page_size, mapped, HOLDS[hold], (page_size, 2 * page_size + 1, 5 * page_size + 3), monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("hold", range(len(HOLDS)))
@pytest.mark.parametrize(("cp_size", "mapped"), [(1, False), (2, False), (2, True), (4, True)])
@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_fill_evict_replay_everywhere(family, cp_size, page_size, mapped, hold, monkeypatch):
    offsets = range(page_size) if page_size == 4 else (0, 1, page_size // 2, page_size - 1)
    check(family, cp_size, page_size, mapped, HOLDS[hold], [2 * page_size + offset for offset in offsets] + [7 * page_size + 1], monkeypatch)
