"""Loads, backups and tails between device and host pool, with real models: what comes back is what was there, and nobody reads it too early."""
import json
import threading
import time
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch

from kits.checkpoints import FAMILIES, tiny
from kits.plan_driver import LocalRanks, PlanDriver, greedy, ints, start_ranks
from kits.real_engine import TinyModel
from sglane import environ
from sglane.model_executor.copy_engine import CopyFailed
from sglane.model_executor.copy_orders import CopyOrderError
from sglane.model_executor.executor import Executor
from sglane.plan.step_plan import Backup, Load, StepPlan, TailCopy

torch.set_num_threads(1)
NUM_HOST_ROWS = 100
VOCABULARY = 512
RANKS = [(1, False), (2, False), (2, True)]
RANK_IDS = ["cp1", "cp2", "cp2-mapped"]
opened: list[LocalRanks] = []


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(environ, "SGLANE_POISON", True)
    monkeypatch.setattr(environ, "SGLANE_CP_PREFETCH_MIN_TOKENS", 1)  # where ranks fetch ahead, they do
    yield
    while opened:
        opened.pop().close(finish=False)


@cache
def model(family: str) -> TinyModel:
    return TinyModel(tiny(family))


def hold(monkeypatch: pytest.MonkeyPatch, point: str, sleep_ms: float, rank: int = 0) -> None:
    monkeypatch.setattr(environ, "SGLANE_HOLD", json.dumps({"rank": rank, "point": point, "sleep_ms": sleep_ms}))


def driver(family: str, page_size: int = 4, cp_size: int = 1, mapped: bool = False) -> PlanDriver:
    found = model(family)
    ranks = start_ranks(found.config, found.shards(cp_size), page_size, num_host_rows=NUM_HOST_ROWS, mapped=mapped)
    opened.append(ranks)
    return PlanDriver(ranks, page_size, cp_size, num_host_rows=NUM_HOST_ROWS)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def run_first(drive: PlanDriver, tokens: list[int], num_outputs: int = 3) -> np.ndarray:
    """Slot 0 computes the prompt, whole pages go to the host tier meanwhile. Returns what `outputs` does."""
    drive.start(0, tokens, greedy(logprobs=True, logprob_token_ids=list(range(VOCABULARY))))
    while drive.slots[0].fed < len(tokens):
        drive.step({0: 24}, backup=True)
    return outputs(drive, 0, num_outputs)


def outputs(drive: PlanDriver, slot: int, num_outputs: int) -> np.ndarray:
    """Decode up to that number of outputs. Their log probabilities, float32 [num_outputs, vocabulary]."""
    while len(drive.slots[slot].outputs) < num_outputs:
        drive.step({}, [slot])
    found = {int(np.frombuffer(block.positions, np.int32)[0]): np.frombuffer(block.asked_logprobs, np.float32) for block in drive.blocks
             if block.slot == slot}
    return np.stack([found[position] for position in sorted(found)][:num_outputs])


def settle(drive: PlanDriver) -> None:
    """Until all records have the rows of their pages."""
    deadline = time.monotonic() + 30
    while any(not same_rows(drive, page, host) for page, host in drive.copies.items()):
        assert time.monotonic() < deadline, "records differ from their pages"
        time.sleep(0.005)


def same_rows(drive: PlanDriver, page: int, host: int) -> bool:
    """All planes and layers, bit by bit."""
    executor = drive.run.executors[page % drive.cp_size]
    row, host_row = page // drive.cp_size, host // drive.cp_size
    assert page % drive.cp_size == host % drive.cp_size
    return all(torch.equal(plane.buffer[row].view(torch.int32), executor._copies.host.planes[name][host_row].view(torch.int32))
               for name, plane in executor._pool.planes.items())


def back(drive: PlanDriver, tokens: list[int], num_pages: int, *, num_loads: int = 1) -> list[int]:
    """Slot 0 ends, its pages are overwritten; slot 1 has the same prompt, whose first pages come back in the step that reads them."""
    host = [drive.copies[page] for page in drive.slots[0].pages[:num_pages]]
    drive.release(0)
    drive.step({})
    cached: list[int] = []
    tickets = []
    for part in np.array_split(host, num_loads):
        ticket, pages = drive.load(part.tolist())
        tickets.append(ticket)
        cached += pages
    drive.start(1, tokens, greedy(logprobs=True, logprob_token_ids=list(range(VOCABULARY))), cached, num_pages * drive.page_size)
    drive.step({1: 24}, needs_load=tickets[-1])
    while drive.slots[1].fed < len(tokens):
        drive.step({1: 24})
    return tickets


def assert_equal(found: np.ndarray, want: np.ndarray) -> None:
    assert found.argmax(1).tolist() == want.argmax(1).tolist()
    assert np.abs(found - want).max() < 1e-4


