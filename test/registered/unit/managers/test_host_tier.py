"""The scheduler over a host tier whose copies are as late as they may be: answers must not depend on what was evicted, loaded or under way."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.audit import assert_empty
from kits.engine import Engine
from kits.fake_executor import FakeExecutor, expected_output, prompt_of
from sglane.mem_cache.kv_ledger import HostOptions
from sglane.mem_cache.page_layout import PageLayout
from sglane.plan.step_plan import StepPlan

PAGE_SIZE = 4


def host_engine(cp_size=1, num_pages=16, num_host_pages=32, chunk=8, seed=0, most_turns=0, min_hits=1, num_slots=4, overlap=True):
    layout = PageLayout(PAGE_SIZE, cp_size)
    num_rows, num_host_rows = num_pages // cp_size + 1, num_host_pages // cp_size + 1
    executor = FakeExecutor(layout, num_rows, num_slots, num_host_rows, seed, most_turns)
    return Engine(executor, layout, num_rows, num_slots, chunk, overlap, host=HostOptions(num_host_rows, min_hits), copies=executor.copies)


def ask(engine, rid, prompt, num_new=1):
    engine.add(rid, prompt, num_new)
    engine.run()
    assert engine.outputs[rid] == expected_output(np.array(prompt), num_new)
    return engine.last[rid]


def fill_with_others(engine, first=100, count=6):
    for i in range(count):
        ask(engine, f"other{first + i}", prompt_of(first + i, 30), 2)


@pytest.mark.parametrize("most_turns", [0, 5])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("length", [4, 9, 16, 27, 40])
def test_what_left_the_device_comes_back_from_the_host(length, cp_size, most_turns):
    """A prompt of several chunks, other traffic that is larger than the device pool, the prompt again."""
    engine = host_engine(cp_size, num_host_pages=96, most_turns=most_turns)
    prompt = prompt_of(1, length)
    ask(engine, "cold", prompt)
    fill_with_others(engine)
    again = ask(engine, "again", prompt, 5)
    assert again.num_cached_tokens == length - 1
    assert again.num_cached_host > 0 and again.num_cached_device + again.num_cached_host == length - 1
    assert engine.executor.copies.num_loaded > 0 or length < PAGE_SIZE + 1
    assert engine.scheduler.flush()
    assert_empty(engine.scheduler.kv_ledger())


@pytest.mark.parametrize("cp_size", [1, 2])
def test_the_answer_of_a_turn_is_backed_up_too(cp_size):
    engine = host_engine(cp_size, num_host_pages=96)
    first = prompt_of(2, 11)
    ask(engine, "first", first, 9)
    fill_with_others(engine)
    second = np.concatenate([first, engine.outputs["first"], prompt_of(3, 3)])
    found = ask(engine, "second", second, 4)
    assert found.num_cached_tokens == 11 + 9 - 1 and found.num_cached_host > 0


def test_every_hit_length_is_exact_after_the_device_has_lost_it():
    base = prompt_of(4, 22)
    for shared in range(23):
        engine = host_engine(num_host_pages=96)
        ask(engine, "base", base)
        fill_with_others(engine)
        prompt = np.concatenate([base[:shared], prompt_of(5, 7)])
        if shared < 22:
            prompt[shared] = (base[shared] + 1) % 900
        assert ask(engine, "b", prompt, 4).num_cached_tokens == shared


def test_a_step_with_decode_rows_does_not_wait_for_a_load():
    engine = host_engine(num_pages=24, num_host_pages=96, most_turns=0)
    prompt = prompt_of(6, 17)
    ask(engine, "cold", prompt)
    fill_with_others(engine, count=8)
    plans: list[StepPlan] = []
    executor = engine.executor
    run = executor.run
    executor.run = lambda plan: plans.append(plan) or run(plan)
    engine.add("decodes", prompt_of(7, 5), 30)
    for _ in range(4):
        engine.turn()
    executor.copies._most_turns = 12
    engine.add("hit", prompt, 3)
    engine.run()
    for rid, asked, num_new in (("decodes", prompt_of(7, 5), 30), ("hit", prompt, 3)):
        assert engine.outputs[rid] == expected_output(asked, num_new)
    assert engine.last["hit"].num_cached_host > 0
    begun = next(i for i, plan in enumerate(plans) if plan.loads)
    joined = next(i for i, plan in enumerate(plans) if plan.extends and i >= begun)
    assert joined > begun, "the request did not wait for its load"
    assert all(plan.continues.slots for plan in plans[begun:joined]), "decoding stopped meanwhile"
    assert not any(plan.needs_load and plan.continues.slots for plan in plans)


def test_two_requests_on_one_host_prefix_load_it_once():
    engine = host_engine(num_pages=24, num_host_pages=96)
    prompt = prompt_of(8, 21)
    ask(engine, "cold", prompt)
    fill_with_others(engine, count=8)
    before = engine.executor.copies.num_loaded
    engine.executor.copies._most_turns = 6
    for rid in ("a", "b"):
        engine.add(rid, np.concatenate([prompt, [ord(rid)]]), 3)
    engine.run()
    for rid in ("a", "b"):
        assert engine.outputs[rid] == expected_output(np.concatenate([prompt, [ord(rid)]]), 3)
    assert 0 < engine.executor.copies.num_loaded - before <= 6


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_a_request_may_come_to_own_pages_that_are_loaded_for_another(seed, cp_size):
    """One request computes a prefix although the host has it (its prompt is scored), another loads it meanwhile: the first one's row moves to the
    pages that are loaded."""
    engine = host_engine(cp_size, num_pages=32, num_host_pages=96, chunk=64)
    prompt = prompt_of(8, 21)
    ask(engine, "cold", prompt)
    fill_with_others(engine, count=8)
    engine.add("decodes", prompt_of(7, 5), 40)  # so that no step waits for the load
    for _ in range(3):
        engine.turn()
    engine.executor.copies._most_turns = 12
    engine.executor.copies._random = np.random.default_rng(seed)
    engine.add("scored", prompt, 12, logprob_start=0)
    engine.add("hit", np.concatenate([prompt, [1]]), 3)
    engine.run()
    assert engine.last["scored"].num_cached_tokens == 0 and engine.last["hit"].num_cached_host > 0
    assert engine.outputs["decodes"] == expected_output(prompt_of(7, 5), 40)
    assert engine.outputs["scored"] == expected_output(prompt, 12)
    assert engine.outputs["hit"] == expected_output(np.concatenate([prompt, [1]]), 3)


def test_selective_backs_up_only_what_was_hit():
    engine = host_engine(num_host_pages=96, min_hits=2)
    prompt = prompt_of(9, 17)
    ask(engine, "cold", prompt)
    assert engine.executor.copies.num_backed_up == 0
    for rid in ("warm", "hot"):
        ask(engine, rid, prompt)
    assert engine.executor.copies.num_backed_up > 0
    fill_with_others(engine, count=3)
    assert ask(engine, "again", prompt).num_cached_host > 0


@pytest.mark.parametrize("most_turns", [1, 40])
def test_a_slow_host_never_fails_a_request(most_turns):
    """Pages whose copy is under way are not reusable, and all requests get theirs in the end."""
    engine = host_engine(num_pages=32, num_host_pages=16, most_turns=most_turns)
    for i in range(40):
        engine.add(str(i), prompt_of(i, 78), 2)
    engine.run(max_turns=100_000)
    for i in range(40):
        assert engine.outputs[str(i)] == expected_output(prompt_of(i, 78), 2)


@st.composite
def traffic(draw):
    """(turn, rid, prompt, new tokens, turns until an abort, scored): prompts share stems, so hits of all kinds occur; scored ones compute all."""
    stems = [prompt_of(i, 24) for i in range(draw(st.integers(1, 4)))]
    events = []
    for i in range(draw(st.integers(4, 16))):
        stem = stems[draw(st.integers(0, len(stems) - 1))][: draw(st.integers(1, 24))]
        prompt = np.concatenate([stem, prompt_of(1000 + draw(st.integers(0, 5)), draw(st.integers(1, 20)))])
        events.append((draw(st.integers(0, 60)), str(i), prompt, draw(st.integers(1, 9)), draw(st.sampled_from([None, None, None, 0, 2, 5])),
                       draw(st.sampled_from([False, False, False, True]))))
    return sorted(events, key=lambda event: event[0])


def check_traffic(events, cp_size, num_pages, num_host_pages, most_turns, min_hits, overlap, seed, flushes):
    engine = host_engine(cp_size, num_pages, num_host_pages, seed=seed, most_turns=most_turns, min_hits=min_hits, overlap=overlap)
    aborts, ended = {}, set()
    for turn in range(events[-1][0] + 8):
        for at, rid, prompt, num_new, patience, scored in events:
            if at == turn:
                engine.add(rid, prompt, num_new, logprob_start=0 if scored else -1)
                if patience is not None:
                    aborts[rid] = turn + patience
        for rid, at in aborts.items():
            if at == turn:
                engine.scheduler.abort(rid)
                ended.add(rid)
        if turn in flushes:
            engine.scheduler.flush()
        engine.turn()
    engine.run(max_turns=50_000)
    for _, rid, prompt, num_new, _, _ in events:
        expected = expected_output(prompt, num_new)
        if rid in ended:
            assert engine.outputs[rid] == expected[: len(engine.outputs[rid])]
        else:
            assert engine.outputs[rid] == expected and engine.last[rid].finish.kind == "length"
    assert engine.scheduler.flush()
    assert_empty(engine.scheduler.kv_ledger())


CASES = {
    "events": traffic(), "cp_size": st.sampled_from([1, 2, 4]), "num_pages": st.sampled_from([16, 20, 32]),
    "num_host_pages": st.sampled_from([8, 16, 64]), "most_turns": st.sampled_from([0, 2, 15]), "min_hits": st.sampled_from([1, 1, 2]),
    "overlap": st.booleans(), "seed": st.integers(0, 1000), "flushes": st.sets(st.integers(0, 70), max_size=3),
}


@settings(max_examples=60)
@given(**CASES)
def test_answers_do_not_depend_on_the_host_tier(**case):
    check_traffic(**case)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=3000)
@given(**CASES)
def test_answers_do_not_depend_on_the_host_tier_at_length(**case):
    check_traffic(**case)
