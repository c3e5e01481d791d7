"""Requests over lanes that are unequally full: while the total is enough, nobody is refused, the oldest goes on, and the books balance."""
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.engine import Engine
from kits.fake_executor import FakeExecutor, expected_output
from kits.lane_skew import CACHED, HELD, LOCKED, OwnerWatch, occupy
from sglane.mem_cache.page_layout import PageLayout
from sglane.mem_cache.radix_key import token_key
from sglane.utils import fallback

#: Turns in which the oldest request must have got on; its elders' chunks, an eviction and a retraction come first.
PATIENCE_TURNS = 40
NUM_SLOTS = 5
EMPTY_KEY = token_key(np.empty(0, np.int32))


@functools.cache
def prompt_of(family, length):
    return np.random.default_rng(family).integers(0, 900, 64)[:length]


@functools.cache
def expected(family, length, num_new):
    return expected_output(prompt_of(family, length), num_new)


class SkewedEngine:
    """An engine some of whose lanes are occupied, and the naive model beside it."""

    def __init__(self, page_size, cp_size, num_rows, occupied, **limits):
        """occupied: kind and free pages left, by lane; kind None: nothing is occupied."""
        layout = PageLayout(page_size, cp_size)
        num_slots = NUM_SLOTS + cp_size
        self.engine = Engine(FakeExecutor(layout, num_rows, num_slots), layout, num_rows, num_slots, **limits)
        self.watch = OwnerWatch(self.engine.ledger)
        self.occupants = []
        for lane, (kind, num_left) in enumerate(occupied):
            holding = None if kind is None else occupy(self.engine.ledger, lane, max(num_rows - 1 - num_left, 0), kind)
            self.occupants += [] if holding is None else [holding]
        self.num_pages = int(self.engine.ledger.available().sum())
        self.sent = {}  # rid -> (family, length, num_new, may end early)
        self._oldest, self._patience = None, PATIENCE_TURNS

    def largest_request(self):
        """Tokens that a lone request can have: the source of its tail copy may need a page of its own."""
        return (self.num_pages - 1) * self.engine.layout.page_size

    def send(self, rid, family, length, num_new, may_end):
        self.engine.add(rid, prompt_of(family, length), num_new)
        self.sent[rid] = (family, length, num_new, may_end)

    def turn(self):
        happened = self.engine.turn()
        state = self.engine.scheduler.kv_ledger()["device"]
        for lane, total in enumerate(state["total"]):
            assert sum(state[name][lane] for name in ("free", "cached", "held", "tickets")) == total
        self.check_progress()
        return happened

    def check_progress(self):
        requests = self.engine.scheduler._requests
        if not requests or self.engine.scheduler._paused:
            self._oldest = None
            return
        request = min(requests.values(), key=lambda item: item.arrival)
        mark = (request.rid, request.num_output_tokens, request.residence and request.residence.num_rows_done)
        self._patience = self._patience - 1 if mark == self._oldest else PATIENCE_TURNS
        self._oldest = mark
        assert self._patience > 0, f"{request.rid} ({request.phase.value}) made no progress for {PATIENCE_TURNS} turns"

    def finish(self):
        scheduler = self.engine.scheduler
        scheduler.resume()
        for _ in range(3000):
            if not self.turn() and scheduler.is_idle():
                break
        assert scheduler.is_idle()
        for rid, (family, length, num_new, may_end) in self.sent.items():
            want, got = expected(family, length, num_new), self.engine.outputs[rid]
            assert got == want[: len(got)]
            assert may_end or (got == want and self.engine.last[rid].finish.kind == "length"), self.engine.last[rid].finish
        assert scheduler._lane_work.waits.num_waiting == 0
        assert sum(scheduler.lanes()["home_moves"]) == self.watch.num_moves
        for holding in self.occupants:
            self.engine.ledger.release(holding, EMPTY_KEY)
        self.engine.assert_clean()
        assert scheduler.flush()
        assert scheduler.kv_ledger()["device"]["free"] == scheduler.kv_ledger()["device"]["total"]
        self.engine.ledger.audit()


ACTIONS = ["wait", "wait", "wait", "abort", "finish", "retract", "flush"]
occupations = st.one_of(
    st.just((None, 0)), st.tuples(st.sampled_from([HELD, LOCKED]), st.integers(0, 2)), st.tuples(st.just(CACHED), st.integers(0, 3))
)
operations = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 36), st.integers(1, 16), st.sampled_from(ACTIONS), st.integers(0, 8)), min_size=1, max_size=12
)