@pytest.mark.parametrize(("cp_size", "mapped"), RANKS, ids=RANK_IDS)
@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefix_comes_back_while_it_is_read(monkeypatch, family: str, page_size: int, cp_size: int, mapped: bool) -> None:
    """Loads are slow in one lane, into poisoned pages; the step that orders them reads them. Backups happen in the forwards."""
    hold(monkeypatch, "load", 4, rank=cp_size - 1)
    drive = driver(family, page_size, cp_size, mapped)
    tokens = prompt(84)
    want = run_first(drive, tokens)
    num_pages = 80 // page_size
    settle(drive)
    lanes = drive.lanes(drive.slots[0].pages[:num_pages])
    tickets = back(drive, tokens, num_pages)
    assert_equal(outputs(drive, 1, 3), want)
    drive.run.box.wait(tickets[0], lanes)
    ends = [end for end in drive.run.box.ends if end.ticket == tickets[0]]
    assert sum(end.num_bytes for end in ends) == num_pages * drive.run.executors[0]._copies.host.record_bytes
    assert all(end.duration_s > 0 for end in ends)
    drive.run.close()
    everything = {end.ticket for end in drive.run.box.ends}
    assert everything == set(range(1, drive.num_tickets + 1))


@pytest.mark.parametrize(("cp_size", "mapped"), RANKS, ids=RANK_IDS)
@pytest.mark.parametrize("family", ["llama", "glm_moe_dsa_share"])
def test_a_reader_waits_for_the_loads_before_the_one_it_names(monkeypatch, family: str, cp_size: int, mapped: bool) -> None:
    """The last of several loads has a single page: the other lane has no part in it."""
    hold(monkeypatch, "load", 4)
    drive = driver(family, 4, cp_size, mapped)
    tokens = prompt(44, 5)
    want = run_first(drive, tokens)
    settle(drive)
    tickets = back(drive, tokens, 9, num_loads=9)
    assert_equal(outputs(drive, 1, 3), want)
    drive.run.close()
    assert all(len(drive.run.box.lanes(ticket)) == 1 for ticket in tickets)


class LazyGate:
    """Brings a layer of a plane when it is waited for, and not before."""

    def __init__(self, executor: Executor, host_pages: list[int], pages: list[int]):
        self._planes = executor._pool.planes
        self._records = executor._copies.host.planes
        pool = executor._pool
        self._pairs = [(page // pool.cp_size, host // pool.cp_size) for page, host in zip(pages, host_pages) if page % pool.cp_size == pool.rank]
        self._came: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def wait(self, plane: str, plane_layer: int) -> None:
        with self._lock:
            if (plane, plane_layer) not in self._came:
                time.sleep(0.002)
                for row, host_row in self._pairs:
                    self._planes[plane].buffer[row, plane_layer] = self._records[plane][host_row, plane_layer]
                self._came.add((plane, plane_layer))


@pytest.mark.parametrize(("cp_size", "mapped"), RANKS, ids=RANK_IDS)
@pytest.mark.parametrize("num_new", [4, 24])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "deepseek_v32", "glm_moe_dsa_share"])
def test_every_reader_of_a_plane_passes_its_gate(family: str, num_new: int, cp_size: int, mapped: bool) -> None:
    """Few new tokens: queries are gathered; many: keys are."""
    drive = driver(family, 4, cp_size, mapped)
    tokens = prompt(60 + num_new, 9)
    want = run_first(drive, tokens, 1)
    settle(drive)
    host = [drive.copies[page] for page in drive.slots[0].pages[:15]]
    drive.release(0)
    drive.step({})
    cached = [drive.take_page(page % cp_size) for page in host]
    for executor in drive.run.executors:
        executor._begin_copies = lambda plan, gate=LazyGate(executor, host, cached): gate
    drive.start(1, tokens, greedy(logprobs=True, logprob_token_ids=list(range(VOCABULARY))), cached, 60)
    drive.step({1: 100})
    assert_equal(outputs(drive, 1, 1), want)


def test_layers_are_read_before_the_load_has_ended(monkeypatch) -> None:
    hold(monkeypatch, "load", 30)
    drive = driver("qwen3")
    tokens = prompt(50)
    run_first(drive, tokens, 1)
    settle(drive)
    executor = drive.run.executors[0]
    seen = []
    executor._hooks.tell_written(lambda layer: seen.append((layer, executor._copies._loads._ended)))
    back(drive, tokens, 10)
    assert seen[:3] == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("family", ["llama", "glm_moe_dsa_share"])
