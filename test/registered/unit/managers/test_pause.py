"""A pause issues no steps and loses nothing: answers after it are those of an undisturbed run."""
import numpy as np
import pytest

from kits.engine import Engine
from kits.fake_executor import FakeExecutor, expected_output
from sglane.mem_cache.page_layout import PageLayout

LENGTHS = {"a": 5, "b": 17, "c": 9, "d": 30}
NUM_NEW = 12


def busy_engine(num_turns, overlap=True, cp_size=1, num_slots=3, num_pages=24):
    """Four requests, one of which has no slot at first."""
    layout = PageLayout(4, cp_size)
    num_rows = num_pages // cp_size + 1
    engine = Engine(FakeExecutor(layout, num_rows, num_slots), layout, num_rows, num_slots, 8, overlap)
    for rid in LENGTHS:
        engine.add(rid, prompt(rid), NUM_NEW)
    for _ in range(num_turns):
        engine.turn()
    return engine


def prompt(rid):
    return np.random.default_rng(ord(rid)).integers(0, 900, LENGTHS[rid])


def settle(engine):
    """Until nothing happens any more."""
    for _ in range(4):
        engine.turn()
    assert not engine.turn() and engine.scheduler.oldest_unretired_step is None


@pytest.mark.parametrize("num_turns", range(0, 16, 2))
@pytest.mark.parametrize(("overlap", "cp_size", "num_pages"), [(True, 1, 24), (False, 1, 24), (True, 2, 26), (True, 1, 17)])
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_answers_are_those_of_an_undisturbed_run(mode, overlap, cp_size, num_pages, num_turns):
    engine = busy_engine(num_turns, overlap, cp_size, num_pages=num_pages)
    engine.scheduler.pause(mode)
    settle(engine)
    before = {rid: list(tokens) for rid, tokens in engine.outputs.items()}
    num_left = int(engine.scheduler.load()["num_waiting_reqs"]) + engine.scheduler.num_running
    assert num_left and engine.scheduler.set_aside()["num_paused_reqs"] == num_left
    assert mode == "in_place" or engine.scheduler.num_running == 0
    for _ in range(3):
        assert not engine.turn()
    assert engine.outputs == before
    engine.scheduler.resume()
    engine.run()
    assert engine.outputs == {rid: expected_output(prompt(rid), NUM_NEW) for rid in LENGTHS}
    assert engine.scheduler.set_aside() == {"num_paused_reqs": 0, "num_retracted_reqs": 0}


def test_retracted_requests_leave_a_cache_that_can_be_flushed():
    engine = busy_engine(6)
    engine.scheduler.pause("in_place")
    settle(engine)
    assert not engine.scheduler.flush(), "requests hold their pages"
    engine.scheduler.pause("retract")
    settle(engine)
    assert engine.scheduler.set_aside()["num_retracted_reqs"] > 0
    assert engine.scheduler.flush()
    assert sum(engine.ledger.snapshot()["device"]["cached"]) == 0
    engine.scheduler.resume()
    assert not engine.scheduler.flush(), "requests wait for their turn"
    engine.run()
    assert engine.outputs == {rid: expected_output(prompt(rid), NUM_NEW) for rid in LENGTHS}


def test_abort_ends_what_is_there_and_holds_what_comes():
    engine = busy_engine(6)
    engine.scheduler.pause("abort")
    settle(engine)
    assert {engine.last[rid].finish.kind for rid in LENGTHS} == {"abort"}
    engine.assert_clean()
    engine.add("e", [1, 2, 3], 4)
    assert not engine.turn() and engine.scheduler.set_aside()["num_paused_reqs"] == 1
    engine.scheduler.resume()
    engine.run()
    assert engine.outputs["e"] == expected_output(np.array([1, 2, 3]), 4)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("rid", LENGTHS)
def test_aborts_work_in_a_pause(mode, rid):
    engine = busy_engine(5)
    engine.scheduler.pause(mode)
    settle(engine)
    engine.scheduler.abort(rid)
    engine.turn()
    assert engine.last[rid].finish.kind == "abort"
    engine.scheduler.resume()
    engine.run()
    assert all(engine.outputs[other] == expected_output(prompt(other), NUM_NEW) for other in LENGTHS if other != rid)
