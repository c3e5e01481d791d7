"""The scheduler against a model-free executor: answers must not depend on what else happens."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.engine import Engine
from kits.fake_executor import FakeExecutor, expected_output, prompt_of
from kits.hit_cases import hit, next_turn
from sglane.mem_cache.page_layout import PageLayout


def fake_engine(page_size=4, cp_size=1, num_pages=24, num_slots=4, chunk=8, overlap=True, **limits):
    layout = PageLayout(page_size, cp_size)
    num_rows = num_pages // cp_size + 1
    return Engine(FakeExecutor(layout, num_rows, num_slots), layout, num_rows, num_slots, chunk, overlap, **limits)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
def test_one_request(cp_size, length, overlap):
    engine = fake_engine(cp_size=cp_size, overlap=overlap)
    engine.add("a", prompt_of(0, length), 10)
    engine.run()
    assert engine.outputs["a"] == expected_output(prompt_of(0, length), 10)
    assert engine.last["a"].finish.kind == "length" and engine.last["a"].num_cached_tokens == 0


@pytest.mark.parametrize("cp_size", [1, 2])
def test_every_hit_length_is_exact(cp_size):
    for shared in range(31):
        assert hit(fake_engine(cp_size=cp_size, num_pages=48), shared).num_cached_tokens == shared


def test_decode_output_is_reused_by_the_next_turn():
    next_turn(fake_engine(), 9)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_evictions_are_counted(cp_size):
    engine = fake_engine(cp_size=cp_size, num_pages=16)
    assert engine.ledger.evictions()["num_tokens"] == 0
    num_published = 0
    for i in range(8):
        engine.add(str(i), prompt_of(i, 13), 4)
        engine.run()
        num_published += 4  # 13 + 3 rows
    num_cached = sum(engine.ledger.snapshot()["device"]["cached"])
    evictions = engine.ledger.evictions()
    assert evictions["num_tokens"] == (num_published - num_cached) * 4 > 0
    assert sum(evictions["times"]["counts"]) >= 4 and evictions["times"]["sum_s"] > 0.0
    engine.scheduler.flush()
    assert engine.ledger.evictions() == evictions


@pytest.mark.parametrize("length", [5, 8, 11, 30])
def test_a_repetition_right_after_the_answer_hits_all_but_one_token(length):
    """The last step of the first request is still under way when the second one arrives: the valid tail must not be missed."""
    engine = fake_engine()
    engine.add("a", prompt_of(3, length), 6)
    while "a" not in engine.last or engine.last["a"].finish is None:
        engine.turn()
    engine.add("b", prompt_of(3, length), 6)
    engine.run()
    assert engine.last["b"].num_cached_tokens == length - 1
    assert engine.outputs["b"] == engine.outputs["a"]


def test_a_repetition_right_after_a_stop_hits_too():
    prompt = prompt_of(6, 10)
    stop = expected_output(prompt, 8)[3]
    engine = fake_engine()
    engine.add("a", prompt, 50, sampling={"stop_token_ids": [stop]})
    while "a" not in engine.last or engine.last["a"].finish is None:
        engine.turn()
    assert not engine.scheduler.is_idle(), "nothing was under way: the case is not covered"
    engine.add("b", prompt, 2)
    engine.run()
    assert engine.last["b"].num_cached_tokens == 9


def test_retraction_does_not_change_answers():
    engine = fake_engine(num_pages=12, num_slots=6, conservativeness=0.0)
    for i in range(6):
        engine.add(f"r{i}", prompt_of(10 + i, 6), 24)
    engine.run()
    assert engine.scheduler.totals.num_retractions > 0
    for i in range(6):
        assert engine.outputs[f"r{i}"] == expected_output(prompt_of(10 + i, 6), 24)


def test_same_prompt_is_computed_once():
    engine = fake_engine(num_pages=64, chunk=8)
    for i in range(4):
        engine.add(f"r{i}", prompt_of(5, 33), 3)
    engine.run()
    assert [engine.last[f"r{i}"].num_cached_tokens for i in range(4)] == [0, 32, 32, 32]


def test_queue_limit_and_prompt_limit_are_answers():
    engine = fake_engine(num_slots=1, max_queued_requests=2)
    engine.add("long", prompt_of(0, engine.max_tokens), 1)
    for i in range(4):
        engine.add(f"r{i}", prompt_of(i, 5), 3)
    engine.run()
    assert engine.last["long"].finish.status_code == 400 and str(engine.max_tokens) in engine.last["long"].finish.message
    kinds = [engine.last[f"r{i}"].finish.kind for i in range(4)]
    assert kinds == ["length", "length", "abort", "abort"] and engine.last["r3"].finish.status_code == 503


def test_largest_request_fits_even_with_a_tail_hit():
    engine = fake_engine(num_pages=16)
    engine.add("a", prompt_of(0, 21), 1)
    engine.run()
    engine.add("b", prompt_of(0, 22), 10_000)  # hits 21 tokens, ends inside a page
    engine.run()
    assert engine.last["b"].finish.kind == "length"
    assert len(engine.outputs["b"]) == engine.max_tokens - 22
    assert engine.outputs["b"] == expected_output(prompt_of(0, 22), engine.max_tokens - 22)


def test_stop_token_ends_and_its_surplus_row_is_not_lost():
    prompt = prompt_of(6, 10)
    stop = expected_output(prompt, 8)[5]
    first = expected_output(prompt, 8).index(stop)
    engine = fake_engine()
    engine.add("a", prompt, 50, sampling={"stop_token_ids": [stop]})
    engine.run()
    assert engine.outputs["a"] == expected_output(prompt, first + 1)
    assert engine.last["a"].finish.kind == "stop" and engine.last["a"].finish.matched == stop


def test_priority_goes_first():
    engine = fake_engine(num_slots=1)
    for i in range(3):
        engine.add(f"r{i}", prompt_of(i, 5), 5, priority=i)
    order = []
    while not engine.scheduler.is_idle():
        engine.turn()
        order += [rid for rid, out in engine.last.items() if out.finish and rid not in order]
    assert order == ["r2", "r1", "r0"]


@st.composite
def traffic(draw):
    ops = []
    for _ in range(draw(st.integers(1, 14))):
        ops.append((
            draw(st.integers(0, 3)),  # which family of prompts
            draw(st.integers(1, 40)),  # length
            draw(st.integers(1, 14)),  # new tokens
            draw(st.sampled_from(["run", "run", "run", "abort", "finish"])),
            draw(st.integers(0, 6)),  # turns before the next arrival
            draw(st.integers(0, 12)),  # turns until abort / kept tokens
            draw(st.sampled_from(["", "salt:x"])),
        ))
    return ops


@settings(max_examples=150, deadline=None)
@given(
    ops=traffic(), page_size=st.sampled_from([1, 4, 16]), cp_size=st.integers(1, 4), num_pages=st.integers(8, 40),
    chunk=st.sampled_from([3, 8, 1000]),
    overlap=st.booleans(), policy=st.sampled_from(["fcfs", "lpm"]), slots=st.integers(1, 5), conservativeness=st.sampled_from([0.0, 1.0]),
)
def test_random_traffic(ops, page_size, cp_size, num_pages, chunk, overlap, policy, slots, conservativeness):
    num_pages = max(num_pages, 60 // page_size + 2 * cp_size)
    engine = fake_engine(page_size, cp_size, num_pages, slots, chunk, overlap, policy=policy, conservativeness=conservativeness)
    timers = []
    for i, (family, length, num_new, kind, gap, after, namespace) in enumerate(ops):
        engine.add(f"r{i}", prompt_of(family, 40)[:length], num_new, namespace=namespace)
        if kind != "run":
            timers.append([after, kind, f"r{i}"])
        for _ in range(gap):
            engine.turn()
            fire(engine, timers)
    for _ in range(20):
        engine.turn()
        fire(engine, timers)
    engine.run()
    for i, (family, length, num_new, kind, *_rest) in enumerate(ops):
        prompt = prompt_of(family, 40)[:length]
        want = expected_output(prompt, min(num_new, engine.max_tokens - length))
        got = engine.outputs[f"r{i}"]
        if kind == "run":
            assert got == want and engine.last[f"r{i}"].finish.kind == "length"
        else:
            assert got == want[: len(got)]


def fire(engine, timers):
    for timer in list(timers):
        timer[0] -= 1
        if timer[0] > 0:
            continue
        timers.remove(timer)
        if timer[1] == "abort":
            engine.scheduler.abort(timer[2])
        else:
            engine.scheduler.finish(timer[2], max(len(engine.outputs[timer[2]]) - 1, 0))
