"""Sessions of a real engine on two lanes: a prefix outlives other traffic, and goes when it is closed, unused, flushed, or in somebody's way."""
import concurrent.futures
import time

import pytest

from kits.audit import assert_clean, assert_empty, leaks, wait_idle
from kits.checkpoints import tiny
from kits.server import Server

POOL_TOKENS = 512
DROPPED = "session_lease_dropped"


@pytest.fixture(scope="module")
def server():
    flags = ("--model-path", str(tiny("llama")), "--skip-tokenizer-init", "--dtype", "float32", "--page-size", "8", "--max-total-tokens",
             str(POOL_TOKENS), "--cp-size", "2", "--enable-cp-shared-kv", "--enable-metrics", "--skip-server-warmup")
    with Server(*flags, env={"SGLANE_POISON": "1", "SGLANE_DEBUG_LEDGER": "1"}) as running:
        yield running
        assert not leaks(running.kv_ledger()), "something is held after the last test"


def prompt_of(seed, length):
    return [(37 * seed + 7 * index * (seed + 1)) % 500 + 3 for index in range(length)]


@pytest.fixture
def open_session(server):
    """Opens sessions, on an empty cache; they are closed at the end of the test."""
    wait_idle(server)
    server.flush_cache()
    names = []

    def open_one(**fields):
        names.append(server.ask("/open_session", {"capacity_of_str_len": 0, **fields}))
        return names[-1]

    yield open_one
    for name in names:
        server.post("/close_session", {"session_id": name})


def turn(server, session, seed, length, num_new=6, **params):
    answer = server.generate(prompt_of(seed, length), extra={"session_params": {"id": session, **params}}, max_new_tokens=num_new, ignore_eos=True)
    return answer["meta_info"]["id"], answer["meta_info"]["cached_tokens"], answer["output_ids"]


def cold(server, prompt, num_new=6):
    """What the engine answers with nothing in its cache; ends all leases."""
    wait_idle(server)
    server.flush_cache()
    return server.generate(prompt, max_new_tokens=num_new, ignore_eos=True)["output_ids"]


def evict_the_rest(server):
    """Other prompts, until one that was computed before is gone."""
    mark = prompt_of(50, 150)
    server.generate(mark, max_new_tokens=1)
    for seed in range(60, 66):
        server.generate(prompt_of(seed, 150), max_new_tokens=1)
    assert server.generate(mark, max_new_tokens=1)["meta_info"]["cached_tokens"] < 16, "other traffic has evicted nothing"


def fallback_count(server):
    return server.kv_ledger()["fallbacks"][DROPPED]


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_conversation(server, open_session, is_streaming):
    session = open_session(streaming=is_streaming)
    before = fallback_count(server)
    rid, cached, first = turn(server, session, 1, 70)
    assert cached == 0
    named = {} if is_streaming else {"rid": rid}
    evict_the_rest(server)
    rid, cached, second = turn(server, session, 2, 20, **named)
    assert cached == 70 + 6 - 1, "the last output token was never fed"
    evict_the_rest(server)
    named = {} if is_streaming else {"rid": rid}
    _, cached, third = turn(server, session, 3, 5, **named)
    assert cached == 76 + 26 - 1
    ledger = wait_idle(server)
    assert ledger["session_leases"] in (1, 2) and fallback_count(server) == before
    assert_clean(ledger, allowed_fallbacks={DROPPED})
    history = prompt_of(1, 70)
    assert cold(server, history) == first
    history = [*history, *first, *prompt_of(2, 20)]
    assert cold(server, history) == second
    assert cold(server, [*history, *second, *prompt_of(3, 5)]) == third
    assert wait_idle(server)["session_leases"] == 0, "a flush ends leases"


def test_a_closed_session_keeps_nothing(server, open_session):
    session = open_session()
    turn(server, session, 1, 70)
    assert wait_idle(server)["session_leases"] > 0
    assert server.post("/close_session", {"session_id": session}).status_code == 200
    evict_the_rest(server)
    assert server.generate(prompt_of(1, 70), max_new_tokens=1)["meta_info"]["cached_tokens"] == 0
    assert wait_idle(server)["session_leases"] == 0
    answer = server.post("/generate", {"input_ids": [5], "session_params": {"id": session}})
    assert (answer.status_code, answer.json()["param"]) == (400, "session_params.id")


def test_an_unused_session_ends(server, open_session):
    session = open_session(timeout=1.0)
    turn(server, session, 1, 40)
    assert wait_idle(server)["session_leases"] > 0
    deadline = time.monotonic() + 10.0
    while server.kv_ledger()["session_leases"]:
        assert time.monotonic() < deadline, "the session has no end"
        time.sleep(0.1)
    assert server.post("/generate", {"input_ids": [5], "session_params": {"id": session}}).status_code == 400
    assert server.post("/close_session", {"session_id": session}).status_code == 400


def test_wrong_input_harms_nobody(server, open_session):
    session = open_session()
    rid, _, _ = turn(server, session, 1, 30)
    mine = {"id": session}
    for params in ({"id": "nobody's"}, {**mine, "rid": "unknown"}, {**mine, "rid": rid, "offset": 99}, {**mine, "replace": 3}, 7):
        answer = server.post("/generate", {"input_ids": [5], "session_params": params})
        assert answer.status_code == 400 and answer.json()["param"].startswith("session_params"), answer.text
    assert server.post("/open_session", {"capacity_of_str_len": 0, "session_id": session}).status_code == 400
    assert turn(server, session, 2, 10, rid=rid)[1] == 35


def test_leases_are_in_nobodys_way(server, open_session):
    """Sessions hold most of the pool; a request that needs all of it is answered, and so are many at once."""
    state = server.server_info()["internal_states"][0]
    sessions = [open_session() for _ in range(6)]
    rids = [turn(server, session, index, 60)[0] for index, session in enumerate(sessions)]
    assert server.server_info()["internal_states"][0]["sessions"] == {"num_open": 6, "num_leased": 6, "leased_tokens": 6 * 65}
    before = fallback_count(server)
    answer = server.generate(prompt_of(9, POOL_TOKENS - 30), max_new_tokens=8, ignore_eos=True)
    assert len(answer["output_ids"]) == 8 and fallback_count(server) == before + 6
    wait_idle(server)
    server.flush_cache()
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(turn, server, session, 20 + index, 30, rid=rids[index], num_new=30) for index, session in enumerate(sessions)]
        calls += [pool.submit(server.generate, prompt_of(30 + index, 40), max_new_tokens=30, ignore_eos=True) for index in range(12)]
        answers = [call.result() for call in calls]
    assert all(len(outputs) == 30 for _, _, outputs in answers[:6]) and all(len(item["output_ids"]) == 30 for item in answers[6:])
    totals = server.server_info()["internal_states"][0]["totals"]
    assert totals["num_aborted"] == state["totals"]["num_aborted"]
    for session in sessions:
        server.post("/close_session", {"session_id": session})
    ledger = wait_idle(server)
    assert ledger["session_leases"] == 0
    server.flush_cache()
    assert_empty(server.kv_ledger())