def test_a_backup_follows_the_layers(family: str) -> None:
    """The rows of a layer are in the host tier before the next layer is computed, if there is time; rows of later layers are not."""
    drive = driver(family)
    executor = drive.run.executors[0]
    written_after = executor._config.written_after()
    engine = executor._copies
    checked = []

    def check(layer: int) -> None:
        engine.layer_written(layer)
        host = list(drive.copies.values())
        for name, layers in written_after.items():
            record = engine.host.planes[name][host]
            deadline = time.monotonic() + 10
            while record[:, [i for i, after in enumerate(layers) if after <= layer]].isnan().any():
                assert time.monotonic() < deadline, f"{name}: a layer up to {layer} was not copied"
                time.sleep(0.001)
                record = engine.host.planes[name][host]
            assert record[:, [i for i, after in enumerate(layers) if after > layer]].isnan().all()
        checked.append(layer)

    executor._hooks.tell_written(check)
    drive.start(0, prompt(20), greedy())
    drive.step({0: 20}, backup=True)
    assert checked == list(range(executor._config.num_layers))


@pytest.mark.parametrize(("cp_size", "mapped"), RANKS, ids=RANK_IDS)
@pytest.mark.parametrize(("family", "page_size"), [("llama", 4), ("glm_moe_dsa", 4), ("deepseek_v32", 16), ("deepseek_v3", 16)])
def test_a_tail_comes_from_a_record_at_every_offset(family: str, page_size: int, cp_size: int, mapped: bool) -> None:
    drive = driver(family, page_size, cp_size, mapped)
    tokens = prompt(2 * page_size + 5, 1)
    run_first(drive, tokens, 1)
    settle(drive)
    first, second = drive.slots[0].pages[:2]
    host = drive.copies[second]
    drive._poison = [second]  # on the device the tail's page is gone
    for num_tokens in range(1, page_size):
        shared = page_size + num_tokens
        other = tokens[:shared] + prompt(6, 100 + num_tokens)
        drive.start(2, other, greedy(logprobs=True, logprob_token_ids=list(range(VOCABULARY))))
        drive.prefill(2, 100)
        drive.blocks, before = [], drive.blocks
        cold = _last_logprobs(before)
        drive.release(2)
        private = drive.take_page(host % cp_size)
        drive.start(1, other, greedy(logprobs=True, logprob_token_ids=list(range(VOCABULARY))), [first, private], shared,
                    [TailCopy(host, private, num_tokens, from_host=True)])
        drive.prefill(1, 100)
        assert_equal(_last_logprobs(drive.blocks)[None], cold[None])
        drive.slots[1].pages.remove(first)
        drive.release(1)


def _last_logprobs(blocks: list) -> np.ndarray:
    return np.frombuffer(blocks[-1].asked_logprobs, np.float32)


@pytest.mark.parametrize(("cp_size", "mapped"), RANKS, ids=RANK_IDS)
def test_decode_pages_and_valid_tails_go_as_whole_pages_in_a_plan_of_copies_alone(cp_size: int, mapped: bool) -> None:
    drive = driver("glm_moe_dsa", 4, cp_size, mapped)
    tokens = prompt(10, 2)
    drive.start(0, tokens, greedy(logprobs=True, logprob_token_ids=list(range(VOCABULARY))))
    drive.prefill(0, 100)
    want = outputs(drive, 0, 8)
    pages, known = drive.slots[0].pages, tokens + drive.slots[0].outputs
    ticket = drive.backup(pages)
    drive.step({})
    drive.run.box.wait(ticket, drive.lanes(pages))
    settle(drive)
    host = [drive.copies[page] for page in pages]
    drive.release(0)
    drive.step({})
    loaded, cached = drive.load(host)
    drive.step({})
    drive.run.box.wait(loaded, drive.lanes(cached))
    drive.start(1, known[:17], greedy(logprobs=True, logprob_token_ids=list(range(VOCABULARY))), cached, 16)
    drive.step({1: 1})
    assert_equal(outputs(drive, 1, 1), want[7:8])


@pytest.mark.parametrize(("cp_size", "mapped"), RANKS, ids=RANK_IDS)
def test_backups_go_on_while_later_steps_run(monkeypatch, cp_size: int, mapped: bool) -> None:
    hold(monkeypatch, "backup", 250)
    drive = driver("deepseek_v32", 4, cp_size, mapped)
    tokens = prompt(60, 3)
    want = run_first(drive, tokens, 5)
    assert sum(end.rank == 0 for end in drive.run.box.ends) < drive.num_tickets, "the hold did not slow them"
    settle(drive)
    drive.run.close()
    assert {end.ticket for end in drive.run.box.ends} == set(range(1, drive.num_tickets + 1))
    monkeypatch.setattr(environ, "SGLANE_HOLD", "")
    other = driver("deepseek_v32", 4, cp_size, mapped)
    assert_equal(run_first(other, tokens, 5), want)


