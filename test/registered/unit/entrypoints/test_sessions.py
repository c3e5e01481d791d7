"""Sessions over real HTTP: what a turn continues, what is refused, when a session ends. The planner behind it echoes the prompt."""
import threading
import time

import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from kits.fake_planner import QUEUE_FULL
from kits.front import Front
from kits.tiny_tokenizer import BEGIN, save_tiny_tokenizer
from sglane.entrypoints import sessions
from sglane.entrypoints.tokenizer import TextTokenizer
from sglane.plan.io_struct import AbortRequest, CloseSession, GenerateRequest, OpenSession

#: What a first request with these tokens and two new ones leaves.
SEEN = [504, 505, 506, 504, 505]


def open_session(front, **fields):
    return front.ask("/open_session", {"capacity_of_str_len": 1000, **fields})


@pytest.fixture
def plain(front):
    return open_session(front)


@pytest.fixture
def streaming(front):
    return open_session(front, streaming=True)


def body_of(ids, session, num_new=2, **params):
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": num_new}, "session_params": {"id": session, **params}}


def turn(front, ids, session, num_new=2, name=None, **params):
    """(rid, prompt as the planner got it, output)."""
    before = len(front.behaviour.received_of(GenerateRequest))
    body = body_of(ids, session, num_new, **params) | ({"rid": name} if name else {})
    answer = front.ask("/generate", body)
    message = front.wait_received(GenerateRequest, before + 1)[-1]
    prompt = np.frombuffer(message.input_ids, np.int32).tolist()
    assert answer["meta_info"]["prompt_tokens"] == len(prompt) and message.session.endswith(f":{session}")
    return answer["meta_info"]["id"], prompt, answer["output_ids"]


