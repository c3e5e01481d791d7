"""Leases of sessions: what they keep, what ends them, and that nobody ever waits or fails because of one."""
import numpy as np
import pytest

from kits.engine import Engine
from kits.fake_executor import FakeExecutor, expected_output, prompt_of
from sglane.mem_cache.page_layout import PageLayout
from sglane.mem_cache.radix_key import token_key
from sglane.utils import fallback


def engine_of(num_pages=24, cp_size=1, page_size=4, num_slots=4, **limits):
    layout = PageLayout(page_size, cp_size)
    num_rows = num_pages // cp_size + 1
    return Engine(FakeExecutor(layout, num_rows, num_slots), layout, num_rows, num_slots, 8, **limits)


def turn(engine, rid, history, seed, length=6, num_new=4, session="s", **fields):
    """One request that goes on from `history`; returns what the next one goes on from."""
    prompt = np.concatenate([history, prompt_of(seed, length)]).astype(np.int64)
    engine.add(rid, prompt, num_new, session=session, **fields)
    engine.run()
    assert engine.last[rid].finish.kind == "length", engine.last[rid]
    assert engine.outputs[rid] == expected_output(prompt, num_new)
    return np.concatenate([prompt, engine.outputs[rid]])


def others(engine, num, length=14, first=100):
    """Traffic that evicts whatever may be evicted."""
    for index in range(num):
        engine.add(f"o{first + index}", prompt_of(first + index, length), 3)
        engine.run()
        assert engine.last[f"o{first + index}"].finish.kind == "length"


def dropped():
    return fallback.counts()["session_lease_dropped"]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_prefix_outlives_other_traffic(cp_size):
    for session in ("s", ""):
        engine = engine_of(cp_size=cp_size)
        engine.scheduler.sessions.open("s")
        before = dropped()
        history = turn(engine, "a", [], 1, length=11, session=session)
        others(engine, 12)
        turn(engine, "b", history, 2, session=session)
        assert dropped() == before
        num_cached = engine.last["b"].num_cached_tokens
        assert num_cached == len(history) - 1 if session else num_cached == 0  # the last output token was never fed


def test_leases_have_their_own_count():
    engine = engine_of()
    sessions = engine.scheduler.sessions
    sessions.open("s")
    sessions.open("t")
    history = turn(engine, "a", [], 1, length=9)  # 12 rows: no tail
    assert sessions.report() == {"num_open": 2, "num_leased": 1, "leased_tokens": 12}
    assert engine.scheduler.kv_ledger()["session_leases"] == 1
    turn(engine, "b", history, 2, length=3)  # 19 rows: a tail too
    assert sessions.report() == {"num_open": 2, "num_leased": 1, "leased_tokens": 19}
    assert engine.scheduler.kv_ledger()["session_leases"] == 2  # assert_clean has seen 0 leases of requests
    sessions.close("s")
    assert sessions.report() == {"num_open": 1, "num_leased": 0, "leased_tokens": 0}
    assert engine.ledger.snapshot()["leases"] == 0 == engine.scheduler.kv_ledger()["session_leases"]
    engine.ledger.audit()


def test_closing_frees_the_prefix():
    engine = engine_of()
    engine.scheduler.sessions.open("s")
    history = turn(engine, "a", [], 1, length=11)
    engine.scheduler.sessions.close("s")
    others(engine, 12)
    turn(engine, "b", history, 2, session="s")
    assert engine.last["b"].num_cached_tokens == 0
    assert engine.scheduler.sessions.report()["num_open"] == 0, "a request of a closed session leaves a lease"


def test_a_flush_ends_leases_not_sessions():
    engine = engine_of()
    engine.scheduler.sessions.open("s")
    history = turn(engine, "a", [], 1)
    before = dropped()
    assert engine.scheduler.flush()
    assert sum(engine.ledger.snapshot()["device"]["cached"]) == 0 and dropped() == before
    history = turn(engine, "b", history, 2)
    assert engine.last["b"].num_cached_tokens == 0
    turn(engine, "c", history, 3)
    assert engine.last["c"].num_cached_tokens == len(history) - 1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("length", [4, 30, 70])