@pytest.mark.parametrize("point", ["load", "ack"])
def test_a_step_that_waits_for_a_load_fails_with_it(monkeypatch, point: str) -> None:
    drive = driver("llama")
    tokens = prompt(30)
    run_first(drive, tokens, 1)
    settle(drive)
    hold(monkeypatch, point, -1)
    executor = drive.run.executors[0]
    executor._copies._loads._holds = executor._copies._loads.worker._holds = type(executor._holds).parse(environ.SGLANE_HOLD, 0)
    with pytest.raises(CopyFailed, match=f"host-load: RuntimeError: fault injection: rank 0 fails at {point}"):
        back(drive, tokens, 6)
        for _ in range(100):  # the end is told after the last layer was read
            time.sleep(0.01)
            executor.check()
    with pytest.raises(CopyFailed):
        executor.close()


def test_a_failed_backup_ends_the_rank_at_its_next_check_and_at_its_next_plan(monkeypatch) -> None:
    hold(monkeypatch, "backup", -1)
    drive = driver("llama")
    drive.start(0, prompt(10), greedy())
    drive.step({0: 10}, backup=True)
    executor = drive.run.executors[0]
    deadline = time.monotonic() + 10
    with pytest.raises(CopyFailed, match="host-backup.* fails at backup"):
        while time.monotonic() < deadline:
            executor.check()
            time.sleep(0.01)
    with pytest.raises(CopyFailed, match="host-backup"):
        drive.step({}, [0])


def test_the_end_waits_for_what_was_ordered_unless_the_rank_has_failed(monkeypatch) -> None:
    hold(monkeypatch, "backup", 30)
    drive = driver("llama")
    drive.start(0, prompt(40), greedy())
    for _ in range(4):
        drive.step({0: 10}, backup=True)
    drive.run.close()
    assert {end.ticket for end in drive.run.box.ends} == {1, 2, 3, 4}
    hold(monkeypatch, "forward", -1)  # after the first layer: the others never come
    other = driver("llama")
    other.start(0, prompt(10), greedy())
    with pytest.raises(RuntimeError, match="fails at forward"):
        other.step({0: 10}, backup=True)
    begin = time.monotonic()
    other.run.close(finish=False)
    assert time.monotonic() - begin < 5 and not other.run.box.ends


def test_orders_without_sense_are_fatal() -> None:
    drive = driver("llama", cp_size=2)
    step = 0
    for wrong, message in (
            ({"loads": [Load(1, ints([2]), ints([3]))]}, "entry 0 .3.: the target is not in the lane of the source"),
            ({"loads": [Load(1, ints([2, 4]), ints([4]))]}, r"load 1: a copy order has pages \[2\] and \[1\]"),
            ({"loads": [Load(1, ints([0]), ints([2]))]}, r"entry 0 .0.: the source is a sink row"),
            ({"backups": [Backup(1, ints([1]), ints([3]), True)]}, r"backup 1: entry 0 .1.: the source is a sink row"),
            ({"backups": [Backup(1, ints([3]), ints([201]), True)]}, r"entry 0 .201.: the target is a sink row or outside of 100 x 2"),
            ({"backups": [Backup(1, ints([4, 6]), ints([2, 2]), True)]}, r"entry 0 .2.: the target is named twice"),
            ({"tail_copies": [TailCopy(200, 4, 2, from_host=True)]}, r"to page 4: entry 0 .200.: the source is a sink row"),
            ({"tail_copies": [TailCopy(200, 1, 2)]}, r"tail copy to page 1: entry 0 .1.: the target is a sink row"),
            ({"loads": [Load(1, ints([2]), ints([4]))], "tail_copies": [TailCopy(6, 4, 2)]}, r"device pages \[4\] are written by more")):
        step += 1
        with pytest.raises(CopyOrderError, match=message):
            drive.run.executors[0].run(StepPlan(step, **wrong))
    alone = driver("llama")
    with pytest.raises(AssertionError, match="load 3 is waited for, but was never ordered"):
        alone.run(StepPlan(1, needs_load=3))
    with pytest.raises(AssertionError, match=r"step 2: no forward wrote the rows of backups \[7\]"):
        alone.run(StepPlan(2, backups=[Backup(7, ints([1]), ints([1]), False)]))
    found = model("llama")
    without = start_ranks(found.config, found.shards(1), 4)
    with pytest.raises(AssertionError, match="no host tier"):
        without(StepPlan(1, loads=[Load(1, ints([1]), ints([1]))]))
    with pytest.raises(AssertionError, match="a tail comes from the host tier"):
        without(StepPlan(2, tail_copies=[TailCopy(1, 2, 1, from_host=True)]))
