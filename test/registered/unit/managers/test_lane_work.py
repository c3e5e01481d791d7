"""Counts by lane against sums over the plans themselves."""
import numpy as np
import pytest

from kits.engine import Engine
from kits.fake_executor import FakeExecutor
from sglane.managers.lane_work import PageWaits
from sglane.mem_cache.page_layout import PageLayout, Shortfall


class CountingExecutor(FakeExecutor):
    """Counts every row where it is written."""

    def __init__(self, layout, num_rows, num_slots):
        super().__init__(layout, num_rows, num_slots)
        self.computed = np.zeros(layout.cp_size, np.int64)
        self.busiest = 0

    def run(self, plan):
        before = self.computed.copy()
        results = super().run(plan)
        self.busiest += int((self.computed - before).max())
        return results

    def _feed(self, slot, token):
        page, _ = self._position(slot, self._lengths[slot])
        self.computed[page % len(self.computed)] += 1
        super()._feed(slot, token)


@pytest.mark.parametrize("page_size, cp_size", [(1, 2), (4, 1), (4, 3), (16, 4)])
def test_computed_tokens_are_those_of_the_plans(page_size, cp_size):
    layout, num_rows = PageLayout(page_size, cp_size), 1 + max(72 // (page_size * cp_size), 3)
    engine = Engine(CountingExecutor(layout, num_rows, 5), layout, num_rows, 5, 8, conservativeness=0.0)
    rng = np.random.default_rng(0)
    for i in range(12):
        engine.add(str(i), rng.integers(0, 900, rng.integers(1, 30)), int(rng.integers(1, 12)))
        engine.turn()
    engine.run()
    lanes = engine.scheduler.lanes()
    assert lanes["computed_tokens"] == engine.executor.computed.tolist() and lanes["busiest_lane_tokens"] == engine.executor.busiest
    assert sum(lanes["computed_tokens"]) <= cp_size * lanes["busiest_lane_tokens"]
    assert sum(lanes["evicted_pages"]) * page_size == engine.ledger.evictions()["num_tokens"] > 0
    assert lanes["homes"] == [0] * cp_size
    assert sum(lanes["page_waits"]["times"]["counts"]) == sum(count for *_, count in lanes["page_waits"]["counts"]) > 0


def test_homes_are_those_of_the_requests_that_run():
    layout = PageLayout(4, 4)
    engine = Engine(FakeExecutor(layout, 30, 9), layout, 30, 9, 64)
    for i in range(8):
        engine.add(str(i), np.random.default_rng(i).integers(0, 900, 6), 30)
        engine.turn()
    assert engine.scheduler.lanes()["homes"] == [2, 2, 2, 2]
    engine.scheduler.abort("3")
    engine.run()
    assert engine.scheduler.lanes()["homes"] == [0, 0, 0, 0]


def test_a_wait_counts_once_with_its_reason_and_its_whole_time():
    now_s = [0.0]
    waits = PageWaits(lambda: now_s[0])
    waits.refused("a", Shortfall(np.array([0, 2, 0]), 0, True))
    now_s[0] = 0.02
    waits.refused("a", Shortfall(np.array([0, 0, 0]), 1, False))
    waits.refused("b", Shortfall(np.array([0, 0, 0]), 1, False))
    waits.refused("c", None)
    now_s[0] = 0.3
    for rid in ("a", "a", "b", "nobody"):
        waits.ended(rid)
    report = waits.report()
    assert report["counts"] == [["1", "pending", 1], ["any", "short", 2]]
    assert sum(report["times"]["counts"]) == 2 and report["times"]["sum_s"] == pytest.approx(0.58) and waits.num_waiting == 1


@pytest.mark.parametrize("cp_size", [1, 2, 3])
def test_requests_that_decode_with_a_full_cache_neither_move_nor_wait(cp_size):
    """Each next page is made free in the home lane one step before it is needed."""
    layout, num_rows = PageLayout(4, cp_size), 1 + 48 // cp_size
    engine = Engine(FakeExecutor(layout, num_rows, 8), layout, num_rows, 8, 64)
    for i in range(12):  # fill the cache
        engine.add(f"old{i}", np.random.default_rng(i).integers(0, 900, 24), 1)
        engine.run()
    assert sum(engine.ledger.free_counts()) <= 6
    for i in range(4):
        engine.add(str(i), np.random.default_rng(100 + i).integers(0, 900, 7), 20)
        for _ in range(3):
            engine.turn()
    num_waits = sum(count for *_, count in engine.scheduler.lanes()["page_waits"]["counts"])
    num_moves = sum(engine.scheduler.lanes()["home_moves"])
    engine.run()
    lanes = engine.scheduler.lanes()
    assert sum(lanes["home_moves"]) == num_moves
    assert sum(count for *_, count in lanes["page_waits"]["counts"]) == num_waits