def run_operations(page_size, cp_size, num_rows, occupied, ops, **limits):
    world = SkewedEngine(page_size, cp_size, num_rows, occupied, **limits)
    largest = min(world.largest_request(), world.engine.max_tokens)
    scheduler = world.engine.scheduler
    for i, (family, length, num_new, action, turns) in enumerate(ops):
        rid = f"r{i}"
        if length + num_new <= largest:
            world.send(rid, family, length, num_new, action in ("abort", "finish"))
        for _ in range(turns):
            world.turn()
        if action == "abort":
            scheduler.abort(rid)
        elif action == "finish" and rid in world.sent:
            scheduler.finish(rid, max(len(world.engine.outputs[rid]) - 1, 0))
        elif action == "retract":
            scheduler.pause("retract")
            world.turn()
            scheduler.resume()
        elif action == "flush" and not world.occupants:
            assert scheduler.flush() == scheduler.is_idle()
    world.finish()


@settings(max_examples=100, deadline=None)
@given(
    page_size=st.sampled_from([1, 4, 16]), cp_size=st.integers(1, 4), spare=st.integers(0, 4), occupied=st.lists(occupations, min_size=4, max_size=4),
    ops=operations, chunk=st.sampled_from([8, 1000]), overlap=st.booleans(), policy=st.sampled_from(["fcfs", "lpm"]),
    conservativeness=st.sampled_from([0.0, 1.0]),
)
def test_what_fits_in_total_is_served(page_size, cp_size, spare, occupied, ops, chunk, overlap, policy, conservativeness):
    num_rows = 2 + spare + 48 // (page_size * cp_size)
    occupied = [(None, 0), *occupied[1:cp_size]]  # one lane stays open
    run_operations(page_size, cp_size, num_rows, occupied, ops, chunk=chunk, overlap=overlap, policy=policy, conservativeness=conservativeness)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(page_size=st.sampled_from([1, 4]), occupied=st.lists(occupations, min_size=8, max_size=8), ops=operations, overlap=st.booleans())
def test_what_fits_in_total_is_served_by_eight_lanes(page_size, occupied, ops, overlap):
    run_operations(page_size, 8, 3 + 48 // (page_size * 8), [(None, 0), *occupied[1:]], ops, chunk=8, overlap=overlap, conservativeness=0.0)


@pytest.mark.parametrize("kind", [HELD, LOCKED])
def test_a_request_grows_where_there_is_room(kind):
    """All lanes but one are full: prompts and decoding use that one, and nobody is refused."""
    for lane in range(3):
        world = SkewedEngine(4, 3, 20, [(kind, 0 if other != lane else 19) for other in range(3)], chunk=8)
        for i in range(3):
            world.send(f"r{i}", i, 9, 14, False)
        world.finish()
        assert world.watch.num_grown > 0 and world.watch.num_moves == 0


def test_a_home_that_runs_out_is_left_at_a_page_boundary():
    """All lanes have little room: a long answer goes from one to the next, and is right."""
    world = SkewedEngine(4, 3, 10, [(HELD, 4)] * 3, chunk=8)
    world.send("a", 0, 7, 36, False)
    world.finish()
    assert world.watch.num_moves >= 2 and sum(world.engine.scheduler.lanes()["home_moves"]) == world.watch.num_moves


@pytest.mark.parametrize("kind", [HELD, LOCKED])
def test_a_full_lane_of_a_tail_copy_cuts_the_hit_and_is_counted(kind):
    before = fallback.counts()["tail_copy_skipped"]
    world = SkewedEngine(4, 2, 12, [(None, 0), (None, 0)], chunk=64)
    world.send("seed", 0, 22, 1, False)
    while world.turn():
        pass
    ledger = world.engine.ledger
    probe = ledger.match(token_key(prompt_of(0, 23).astype(np.int32)), "", 22)
    lane = ledger.layout.lane(probe.source.page)
    ledger.cancel(probe)
    world.occupants.append(occupy(ledger, lane, int(ledger.free_counts()[lane]), kind))
    world.send("hit", 0, 23, 4, False)
    world.finish()
    assert fallback.counts()["tail_copy_skipped"] == before + 1
    assert world.engine.last["hit"].num_cached_tokens == 20
