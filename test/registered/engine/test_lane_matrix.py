"""Ranks, page sizes, transports and directions: tokens and log probabilities of one rank, cold and after every kind of hit; float32, poisoned
pages, one rank late."""
import functools
import itertools
import json

import numpy as np
import pytest

from kits.checkpoints import tiny
from kits.real_engine import TinyModel, full_logprobs, reported_logprobs
from kits.tiny_configs import FAMILIES
from sglane import environ
from sglane.model_executor.executor import Executor

TOLERANCE = 1e-4
DIRECTIONS = {"auto": None, "keys": lambda extends: [False] * len(extends), "queries": lambda extends: [start > 0 for start, _ in extends]}

FEW = [(2, 4, True, "auto"), (2, 16, False, "queries"), (4, 4, False, "keys"), (4, 16, True, "queries")]
ALL = [case for case in itertools.product((2, 4, 8), (4, 16, 64), (False, True), DIRECTIONS) if case not in FEW]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    monkeypatch.setattr(environ, "SGLANE_POISON", True)


@functools.lru_cache(maxsize=1)
def load(family):
    return TinyModel(tiny(family))


def lengths(page_size, cp_size):
    """Less than a page, a page for each rank, two for each, and one token beside each of these."""
    borders = [page_size, cp_size * page_size, 2 * cp_size * page_size]
    return sorted({n for border in borders for n in (border - 1, border, border + 1) if n <= 300} | {1})


def prompts(vocab_size, page_size, cp_size):
    """Cold prompts by name, and for each prompts that hit a part of it: all, whole pages, half, inside a page."""
    rng = np.random.default_rng(page_size * 100 + cp_size)
    cold = {f"{n}": rng.integers(2, vocab_size, n) for n in lengths(page_size, cp_size)}
    hits = {}
    for n, prompt in [(len(prompt), prompt) for prompt in cold.values()]:
        for shared in {n - 1, n // page_size * page_size, n // 2, max(n - page_size - 1, 0)} - {0}:
            hits[f"{n}.{shared}"] = np.concatenate((prompt[:shared], rng.integers(2, vocab_size, 1 + int(rng.integers(0, 2 * page_size)))))
    return cold, hits


def answers(engine, model, page_size, cp_size):
    """Tokens and float32 log probabilities [positions, vocab] of every prompt; the cold ones together, then those that hit."""
    vocab, found = model.config.vocab_size, {}
    cold, hits = prompts(vocab, page_size, cp_size)
    num_new = min(page_size + 2, 10)
    for name, prompt in cold.items():
        engine.add(name, prompt, num_new, sampling=full_logprobs(vocab), logprob_start=0)
    engine.run()
    for name, prompt in hits.items():
        engine.add(name, prompt, num_new, sampling=full_logprobs(vocab))
    engine.run()
    for name in (*cold, *hits):
        found[name] = engine.outputs[name], reported_logprobs(engine, name, vocab)
    assert any(engine.last[name].num_cached_tokens for name in hits)
    return found


@functools.lru_cache(maxsize=8)
def expected(family, page_size, cp_size):
    model = load(family)
    return answers(model.engine(page_size=page_size, chunk=48, num_pages=6000 // page_size, num_slots=16), model, page_size, cp_size)


def check(family, cp_size, page_size, mapped, direction, monkeypatch):
    want = expected(family, page_size, cp_size)
    if DIRECTIONS[direction] is not None:
        monkeypatch.setattr(Executor, "_directions", lambda self: DIRECTIONS[direction])
    monkeypatch.setattr(environ, "SGLANE_CP_PREFETCH_MIN_TOKENS", 1)
    monkeypatch.setattr(environ, "SGLANE_HOLD", json.dumps({"rank": cp_size - 1, "point": "exchange" if mapped else "forward", "sleep_ms": 1}))
    model = load(family)
    engine = model.ranks(cp_size, page_size=page_size, chunk=48, num_pages=6000 // page_size, num_slots=16, mapped=mapped)
    found = answers(engine, model, page_size, cp_size)
    for name, (tokens, logprobs) in want.items():
        assert found[name][0] == tokens, name
        assert np.abs(found[name][1] - logprobs).max() < TOLERANCE, name
    cached = engine.scheduler.kv_ledger()["device"]["cached"]
    assert min(cached) > 0, f"a lane owns nothing: {cached}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cp_size, page_size, mapped, direction", FEW)
def test_lanes_answer_as_one_rank(family, cp_size, page_size, mapped, direction, monkeypatch):
    check(family, cp_size, page_size, mapped, direction, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cp_size, page_size, mapped, direction", ALL)
def test_all_lanes_answer_as_one_rank(family, cp_size, page_size, mapped, direction, monkeypatch):
    check(family, cp_size, page_size, mapped, direction, monkeypatch)
