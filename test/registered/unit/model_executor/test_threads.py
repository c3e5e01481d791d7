"""Thread counts by step and model size."""
import os
import time

import pytest
import torch

from sglane import environ
from sglane.model_executor.threads import DECODE_TOKENS, LOAD_WINDOW_S, SMALL_MODEL_BYTES, ForeignLoad, ThreadPolicy


@pytest.fixture
def counts(monkeypatch):
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(ForeignLoad, "_times", lambda self: (0.0, 0.0))
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


class Machine:
    """Times of four cores, of which others use some."""

    def __init__(self, monkeypatch):
        self.now = self.busy = self.own = 0.0
        monkeypatch.setattr(ForeignLoad, "_times", lambda load: (self.busy, self.own))

    def run(self, seconds: float, own: float, others: float) -> None:
        self.now += seconds
        self.own += own * seconds
        self.busy += (own + others) * seconds


@pytest.mark.parametrize(("others", "free"), [(0.0, 4), (0.4, 4), (0.6, 3), (1.0, 3), (2.7, 1), (4.0, 0), (-0.2, 4)])
def test_cores_of_others_are_not_free(monkeypatch, others, free):
    machine = Machine(monkeypatch)
    load = ForeignLoad({0, 1, 2, 3}, lambda: machine.now)
    machine.run(LOAD_WINDOW_S, 4.0 - max(others, 0.0), others)
    assert load.free_cores() == free


def test_load_is_of_the_last_window(monkeypatch):
    machine = Machine(monkeypatch)
    load = ForeignLoad({0, 1}, lambda: machine.now)
    machine.run(LOAD_WINDOW_S / 2, 1.0, 1.0)
    assert load.free_cores() == 2  # not a window yet
    machine.run(LOAD_WINDOW_S / 2, 1.0, 1.0)
    assert load.free_cores() == 1
    machine.run(LOAD_WINDOW_S, 1.0, 0.0)
    assert load.free_cores() == 2


def test_who_was_busy_before_does_not_matter(monkeypatch):
    """A client that worked until it asked, for instance."""
    machine = Machine(monkeypatch)
    load = ForeignLoad({0, 1}, lambda: machine.now)
    machine.run(10.0, 0.0, 2.0)
    load.begin()
    assert load.free_cores() == 2
    for _ in range(3):  # steps without a pause are one piece of work
        machine.run(LOAD_WINDOW_S / 3, 1.0, 1.0)
        load.begin()
    assert load.free_cores() == 1


def test_own_work_is_no_load():
    """The real counters: this process alone keeps a core busy."""
    load = ForeignLoad(os.sched_getaffinity(0))
    busy, own = load._times()
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    after, own_after = load._times()
    assert own_after - own >= 0.3
    assert after - busy >= own_after - own - 0.1  # kernel ticks of 10 ms


@pytest.mark.parametrize(("free", "expected"), [(8, 4), (3, 3), (0, 1)])
def test_large_steps_leave_busy_cores_alone(counts, monkeypatch, free, expected):
    monkeypatch.setattr(ForeignLoad, "free_cores", lambda self: free)
    ThreadPolicy(2, SMALL_MODEL_BYTES).for_step(1)
    assert counts == [4, expected]


def test_long_steps_adapt_between_layers(counts, monkeypatch):
    free = iter([4, 1, 3])
    monkeypatch.setattr(ForeignLoad, "free_cores", lambda self: next(free))
    policy = ThreadPolicy(2, SMALL_MODEL_BYTES)
    policy.for_step(1000)
    policy.adapt()
    policy.adapt()
    assert counts == [4, 4, 1, 3]
