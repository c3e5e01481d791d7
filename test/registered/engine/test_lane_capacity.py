"""What N lanes hold: with the same rows a rank, N times the tokens of one; and requests whose homes move, against the references."""
import functools

import numpy as np
import pytest
from safetensors.torch import load_file

from kits.checkpoints import tiny
from kits.engine import Engine
from kits.fake_executor import FakeExecutor, expected_output
from kits.lane_skew import HELD, OwnerWatch, occupy
from kits.real_engine import TinyModel
from sglane import environ
from sglane.mem_cache.page_layout import PageLayout

LANES = [2, 4, pytest.param(8, marks=pytest.mark.slow)]
PAGE_SIZE, NUM_ROWS, NUM_SLOTS = 16, 129, 400
SHARE = 0.95


def engine_of(cp_size, **limits):
    layout = PageLayout(PAGE_SIZE, cp_size)
    executor = FakeExecutor(layout, NUM_ROWS, NUM_SLOTS)
    return Engine(executor, layout, NUM_ROWS, NUM_SLOTS, 512, conservativeness=0.0, **limits)


def served_at_once(engine, lengths):
    """Tokens of the requests that run when the first one has to wait; all of them are decoding then."""
    for i, length in enumerate(lengths):
        engine.add(str(i), np.random.default_rng(i).integers(0, 900, length), 1000)
    scheduler, most = engine.scheduler, 0
    while not scheduler.lanes()["page_waits"]["counts"]:
        assert engine.turn()
        most = max(most, sum(request.num_known_tokens for request in scheduler._running.values()))
    assert scheduler.totals.num_retractions == 0 and scheduler.num_waiting > 0
    scheduler.abort_all("enough", 0)
    engine.run()
    return most


def sizes(kind):
    rng = np.random.default_rng(7)
    lengths = rng.integers(1, 40, NUM_SLOTS) if kind == "short" else rng.choice([3, 17, 40, 90, 200, 333], NUM_SLOTS)
    return [int(length) for length in lengths]


@functools.cache
def one_lane(kind):
    return served_at_once(engine_of(1), sizes(kind))


@pytest.mark.parametrize("kind, cp_size", [("mixed", 2), ("mixed", 4), pytest.param("mixed", 8, marks=pytest.mark.slow), ("short", 2), ("short", 4)])
def test_many_requests_at_once(kind, cp_size):
    served = served_at_once(engine_of(cp_size), sizes(kind))
    assert one_lane(kind) > 0.7 * (NUM_ROWS - 1) * PAGE_SIZE  # the rest is in last pages that are partly filled, and the one that waits
    assert served >= SHARE * cp_size * one_lane(kind), (served, one_lane(kind))


@pytest.mark.parametrize("cp_size", [1, *LANES])
def test_one_prompt_fills_all_lanes(cp_size):
    engine = engine_of(cp_size)
    num_tokens = engine.max_tokens - 3
    prompt = np.random.default_rng(0).integers(0, 900, num_tokens)
    engine.add("long", prompt, 2)
    fullest = 0
    while engine.turn():
        device = engine.scheduler.kv_ledger()["device"]
        fullest = max(fullest, min(np.array(device["held"]) + np.array(device["cached"])))
    engine.assert_clean()
    assert engine.outputs["long"] == expected_output(prompt, 2)
    assert num_tokens >= SHARE * cp_size * (NUM_ROWS - 1) * PAGE_SIZE and fullest >= NUM_ROWS - 2


@functools.lru_cache(maxsize=2)
def load(family):
    path = tiny(family)
    return TinyModel(path), load_file(path / "ref.safetensors")


@pytest.mark.parametrize("family, cp_size", [("llama", 2), ("glm_moe_dsa", 3)])
def test_a_home_that_moves_changes_no_token(monkeypatch, family, cp_size):
    """The plan, the slot tables and the ranks agree where the next row lies when a request moves to another lane at a page boundary."""
    monkeypatch.setattr(environ, "SGLANE_POISON", True)
    model, ref = load(family)
    engine = model.ranks(cp_size, page_size=4, chunk=16, num_pages=12 * cp_size)
    for lane in range(cp_size):
        occupy(engine.ledger, lane, 9, HELD)
    watch = OwnerWatch(engine.ledger)
    for n in (7, 1):
        engine.add(str(n), ref[f"prompt.{n}"].numpy(), len(ref[f"greedy.{n}"]))
        while not engine.scheduler.is_idle():
            engine.turn()
        assert engine.outputs[str(n)] == ref[f"greedy.{n}"].tolist(), n
    assert watch.num_moves > 0
