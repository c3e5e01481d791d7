"""Thread counts by step and model size."""
import pytest
import torch

from sglane import environ
from sglane.model_executor.threads import DECODE_TOKENS, SMALL_MODEL_BYTES, ThreadPolicy


@pytest.fixture
def counts(monkeypatch):
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(environ, "SGLANE_NUM_THREADS", 0)
    return found


def test_small_models_decode_on_one_thread(counts):
    policy = ThreadPolicy(2, SMALL_MODEL_BYTES - 1)
    policy.for_step(DECODE_TOKENS)
    policy.for_step(DECODE_TOKENS + 1)
    assert counts == [4, 1, 4]


def test_large_models_use_every_core_of_the_rank(counts):
    policy = ThreadPolicy(2, SMALL_MODEL_BYTES)
    policy.for_step(1)
    assert counts == [4, 4]


def test_a_fixed_number_wins(counts, monkeypatch):
    monkeypatch.setattr(environ, "SGLANE_NUM_THREADS", 3)
    ThreadPolicy(1, SMALL_MODEL_BYTES).for_step(1)
    assert counts == [3, 3]
