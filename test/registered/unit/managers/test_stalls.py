"""Continues for which the executors have no row: planned again, never lost, counted."""
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.engine import Engine
from kits.fake_executor import FakeExecutor, expected_output, prompt_of
from sglane.mem_cache.page_layout import PageLayout
from sglane.plan.step_plan import Continues, StepPlan, StepResult


class StallingExecutor(FakeExecutor):
    """Has no row for the continues of slots that `stalls(step, slot)` names: keeps their new pages and answers with 0 tokens."""

    def __init__(self, *sizes, stalls):
        super().__init__(*sizes)
        self._stalls = stalls
        self.num_stalled = 0

    def run(self, plan: StepPlan) -> list[StepResult]:
        slots = np.frombuffer(plan.continues.slots, np.int32)
        counts = np.frombuffer(plan.continues.num_new_pages, np.int32)
        parts = np.split(np.frombuffer(plan.continues.new_pages, np.int32), np.cumsum(counts)[:-1])
        goes = np.array([not self._stalls(plan.step, slot) for slot in slots.tolist()], bool)
        self.num_stalled += int((~goes).sum())
        kept = [part for part, go in zip(parts, goes) if go]
        continues = Continues(slots[goes].tobytes(), np.ones(goes.sum(), np.int32).tobytes(), counts[goes].tobytes(),
                              np.concatenate([np.empty(0, np.int32), *kept]).tobytes())
        results = super().run(msgspec.structs.replace(plan, continues=continues))
        for slot, part, go in zip(slots.tolist(), parts, goes):
            if not go:
                self._rows[slot] += part.tolist()
        stalled = slots[~goes]
        first = results[0]
        none = np.zeros_like(stalled).tobytes()
        results[0] = msgspec.structs.replace(first, slots=stalled.tobytes() + first.slots, num_tokens=none + first.num_tokens)
        return results


def stalling_engine(stalls, page_size=4, cp_size=2, num_pages=24, num_slots=4, overlap=True, **limits):
    layout, num_rows = PageLayout(page_size, cp_size), num_pages // cp_size + 1
    executor = StallingExecutor(layout, num_rows, num_slots, stalls=stalls)
    return Engine(executor, layout, num_rows, num_slots, 8, overlap, **limits)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stalled_steps", [{3}, {3, 4}, {4, 5, 6}, set(range(2, 30, 2)), set(range(2, 30))])
def test_a_stalled_slot_is_planned_again(stalled_steps, overlap):
    engine = stalling_engine(lambda step, slot: step in stalled_steps, overlap=overlap)
    engine.add("a", prompt_of(0, 6), 9)
    engine.run()
    assert engine.outputs["a"] == expected_output(prompt_of(0, 6), 9)
    assert engine.scheduler.totals.num_stalls == engine.executor.num_stalled > 0
    assert engine.scheduler.totals.num_output_tokens == 9
    assert all(len(message.token_ids) or message.finish for message in engine.messages["a"]), "an answer without a token was sent"


def test_others_go_on_while_a_slot_is_stalled():
    engine = stalling_engine(lambda step, slot: slot == 0 and step < 40)
    engine.add("stalled", prompt_of(0, 5), 4)
    engine.add("other", prompt_of(1, 5), 6)
    for _ in range(12):
        engine.turn()
    assert engine.last["other"].finish is not None and len(engine.outputs["stalled"]) == 1
    engine.run()
    assert engine.outputs["stalled"] == expected_output(prompt_of(0, 5), 4)


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_a_request_may_end_while_it_is_stalled(end):
    engine = stalling_engine(lambda step, slot: step > 4)
    engine.add("a", prompt_of(0, 6), 50)
    for _ in range(8):
        engine.turn()
    assert engine.scheduler.totals.num_stalls > 1
    if end == "abort":
        engine.scheduler.abort("a")
    else:
        engine.scheduler.finish("a", 1)
    engine.run()
    engine.add("b", prompt_of(0, 6), 1)  # what is cached is what was written
    engine.run()
    assert engine.outputs["b"] == expected_output(prompt_of(0, 6), 1)


@settings(max_examples=50)
@given(st.integers(0, 1000), st.integers(1, 4), st.sampled_from([1, 4]), st.booleans(), st.sampled_from([0.1, 0.5, 0.9]))
def test_random_stalls_change_no_answer(seed, cp_size, page_size, overlap, share):
    """Stalls among retractions and evictions."""
    rng = np.random.default_rng(seed)
    engine = stalling_engine(lambda step, slot: rng.random() < share, page_size, cp_size, max(36 // page_size, 8), overlap=overlap,
                             conservativeness=0.0)
    for i in range(4):
        engine.add(str(i), prompt_of(seed + i, 5 + i), 8)
    engine.run()
    for i in range(4):
        assert engine.outputs[str(i)] == expected_output(prompt_of(seed + i, 5 + i), 8)
    assert engine.scheduler.totals.num_stalls == engine.executor.num_stalled