def refused(front, body, path="/generate"):
    """(field, message) of a 400."""
    answer = front.post(path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["param"], answer.json()["message"]


def test_a_named_request_is_continued(front, plain):
    first, prompt, output = turn(front, [504, 505, 506], plain)
    assert (prompt, output) == ([504, 505, 506], [504, 505])
    second, prompt, output = turn(front, [600], plain, rid=first)
    assert prompt == [504, 505, 506, 504, 505, 600]
    _, prompt, _ = turn(front, [601], plain, rid=first)  # a second branch
    assert prompt == [504, 505, 506, 504, 505, 601]
    _, prompt, _ = turn(front, [602], plain, rid=second)
    assert prompt == [504, 505, 506, 504, 505, 600, 504, 505, 602]
    _, prompt, _ = turn(front, [603], plain)  # without a name it begins anew
    assert prompt == [603]


@pytest.mark.parametrize(("params", "history"), [
    ({}, SEEN), ({"offset": 0}, SEEN), ({"offset": 2}, [504, 505]), ({"offset": 5}, SEEN),
    ({"offset": -1}, [504, 505, 506, 504]), ({"offset": -5}, []), ({"drop_previous_output": True}, [504, 505, 506]),
    ({"drop_previous_output": True, "offset": -2}, [504]), ({"offset": None, "replace": None, "drop_previous_output": None}, SEEN),
])
def test_how_much_is_continued(front, plain, params, history):
    rid, _, _ = turn(front, [504, 505, 506], plain)
    again, prompt, output = turn(front, [700], plain, **{"rid": rid, **params})
    assert prompt == [*history, 700]
    _, prompt, _ = turn(front, [701], plain, rid=again)
    assert prompt == [*history, 700, *output, 701]


def test_replace(front, plain):
    first, _, _ = turn(front, [504], plain, 1)
    second, _, _ = turn(front, [505], plain, 1, rid=first)
    third, _, _ = turn(front, [506], plain, 1, rid=second)
    new, prompt, _ = turn(front, [507], plain, 1, rid=first, replace=True)
    assert prompt == [504, 504, 507]
    for gone in (second, third):
        field, message = refused(front, body_of([508], plain, rid=gone))
        assert field == "session_params.rid" and gone in message
    assert turn(front, [508], plain, 1, rid=new)[1] == [504, 504, 507, 504, 508]
    assert turn(front, [509], plain, 1, replace=True, offset=-1)[1] == [509]  # without a name: everything
    assert refused(front, body_of([508], plain, rid=first))[0] == "session_params.rid"


def in_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


def test_replacing_a_running_request_ends_it(front, plain):
    front.behaviour.step_s = 0.02
    thread, found = in_thread(lambda: front.post("/generate", body_of([504], plain, 400) | {"rid": "long"}))
    front.wait_received(GenerateRequest, 1)
    time.sleep(0.1)
    field, message = refused(front, body_of([505], plain, rid="long"))
    assert field == "session_params.rid" and "has not ended" in message
    new, prompt, output = turn(front, [505], plain, 1, rid="long", replace=True)
    thread.join(5.0)
    answer = found[0].json()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort" and 0 < len(answer["output_ids"]) < 400
    assert prompt == [504] * (len(prompt) - 1) + [505] and 2 < len(prompt) <= len(answer["output_ids"]) + 2
    assert turn(front, [506], plain, 1, rid=new)[1] == [*prompt, *output, 506]
    assert turn(front, [507], plain, 1, rid="long")[1] == [504] * (len(answer["output_ids"]) + 1) + [507], "it stays what it was when it ended"


def test_a_streaming_session_is_appended(front, streaming):
    history = []
    for index, ids in enumerate(([504, 505], [506], [507, 508, 509])):
        name = {"rid": "whatever"} if index == 2 else {}  # its last request goes on, whichever is named
        _, prompt, output = turn(front, ids, streaming, **name)
        assert prompt == [*history, *ids]
        history = [*prompt, *output]
    for name, value in (("offset", 1), ("replace", True), ("drop_previous_output", True)):
        assert refused(front, body_of([504], streaming, **{name: value}))[0] == f"session_params.{name}"
    front.behaviour.step_s = 0.02
    thread, found = in_thread(lambda: front.post("/generate", body_of([510], streaming, 30)))
    front.wait_received(GenerateRequest, 4)
    assert "has not ended" in refused(front, body_of([511], streaming))[1]
    thread.join(5.0)
    assert found[0].status_code == 200
    (last,) = front.state.engine().sessions._open[streaming].turns.values()
    assert last.parent is None and last.tokens().tolist() == [*history, 510, *found[0].json()["output_ids"]]


@pytest.mark.parametrize("ending", ["aborted", "left", "refused"])
@pytest.mark.parametrize("kind", ["plain", "streaming"])
def test_a_turn_that_fails_is_none(front, request, kind, ending):
    session = request.getfixturevalue(kind)
    first, prompt, output = turn(front, [504, 505], session)
    named = {"rid": first} if kind == "plain" else {}
    if ending == "refused":
        other = open_session(front, streaming=kind == "streaming")
        assert front.post("/generate", body_of([QUEUE_FULL], other) | {"rid": "failed"}).status_code == 503
        assert turn(front, [504], other)[1] == [504]
    elif ending == "left":
        front.behaviour.step_s = 0.02
        with front.http.stream("POST", "/generate", json=body_of([506], session, 400, **named) | {"rid": "failed", "stream": True}) as response:
            next(response.iter_lines())
        assert front.wait_idle()
    else:
        front.behaviour.step_s = 0.02
        thread, _ = in_thread(lambda: front.post("/generate", body_of([506], session, 400, **named) | {"rid": "failed"}))
        front.wait_received(GenerateRequest, 2)
        front.post("/abort_request", {"rid": "failed"})
        thread.join(5.0)
        front.wait_received(AbortRequest, 1)
    front.behaviour.step_s = 0.0
    if kind == "plain":
        assert refused(front, body_of([507], session, rid="failed"))[0] == "session_params.rid"
    assert turn(front, [507], session, name="failed", **named)[1] == [*prompt, *output, 507]  # the name is free again


def turn_named(front, session, rid):
    return front.ask("/generate", body_of([504], session) | {"rid": rid})


def test_names(front, plain):
    turn_named(front, plain, "a")
    assert refused(front, body_of([504], plain) | {"rid": "a"})[0] == "rid"
    turn_named(front, open_session(front), "a")  # another session
    front.ask("/generate", body_of([504], plain, replace=True) | {"rid": "a"})


def test_streams_and_stop_strings(front, tokenizer, plain):
    ids = [tokenizer.encode(character, add_special_tokens=False).tolist()[0] for character in "abcdefgh"]
    front.behaviour.tokens_per_step = 8
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 8, "stop": "cd"}, "session_params": {"id": plain}, "rid": "first"}
    events = front.stream("/generate", body)
    assert events[-1]["output_ids"] == ids[:4]
    assert turn(front, [504], plain, rid="first")[1] == [*ids, *ids[:4], 504]