def test_a_lone_request_gets_what_leases_hold(length, overlap):
    """The pool has 20 pages; leases hold 12 of them. It is admitted at once, and as long as pages are missing the longest unused loses first."""
    engine = engine_of(num_pages=20, overlap=overlap)
    histories = []
    for index in range(3):
        engine.scheduler.sessions.open(f"s{index}")
        histories.append(turn(engine, f"a{index}", [], index, length=13, session=f"s{index}"))
    before = dropped()
    num_new = 6
    engine.add("big", prompt_of(9, length), num_new)
    engine.run()
    assert engine.outputs["big"] == expected_output(prompt_of(9, length), num_new)
    assert engine.scheduler.totals.num_retractions == 0
    assert "short" not in {reason for _, reason, _ in engine.scheduler.lanes()["page_waits"]["counts"]}
    assert dropped() - before == {4: 0, 30: 1, 70: 3}[length]
    if length == 30:  # the longest unused was the first
        turn(engine, "b", histories[2], 20, length=2, session="s2", num_new=1)
        assert engine.last["b"].num_cached_tokens == len(histories[2]) - 1


def test_decode_takes_pages_of_leases_before_it_retracts_anybody():
    engine = engine_of(num_pages=16, conservativeness=0.0)
    engine.scheduler.sessions.open("s")
    turn(engine, "a", [], 1, length=21, num_new=4)  # 6 pages
    before = dropped()
    for rid in ("x", "y"):
        engine.add(rid, prompt_of(ord(rid), 5), 20)  # both: 14 pages in the end
    engine.run()
    assert dropped() == before + 1 and engine.scheduler.totals.num_retractions == 0
    for rid in ("x", "y"):
        assert engine.outputs[rid] == expected_output(prompt_of(ord(rid), 5), 20)


def test_nobody_waits_at_the_door_because_of_leases():
    engine = engine_of(num_pages=24)
    engine.scheduler.sessions.open("s")
    turn(engine, "a", [], 1, length=40, num_new=5)  # 11 pages
    before = dropped()
    engine.add("x", prompt_of(2, 9), 12)
    engine.turn()
    engine.add("y", prompt_of(3, 40), 12)  # with the reserve for x more than the other 13
    engine.turn()
    engine.turn()
    assert engine.scheduler.num_running == 2 and dropped() == before + 1
    engine.run()


def test_pages_on_their_way_need_no_leases():
    """They are free when the steps under way have ended; meanwhile no session loses anything."""
    engine = engine_of(num_pages=24)
    ledger, sessions = engine.ledger, engine.scheduler.sessions
    sessions.open("s")
    turn(engine, "a", [], 1, length=13, num_new=4)  # 4 pages
    holding = ledger.match(token_key(prompt_of(2, 80).astype(np.int32)), "", 79)
    ledger.admit(holding, 80, engine.layout.no_counts())  # the other 20 pages
    step = engine.scheduler._next_step
    ledger.issued(step)
    ledger.release(holding, token_key(np.empty(0, np.int32)))
    assert int(ledger.available().sum()) == 0
    assert not sessions.make_room(3) and sessions.report()["num_leased"] == 1
    ledger.retired(step)
    assert sessions.make_room(20) and sessions.report()["num_leased"] == 1
    assert sessions.make_room(24) and sessions.report()["num_leased"] == 0
    assert not sessions.make_room(25)


def test_requests_that_wait_for_running_ones_take_no_leases():
    """Where even all leases together would not be enough, they stay."""
    engine = engine_of(num_pages=24)
    engine.scheduler.sessions.open("s")
    turn(engine, "a", [], 1, length=5, num_new=3)  # 2 pages
    before = dropped()
    engine.add("x", prompt_of(2, 60), 20)  # 20 of 24 pages
    engine.turn()
    engine.add("y", prompt_of(3, 60), 4)
    for _ in range(6):
        engine.turn()
        assert dropped() == before
    engine.run()
    assert engine.last["x"].finish.kind == engine.last["y"].finish.kind == "length"


def test_used_sessions_keep_their_leases_longer():
    engine = engine_of(num_pages=24)
    sessions = engine.scheduler.sessions
    histories = {}
    for name in ("s", "t"):
        sessions.open(name)
        histories[name] = turn(engine, f"a{name}", [], ord(name), length=9, session=name)
    histories["s"] = turn(engine, "b", histories["s"], 5, session="s")
    assert sessions.drop_oldest() and sessions.report()["leased_tokens"] == len(histories["s"]) - 1
    assert sessions.drop_oldest() and not sessions.drop_oldest()


def test_a_session_is_used_when_its_request_arrives():
    engine = engine_of(num_pages=24)
    sessions = engine.scheduler.sessions
    for name, length in (("s", 9), ("t", 13)):
        sessions.open(name)
        turn(engine, f"a{name}", [], ord(name), length=length, session=name)
    engine.add("b", prompt_of(5, 6), 3, session="s")
    assert sessions.drop_oldest() and sessions.report()["leased_tokens"] == 9 + 4 - 1
    engine.run()


