"""Order of waiting requests, chunk boundaries, merging of results."""
import numpy as np
import pytest

from sglane.managers.admission import WaitingQueue, chunk_rows
from sglane.managers.request import Request
from sglane.managers.step_results import ResultMerger
from sglane.plan.io_struct import GenerateRequest, SamplingParams
from sglane.plan.step_plan import StepResult


@pytest.mark.parametrize("start, left, budget, page, expected", [
    (0, 10, 10, 4, 10),  # all that is left, no boundary needed
    (0, 100, 10, 4, 8),  # down to a boundary
    (3, 100, 10, 4, 9),  # 3 + 9 = 12
    (0, 100, 3, 4, 3),  # no boundary leaves a token: the budget counts
    (5, 100, 2, 4, 2),
    (5, 100, 3, 4, 3),
    (0, 100, 1, 1, 1),
])
def test_chunk_rows(start, left, budget, page, expected):
    assert chunk_rows(start, left, budget, page) == expected


def request(rid, arrival, priority=0):
    ids = np.array([1], np.int32).tobytes()
    return Request(GenerateRequest(rid=rid, input_ids=ids, sampling=SamplingParams(max_new_tokens=1), priority=priority), arrival, 10)


def test_priority_then_arrival_then_hits():
    hits = {"a": 0, "b": 5, "c": 9, "d": 1}
    for policy, expected in (("fcfs", "dabc"), ("lpm", "dcba")):
        queue = WaitingQueue(policy, None)
        for i, rid in enumerate("abcd"):
            queue.add(request(rid, i, priority=int(rid == "d")))
        assert "".join(item.rid for item in queue.in_order(lambda item: hits[item.rid])) == expected


def result(step, rank, slots, tokens):
    counts = [len(part) for part in tokens]
    flat = [token for part in tokens for token in part]
    return StepResult(step, rank, np.array(slots, np.int32).tobytes(), np.array(counts, np.int32).tobytes(), np.array(flat, np.int32).tobytes())


def test_results_are_merged_in_step_order():
    merger = ResultMerger(2)
    merger.add(result(1, 1, [4], [[8]]))
    merger.add(result(2, 1, [], []))
    assert merger.complete() == [] and merger.laggards(1) == [0]
    merger.add(result(1, 0, [2, 3], [[5, 6], []]))
    first, = merger.complete()
    assert first.step == 1 and {slot: tokens.tolist() for slot, tokens in first.tokens.items()} == {4: [8], 2: [5, 6], 3: []}
    merger.add(result(2, 0, [1], [[1]]))
    assert [step.step for step in merger.complete()] == [2]


def test_a_slot_sampled_twice_and_a_gap_are_fatal():
    merger = ResultMerger(2)
    merger.add(result(1, 0, [2], [[5]]))
    with pytest.raises(AssertionError, match="slot 2"):
        merger.add(result(1, 1, [2], [[5]]))
    with pytest.raises(AssertionError, match="expected 2"):
        merger.add(result(3, 0, [], []))