def test_openai_routes(front, tokenizer, plain):
    first = front.ask("/v1/completions", {"prompt": "The capital", "max_tokens": 2, "rid": "one", "session_params": {"id": plain},
                                          "return_token_ids": True})["choices"][0]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "return_token_ids": True}
    alone = front.ask("/v1/chat/completions", chat)["choices"][0]["prompt_token_ids"]
    second = front.ask("/v1/chat/completions", {**chat, "rid": "two", "session_params": {"id": plain, "rid": "one"}})["choices"][0]
    assert second["prompt_token_ids"] == [*first["prompt_token_ids"], *first["token_ids"], *alone]
    assert turn(front, [504], plain, rid="two")[1] == [*second["prompt_token_ids"], *second["token_ids"], 504]
    assert refused(front, {"prompt": "a", "echo": True, "session_params": {"id": plain}}, "/v1/completions")[0] == "echo"


def test_a_begin_token_is_not_appended(front, config, tokenizer, plain, monkeypatch):
    monkeypatch.setattr(front.state.engine().sessions, "_begin_token", 504)
    first, prompt, output = turn(front, [504, 505], plain)
    assert prompt == [504, 505]
    assert turn(front, [504, 506], plain, rid=first)[1] == [504, 505, *output, 506]


@pytest.mark.parametrize("adds_it", [False, True])
def test_the_begin_token_is_what_the_tokenizer_adds(tmp_path, adds_it):
    """Models that name a token so, but do not begin texts with it, use it for something else."""
    file = save_tiny_tokenizer(tmp_path) / "tokenizer.json"
    if adds_it:
        plain = Tokenizer.from_file(str(file))
        plain.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
        plain.save(str(file))
    assert TextTokenizer(str(tmp_path), None).begin_token_id == (0 if adds_it else None)


@pytest.mark.parametrize(("params", "field"), [
    ({"id": "nobody's"}, "session_params.id"), ({}, "session_params.id"), ({"id": 3}, "session_params.id"), ([], "session_params"),
    ("s", "session_params"), ({"rid": "unknown"}, "session_params.rid"), ({"rid": 3}, "session_params.rid"),
    ({"offset": "1"}, "session_params.offset"),
    ({"offset": 6}, "session_params.offset"), ({"offset": -6}, "session_params.offset"), ({"offset": 1.5}, "session_params.offset"),
    ({"replace": 1}, "session_params.replace"), ({"drop_previous_output": "yes"}, "session_params.drop_previous_output"),
])
def test_wrong_params_name_the_field(front, plain, params, field):
    rid, _, _ = turn(front, [504, 505, 506], plain)
    if isinstance(params, dict) and field != "session_params.id":
        params = {"id": plain, "rid": rid, **params}
    for path, body in (("/generate", {"input_ids": [504]}), ("/v1/completions", {"prompt": "a"}),
                       ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})):
        assert refused(front, {**body, "session_params": params}, path)[0] == field
    assert front.wait_idle()


def test_one_prompt_and_one_choice(front, plain):
    for body in ({"input_ids": [[504], [505]]}, {"input_ids": [504], "sampling_params": {"n": 2}}):
        assert refused(front, {**body, "session_params": {"id": plain}})[0] == "session_params"
    assert refused(front, {"prompt": "a", "n": 2, "session_params": {"id": plain}}, "/v1/completions")[0] == "session_params"
    assert front.state.engine().sessions._open[plain].turns == {}


def test_the_whole_prompt_counts_for_the_limit(front, plain):
    first, _, _ = turn(front, [504] * 300, plain, 10)
    field, message = refused(front, body_of([504] * 300, plain, rid=first))
    assert field == "input_ids" and "610 tokens" in message
    assert refused(front, body_of([504] * 600, plain, replace=True))[0] == "input_ids"
    assert turn(front, [505], plain, rid=first)[1] == [504] * 310 + [505], "what is refused replaces nothing"