def test_what_is_aborted_leaves_the_lease_as_it_was():
    engine = engine_of()
    engine.scheduler.sessions.open("s")
    turn(engine, "a", [], 1, length=11)
    kept = engine.scheduler.sessions.report()
    engine.add("b", prompt_of(2, 20), 30, session="s")
    for _ in range(5):
        engine.turn()
    engine.scheduler.abort("b")
    engine.run()
    assert engine.last["b"].finish.kind == "abort" and engine.scheduler.sessions.report() == kept


def test_a_retraction_leaves_no_lease():
    engine = engine_of(num_pages=12, num_slots=6, conservativeness=0.0)
    engine.scheduler.sessions.open("s")
    for index in range(6):
        engine.add(f"r{index}", prompt_of(10 + index, 6), 24, session="s")
    engine.run()
    assert engine.scheduler.totals.num_retractions > 0
    for index in range(6):
        assert engine.outputs[f"r{index}"] == expected_output(prompt_of(10 + index, 6), 24)


def test_without_a_prefix_cache_there_are_no_leases():
    engine = engine_of(reuse_prefixes=False)
    engine.scheduler.sessions.open("s")
    turn(engine, "a", [], 1)
    assert engine.scheduler.sessions.report()["num_leased"] == 0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("cp_size", "seed"), [(1, 0), (1, 1), (2, 2), (2, 3), (4, 4)])
def test_conversations_in_a_small_pool(cp_size, seed, overlap):
    """Random turns, other requests and aborts on a pool that holds a third of the sessions: every answer is right, nobody is refused."""
    rng = np.random.default_rng(seed)
    engine = engine_of(num_pages=32, cp_size=cp_size, num_slots=5, overlap=overlap)
    sessions = engine.scheduler.sessions
    prompts, histories = {}, {f"s{index}": prompt_of(200 + index, 10) for index in range(6)}
    for name in histories:
        sessions.open(name)
    for number in range(60):
        rid, name = f"r{number}", f"s{rng.integers(6)}"
        busy = {known for known, (session, _) in prompts.items() if session == name and engine.last.get(known) is None}
        session = "" if busy or rng.random() < 0.4 else name
        prompt = np.concatenate([histories[name], prompt_of(number, rng.integers(1, 9))]) if session else prompt_of(number, rng.integers(1, 60))
        if len(prompt) > 70:
            prompt = histories[name] = prompt_of(number, 10)
        prompts[rid] = (session, prompt.astype(np.int64))
        engine.add(rid, prompts[rid][1], int(rng.integers(1, 12)), session=session)
        if rng.random() < 0.1:
            engine.scheduler.abort(rid)
        for _ in range(rng.integers(0, 12)):
            engine.turn()
        for known, (session, prompt) in prompts.items():
            if session and known in engine.last and engine.last[known].finish is not None and engine.last[known].finish.kind == "length":
                histories[session] = np.concatenate([prompt, engine.outputs[known]])
    engine.run()
    assert sessions.report()["num_leased"] > 0 and dropped() > 0
    for rid, (_, prompt) in prompts.items():
        finish = engine.last[rid].finish
        assert finish.kind == "length" or finish.message == "aborted", finish
        assert engine.outputs[rid] == expected_output(prompt, len(engine.outputs[rid]))
    for name in histories:
        sessions.close(name)
    assert engine.ledger.snapshot()["leases"] == 0
    engine.ledger.audit()


@pytest.mark.parametrize("cp_size", [1, 2])
def test_the_gain_of_ending_leases_is_what_ending_them_gives(cp_size):
    generator = np.random.default_rng(5)
    for _ in range(30):
        engine = engine_of(num_pages=64, cp_size=cp_size)
        for index in range(6):
            prompt = np.concatenate([prompt_of(generator.integers(2), 4 * generator.integers(1, 4)), prompt_of(index, generator.integers(1, 9))])
            engine.add(f"a{index}", prompt, 2)
            engine.run()
        holdings = []
        for index in range(6):
            prompt = np.concatenate([prompt_of(generator.integers(2), 4 * generator.integers(1, 4)), prompt_of(index, 9)])
            holdings.append(engine.ledger.match(prompt.astype(np.int32), "", len(prompt)))
        chosen = [holding for holding in holdings if generator.integers(2)]
        predicted = engine.ledger.available_without(chosen)
        for holding in chosen:
            engine.ledger.cancel(holding)
        assert engine.ledger.available().tolist() == predicted.tolist()
