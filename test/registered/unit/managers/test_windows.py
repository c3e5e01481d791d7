"""Speculation as the planner sees it: any number of a window's rows may turn out to be valid, and nothing is lost, leaked or answered wrongly."""
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.engine import Engine
from kits.fake_executor import FakeExecutor, expected_output, prompt_of
from kits.hit_cases import hit, next_turn, second_prompt
from sglane.mem_cache.kv_ledger import HostOptions
from sglane.mem_cache.page_layout import PageLayout
from sglane.plan.step_plan import StepPlan, StepResult


class WatchedExecutor(FakeExecutor):
    """Keeps the windows of all plans."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.windows: list[list[int]] = []

    def run(self, plan: StepPlan) -> list[StepResult]:
        if plan.continues.slots:
            self.windows.append(np.frombuffer(plan.continues.windows, np.int32).tolist())
        return super().run(plan)


def spec_engine(page_size=4, cp_size=1, num_pages=24, num_slots=4, chunk=8, overlap=True, max_drafts=3, seed=0, num_host_pages=0, **limits):
    layout, num_rows = PageLayout(page_size, cp_size), num_pages // cp_size + 1
    host_rows = num_host_pages // cp_size + 1
    executor = WatchedExecutor(layout, num_rows, num_slots, host_rows, seed, 2, drafts=True)
    if num_host_pages:
        limits |= {"host": HostOptions(host_rows, 1), "copies": executor.copies}
    return Engine(executor, layout, num_rows, num_slots, chunk, overlap, max_drafts=max_drafts, bigram_keys=True, **limits)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("max_drafts", [1, 3, 5])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
def test_one_request(cp_size, length, overlap, max_drafts):
    engine = spec_engine(cp_size=cp_size, overlap=overlap, max_drafts=max_drafts, seed=length)
    engine.add("a", prompt_of(0, length), 21)
    while engine.turn():
        for request in engine.scheduler._running.values():
            residence = request.admitted()
            if engine.scheduler.oldest_unretired_step is None:
                assert residence.num_rows_issued == residence.num_rows_done  # what was not accepted is no longer counted
            assert len(residence.holding.pages) <= engine.layout.num_pages(length + 21)  # a look-ahead's promise is no page of the row
    engine.run()
    assert engine.outputs["a"] == expected_output(prompt_of(0, length), 21)
    last = engine.last["a"]
    assert last.finish.kind == "length" and last.num_output_tokens == 21
    assert last.spec.num_accepted <= last.spec.num_drafts and len(last.spec.histogram) == max_drafts + 1
    assert sum(last.spec.histogram) == last.spec.num_verify_steps < 21
    assert engine.scheduler.totals.num_stalls == 0
    report = engine.scheduler.speculation.report()
    assert report["num_verify_steps"] == last.spec.num_verify_steps and report["by_source"]["none"]["num_accepted"] == last.spec.num_accepted


@pytest.mark.parametrize("cp_size", [1, 2])
def test_hits_count_rows_whose_next_token_is_the_same(cp_size):
    """With draft planes a row can be reused only if the token after it is the same: one row less than the tokens that are shared."""
    for shared in range(31):
        engine = spec_engine(cp_size=cp_size, num_pages=48)
        found = hit(engine, shared).num_cached_tokens
        follows = shared == 30 and second_prompt(shared)[30] == engine.outputs["a"][0]  # the output is not fed
        assert found == max(shared - 1, 0) + follows


def test_decode_output_is_reused_by_the_next_turn():
    engine = spec_engine(num_pages=48)
    next_turn(engine, 19)
    assert engine.scheduler.speculation.report()["by_source"]["device"]["num_verify_steps"] > 0


@pytest.mark.parametrize("stop_at", range(1, 12))
def test_a_stop_inside_a_run_cuts_it(stop_at):
    """What was sampled after the stop is not answered, and no row that depends on it is left in the tree."""
    want = expected_output(prompt_of(5, 10), 12)
    for seed in range(4):
        engine = spec_engine(seed=seed, max_drafts=5)
        engine.add("a", prompt_of(5, 10), 12, sampling={"stop_token_ids": [want[stop_at - 1]]})
        engine.run()
        end = want.index(want[stop_at - 1]) + 1
        assert engine.outputs["a"] == want[:end] and engine.last["a"].finish.kind == "stop"
        engine.add("b", np.concatenate([prompt_of(5, 10), want[:end], [899]]), 5)
        engine.run()
        assert engine.last["b"].num_cached_tokens == 10 + end - 1


def test_a_stop_string_cuts_what_is_published():
    """The front keeps fewer tokens than the planner has."""
    want = expected_output(prompt_of(6, 9), 20)
    for kept in range(1, 12):
        engine = spec_engine(seed=kept, max_drafts=5)
        engine.add("a", prompt_of(6, 9), 20)
        while len(engine.outputs["a"]) < kept + 1:
            engine.turn()
        engine.scheduler.finish("a", kept)
        engine.run()
        engine.add("b", np.concatenate([prompt_of(6, 9), want]), 5)
        engine.run()
        assert engine.last["b"].num_cached_tokens == 9 + kept - 1


def test_windows_end_where_the_request_does():
    engine = spec_engine(max_drafts=5, overlap=False)
    engine.add("a", prompt_of(7, 5), 4)
    engine.add("b", prompt_of(8, 5), 30, sampling={"max_drafts": 2})
    engine.add("c", prompt_of(9, 5), 30, sampling={"max_drafts": 0})
    engine.run()
    for rid, seed, num in (("a", 7, 4), ("b", 8, 30), ("c", 9, 30)):
        assert engine.outputs[rid] == expected_output(prompt_of(seed, 5), num)
    assert max(max(windows) for windows in engine.executor.windows) == 3  # of a request that may give 3 more tokens, or has 2 drafts
    assert engine.last["c"].spec.num_drafts == 0 and engine.last["c"].spec.num_verify_steps == 29


def test_a_host_hit_counts_as_one():
    engine = spec_engine(num_pages=16, num_host_pages=64)
    engine.add("a", prompt_of(1, 30), 4)
    engine.run()
    for i in range(3):
        engine.add(f"other {i}", prompt_of(10 + i, 40), 4)
        engine.run()
    before = engine.scheduler.speculation.report()["by_source"]
    engine.add("b", np.concatenate([prompt_of(1, 30), prompt_of(2, 3)]), 8)
    engine.run()
    after = engine.scheduler.speculation.report()["by_source"]
    assert engine.last["b"].num_cached_host > 0
    assert after["host"]["num_verify_steps"] > before["host"]["num_verify_steps"] and after["none"] == before["none"]


def test_prompt_lookup_needs_all_tokens():
    """Rows that are not recomputed come with their tokens."""
    for keeps in (False, True):
        engine = spec_engine(keeps_history=keeps, num_pages=48)
        histories = []
        run, start = engine.executor.run, prompt_of(1, 30)
        engine.executor.run = lambda plan, run=run, histories=histories: (histories.extend(item.history for item in plan.starts), run(plan))[1]
        for rid, rest in (("a", 0), ("b", 5)):
            engine.add(rid, np.concatenate([start, prompt_of(2, rest)]), 3)
            engine.run()
        assert histories == ([b"", start[:29].astype(np.int32).tobytes()] if keeps else [b"", b""])


def test_many_requests_have_shorter_windows():
    engine = spec_engine(max_verify_rows=6, num_pages=80)
    for i in range(4):
        engine.add(str(i), prompt_of(i, 5), 12 + 9 * i)
    engine.run()
    assert {len(windows) for windows in engine.executor.windows} == {1, 2, 3, 4}
    for windows in engine.executor.windows:
        assert max(windows) <= {1: 4, 2: 3, 3: 2, 4: 1}[len(windows)]
    assert {max(windows) for windows in engine.executor.windows if len(windows) > 1} == {3, 2, 1}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_lone_request_fills_the_pool(overlap, page_size):
    """Windows that the pool cannot hold get smaller; the request comes to its end all the same."""
    num_pages = 24 // page_size
    for seed in range(5):
        engine = spec_engine(page_size=page_size, num_pages=num_pages, overlap=overlap, seed=seed, max_drafts=4)
        engine.add("a", prompt_of(1, 9), 1000)
        engine.run()
        num_outputs = engine.max_tokens - 9
        assert engine.outputs["a"] == expected_output(prompt_of(1, 9), num_outputs)
        assert engine.last["a"].finish.kind == "length" and engine.scheduler.totals.num_retractions == 0


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_runs(data):
    """Shared prompts, small pools, retraction, aborts, stops and the host tier: every answer is what an undisturbed run gives."""
    cp_size = data.draw(st.sampled_from([1, 2, 4]))
    page_size, seed = data.draw(st.sampled_from([1, 4, 8])), data.draw(st.integers(0, 1000))
    most = data.draw(st.sampled_from([None, 8]))
    engine = spec_engine(page_size=page_size, cp_size=cp_size, num_pages=data.draw(st.sampled_from([96, 160])) // page_size, num_slots=5, seed=seed,
                         chunk=data.draw(st.sampled_from([4, 16])), overlap=data.draw(st.booleans()), max_drafts=data.draw(st.integers(1, 5)),
                         num_host_pages=data.draw(st.sampled_from([0, 64])), max_verify_rows=most)
    prompts, aborted = {}, set()
    for i in range(data.draw(st.integers(2, 9))):
        shared = data.draw(st.integers(0, 20))
        prompt = np.concatenate([prompt_of(99, shared), prompt_of(i, data.draw(st.integers(1, 20)))])
        want = expected_output(prompt, 15)
        stops = [want[data.draw(st.integers(0, 14))]] if data.draw(st.booleans()) else []
        end = min([want.index(token) + 1 for token in stops], default=15)
        prompts[str(i)] = want[:end]
        engine.add(str(i), prompt, 15, sampling={"stop_token_ids": stops})
        for _ in range(data.draw(st.integers(0, 12))):
            engine.turn()
        if data.draw(st.integers(0, 5)) == 0:
            victim = data.draw(st.sampled_from(sorted(prompts)))
            engine.scheduler.abort(victim)
            aborted.add(victim)
    engine.run()
    for rid, want in prompts.items():
        outputs = engine.outputs[rid]
        assert outputs == want[:len(outputs)] and (rid in aborted or len(outputs) == len(want)), rid
    assert engine.scheduler.totals.num_stalls == 0  # only what is finished already may have no row