@pytest.mark.parametrize(("path", "body", "field"), [
    ("/open_session", {}, "capacity_of_str_len"), ("/open_session", {"capacity_of_str_len": -1}, "capacity_of_str_len"),
    ("/open_session", {"capacity_of_str_len": "1"}, "capacity_of_str_len"),
    ("/open_session", {"capacity_of_str_len": 1, "session_id": 3}, "session_id"),
    ("/open_session", {"capacity_of_str_len": 1, "session_id": ""}, "session_id"),
    ("/open_session", {"capacity_of_str_len": 1, "session_id": "x" * 300}, "session_id"),
    ("/open_session", {"capacity_of_str_len": 1, "streaming": "no"}, "streaming"),
    ("/open_session", {"capacity_of_str_len": 1, "timeout": 0}, "timeout"),
    ("/open_session", {"capacity_of_str_len": 1, "timeout": 1e30}, "timeout"), ("/close_session", {}, "session_id"),
    ("/close_session", {"session_id": "nobody's"}, "session_id"),
])
def test_wrong_bodies_name_the_field(front, path, body, field):
    assert refused(front, body, path)[0] == field


def test_open_and_close(front):
    assert open_session(front, session_id="mine") == "mine"
    (opened,) = front.wait_received(OpenSession, 1)
    assert refused(front, {"capacity_of_str_len": 1, "session_id": "mine"}, "/open_session") == ("session_id", "session_id 'mine' is open already")
    rid, _, _ = turn(front, [504], "mine")
    answer = front.post("/close_session", {"session_id": "mine"})
    assert (answer.status_code, answer.content) == (200, b"")
    assert front.wait_received(CloseSession, 1) == [CloseSession(opened.session)]
    assert refused(front, body_of([504], "mine"))[0] == "session_params.id"
    open_session(front, session_id="mine")  # a new one, without the old requests
    assert front.wait_received(OpenSession, 2)[1].session != opened.session
    assert refused(front, body_of([504], "mine", rid=rid))[0] == "session_params.rid"
    front.post("/close_session", {"session_id": "mine"})


def test_a_session_ends_when_it_is_not_used(front):
    session = open_session(front, timeout=0.3)
    for _ in range(4):  # it is used for longer than that
        turn(front, [504], session)
        time.sleep(0.15)
    assert front.behaviour.received_of(CloseSession) == []
    front.wait_received(CloseSession, 1)
    assert refused(front, body_of([504], session))[0] == "session_params.id"


def test_a_request_under_way_is_a_use(front):
    session = open_session(front, timeout=0.1)
    front.behaviour.step_s = 0.02
    answer = front.ask("/generate", body_of([504], session, 20))
    assert len(answer["output_ids"]) == 20 and front.behaviour.received_of(CloseSession) == []
    front.wait_received(CloseSession, 1)


def test_the_time_without_use_begins_when_a_request_has_ended(front):
    session = open_session(front, timeout=0.4)
    front.behaviour.step_s = 0.02
    front.ask("/generate", body_of([504], session, 15))
    time.sleep(0.25)
    assert front.behaviour.received_of(CloseSession) == []
    front.wait_received(CloseSession, 1)


def test_closing_under_way(front, plain):
    front.behaviour.step_s = 0.02
    thread, found = in_thread(lambda: front.post("/generate", body_of([504], plain, 20)))
    front.wait_received(GenerateRequest, 1)
    assert front.post("/close_session", {"session_id": plain}).status_code == 200
    thread.join(5.0)
    assert found[0].status_code == 200 and len(found[0].json()["output_ids"]) == 20


def test_limits(front, config, tokenizer, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    monkeypatch.setattr(sessions, "MAX_TURNS", 2)
    monkeypatch.setattr(sessions, "MAX_TOKENS", 20)
    with Front(config, tokenizer) as small:
        one, _ = open_session(small), open_session(small)
        full = small.post("/open_session", {"capacity_of_str_len": 1})
        assert full.status_code == 503 and "close some" in full.json()["message"]
        first, _, _ = turn(small, [504], one)
        turn(small, [505], one, rid=first)
        assert "has 2 requests" in refused(small, body_of([504], one))[1]
        assert turn(small, [504] * 10, one, replace=True)[1] == [504] * 10
        assert small.post("/generate", body_of([504] * 9, one)).status_code == 503
