"""Kinds of fault that engines with pages and several ranks had, each as a small case."""
from collections import deque

import numpy as np
import pytest

from kits.engine import Engine
from kits.fake_executor import FakeExecutor, expected_output, prompt_of
from kits.ledger_world import LedgerWorld
from sglane.mem_cache.page_layout import Demand, PageLayout, Shortfall
from sglane.mem_cache.radix_key import token_key

NO_TOKENS = token_key(np.empty(0, np.int32))


def fake_engine(page_size, cp_size, num_pages, num_slots, chunk=64, **limits):
    layout, num_rows = PageLayout(page_size, cp_size), num_pages // cp_size + 1
    return Engine(FakeExecutor(layout, num_rows, num_slots), layout, num_rows, num_slots, chunk, **limits)


@pytest.mark.parametrize("keep", [False, True])
def test_every_page_of_a_request_is_given_back_once(keep):
    """A finish (keep) or an abort at every length with every cached prefix; seams of ranges often lie inside a page."""
    for length in range(1, 41):
        for cached in range(length):
            world = LedgerWorld(4, 4, num_rows=12, num_slots=2)
            tokens = np.arange(44, dtype=np.int32)
            for num_prompt in (cached, length) if cached else (length,):
                world.match(tokens, num_prompt, "")
                world.admit(world.matched[0], num_prompt)
                world.issue()
                world.retire()
                request = world.running[0]
                owned = set(request.holding.private_pages.tolist())
                before = world.state()["device"]
                world.release(request, num_prompt if keep or num_prompt < length else 0)
                after = world.state()["device"]
                assert sum(before["held"]) == len(owned) and sum(after["held"]) == sum(after["tickets"]) == 0
                assert sum(after["free"]) + sum(after["cached"]) == sum(after["total"])
            world.ledger.audit()
            world.check_tree()
            world.flush()
            assert world.state()["device"]["free"] == world.state()["device"]["total"]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("conservativeness", [0.0, 1.0])
def test_short_prompts_are_budgeted_in_pages(cp_size, conservativeness):
    """30 prompts of a page and one token each, at once, in a pool of 20 pages."""
    engine = fake_engine(16, cp_size, 20, 30, conservativeness=conservativeness)
    for i in range(30):
        engine.add(str(i), prompt_of(i, 17), 1)
    most = 0
    while engine.turn():
        most = max(most, engine.scheduler.num_running)
    engine.assert_clean()
    assert all(engine.outputs[str(i)] == expected_output(prompt_of(i, 17), 1) for i in range(30))
    assert 0 < most <= 10


def test_enough_pages_in_total_but_none_with_the_needed_owner():
    """Lane 2 is full of leased pages: refused without side effects; ending the lease of one leaf unlocks the parent whose page is needed."""
    world = LedgerWorld(4, 4, num_rows=9, num_slots=8)
    ledger, lanes = world.ledger, np.full(4, 1 << 20, np.int64)
    lanes[2] = 0
    parent = np.arange(32, dtype=np.int32)
    holding = ledger.match(token_key(parent), "", 0)
    ledger.admit(holding, 4, lanes)
    for end in range(8, 33, 4):
        ledger.extend(holding, end, decode=True, lane_tokens=lanes)
    ledger.release(holding, token_key(parent))  # all 8 pages of lane 2
    longer = np.append(parent, np.arange(100, 108, dtype=np.int32))
    leaf = ledger.match(token_key(longer), "", 40)
    ledger.admit(leaf, 40, np.zeros(4, np.int64))
    ledger.publish(leaf, token_key(longer))  # the leaf has pages of other lanes only
    wanted = Demand(np.array([0, 0, 1, 0]), 0)
    before = world.state()
    refused = ledger._supply.reserve(99, wanted, lambda available: np.empty(0, np.int32))
    assert isinstance(refused, Shortfall) and not refused.pending and refused.lanes.tolist() == [0, 0, 1, 0]
    assert world.state() == before and before["available"][2] == 0 and sum(before["available"]) >= 22
    ledger.release(leaf, token_key(longer))
    got = ledger._supply.reserve(99, wanted, lambda available: np.empty(0, np.int32))
    assert not isinstance(got, Shortfall) and ledger.layout.lanes(got).tolist() == [2]


class SlowRanks:
    """An engine whose ranks answer at different times."""

    def __init__(self, cp_size, delays, **limits):
        self.engine = fake_engine(4, cp_size, 24, 4, **limits)
        self._delays = delays
        self._queues = [deque() for _ in range(cp_size)]  # (turn at which the answer arrives, answer)
        self._turn = 0
        self.most_under_way = 0

    def turn(self):
        self._turn += 1
        scheduler = self.engine.scheduler
        plan = scheduler.next_plan()
        while plan is not None:
            results = self.engine.executor.run(plan)
            for rank, queue in enumerate(self._queues):
                queue.append((self._turn + self._delays(rank), results[rank]))
            plan = scheduler.next_plan()
        self.most_under_way = max(self.most_under_way, max(len(queue) for queue in self._queues))
        for queue in self._queues:
            while queue and queue[0][0] <= self._turn:
                scheduler.add_result(queue.popleft()[1])
        self.engine.ledger.audit()
        for output in scheduler.take_outputs():
            self.engine.outputs[output.rid] += np.frombuffer(output.token_ids, np.int32).tolist()
            self.engine.last[output.rid] = output

    def run(self):
        for _ in range(20_000):
            self.turn()
            if self.engine.scheduler.is_idle():
                return self.engine.assert_clean()
        raise AssertionError("it hangs")


@pytest.mark.parametrize("cp_size", [2, 4])
def test_a_rank_that_is_slow_changes_no_decision_and_no_answer(cp_size):
    """A step ends when the last rank has answered; no rank is more than two plans behind."""
    rng = np.random.default_rng(cp_size)
    ranks = SlowRanks(cp_size, lambda rank: int(rng.integers(0, 5)) if rank == 1 else 0, conservativeness=0.0)
    prompts = {str(i): prompt_of(i % 20, int(rng.integers(1, 24))) for i in range(100)}
    for rid, prompt in prompts.items():
        ranks.engine.add(rid, prompt, 6)
    ranks.run()
    assert all(ranks.engine.outputs[rid] == expected_output(prompt, 6) for rid, prompt in prompts.items())
    assert ranks.most_under_way == 2 and sum(ranks.engine.scheduler.lanes()["evicted_pages"]) > 0


def test_a_full_queue_and_a_slow_rank_end_in_answers():
    """Three may wait; the rest of a burst is refused once, for all ranks."""
    ranks = SlowRanks(2, lambda rank: 3 * rank, max_queued_requests=3)
    for i in range(10):
        ranks.engine.add(str(i), prompt_of(i, 60), 4)
    ranks.run()
    kinds = [ranks.engine.last[str(i)].finish.kind for i in range(10)]
    assert kinds == ["length"] * 3 + ["abort"] * 7
    assert all(ranks.engine.last[str(i)].finish.status_code == 503 for i in range(3, 10))
