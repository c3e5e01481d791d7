"""Structured output at the front: what reaches the planner, what is refused, and a compiler that is killed or dies without harm to others."""
import asyncio
import json
import time

import pytest

from kits.front import Front
from sglane.entrypoints import grammar_checker
from sglane.entrypoints.errors import ApiError
from sglane.entrypoints.grammar_checker import GrammarChecker, Worker, write_vocabulary
from sglane.entrypoints.grammar_fields import parse_grammar
from sglane.entrypoints.validation import Fields
from sglane.plan.io_struct import GenerateRequest, Grammar, PrepareGrammar

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
#: Compiles, but for many seconds.
SLOW = Grammar("json_schema", json.dumps({"enum": [f"value {number} of many" for number in range(12000)]}))


def parsed(**fields):
    return parse_grammar(Fields(fields), with_response_format=True)


def test_fields_to_grammars():
    compact = json.dumps(SCHEMA, separators=(",", ":"))  # the order of properties is kept
    assert parsed() == parsed(json_schema=None, regex="", response_format={"type": "text"}) == ("", None)
    assert parsed(json_schema=SCHEMA) == parsed(json_schema=json.dumps(SCHEMA)) == ("json_schema", Grammar("json_schema", compact))
    assert parsed(regex="a+") == ("regex", Grammar("regex", "a+"))
    assert parsed(ebnf='root ::= "a"') == ("ebnf", Grammar("ebnf", 'root ::= "a"'))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    assert parsed(response_format=form) == ("response_format", Grammar("json_schema", compact))
    form["json_schema"]["strict"] = False
    assert parsed(response_format=form) == ("response_format", Grammar("json_schema", compact, strict=False))
    assert parsed(response_format={"type": "json_object"})[1] == Grammar("json_schema", '{"type":"object"}', strict=False)


def test_both_forms_of_structural_tags():
    tag = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
    new = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]}}
    old = {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    for found in (parsed(structural_tag=json.dumps(new))[1], parsed(response_format=old)[1], parsed(structural_tag=old)[1]):
        assert found.kind == "structural_tag" and json.loads(found.text)["format"]["triggers"] == ["<f"]
        assert json.loads(found.text)["format"]["tags"][0]["content"] == tag["content"]


def test_keywords_are_refused_where_they_are_keywords_only():
    named_like_keywords = {"type": "object", "properties": {name: {"type": "string"} for name in ("not", "if", "contains", "allOf", "$ref")}}
    assert parsed(json_schema=named_like_keywords)[1] is not None
    assert parsed(json_schema={"enum": [{"not": 1}], "const": {"if": 2}, "uniqueItems": False})[1] is not None
    for place in ({"items": [{"not": {"type": "null"}}]}, {"$defs": {"a": {"not": {"type": "null"}}}}, {"anyOf": [{"not": {"type": "null"}}]}):
        with pytest.raises(ApiError, match="'not'"):
            parsed(json_schema=place)


# --- the checker ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def vocabulary(tmp_path, tokenizer, config):
    path = tmp_path / "vocabulary"
    write_vocabulary(path, tokenizer, config.vocab_size, (2, 0))
    return path


def checking(vocabulary, work):
    """Run `work(checker)` on an event loop of its own."""

    async def prepare(grammar):
        assert grammar != SLOW

    async def run():
        checker = GrammarChecker("xgrammar", vocabulary, prepare)
        try:
            return await work(checker)
        finally:
            await checker.close()

    return asyncio.run(run())


def test_verdicts(vocabulary):
    async def work(checker):
        good = [await checker.check(Grammar("regex", "a+")), await checker.check(Grammar("json_schema", json.dumps(SCHEMA)))]
        return good, await checker.check(Grammar("regex", "((")), await checker.check(Grammar("json_schema", '{"type":"foo"}'))

    good, regex, schema = checking(vocabulary, work)
    assert good == ["", ""] and "parenthesis" in regex and "foo" in schema


def test_a_slow_grammar_is_given_up_and_remembered(vocabulary, monkeypatch):
    monkeypatch.setattr(grammar_checker, "COMPILE_LIMIT_S", 1.0)

    async def work(checker):
        assert await checker.check(Grammar("regex", "a+")) == ""
        begin = time.monotonic()
        verdicts = [await checker.check(SLOW), await checker.check(SLOW)]
        elapsed_s = time.monotonic() - begin
        return verdicts, elapsed_s, await checker.check(Grammar("regex", "b+"))

    verdicts, elapsed_s, later = checking(vocabulary, work)
    assert all("did not compile within 1 s" in verdict for verdict in verdicts) and elapsed_s < 4
    assert later == ""


def test_a_worker_that_dies(vocabulary):
    """Between two questions it is replaced; while it works on one, that grammar is to blame."""

    async def work(checker):
        assert await checker.check(Grammar("regex", "a+")) == ""
        worker = await checker._worker
        worker.kill()
        await worker.wait()
        between = await checker.check(Grammar("regex", "b+"))
        worker = await checker._worker
        question = asyncio.create_task(checker.check(SLOW))
        await asyncio.sleep(0.3)
        worker.kill()
        return between, await question, await checker.check(Grammar("regex", "c+"))

    between, during, after = checking(vocabulary, work)
    assert between == after == "" and "the compiler failed" in during


def test_the_start_of_the_worker_is_no_queue(vocabulary, monkeypatch):
    """On a busy machine it takes longer than grammars may wait for one another; and many that wait start one worker."""
    monkeypatch.setattr(grammar_checker, "QUEUE_LIMIT_S", 1.0)
    start, starts = Worker.start, []

    async def slow_start(backend, path):
        starts.append(path)
        await asyncio.sleep(2.0)
        return await start(backend, path)

    monkeypatch.setattr(Worker, "start", slow_start)

    async def work(checker):
        first = await asyncio.gather(*(checker.check(Grammar("regex", f"a{{{count}}}")) for count in range(1, 6)))
        worker = await checker._worker
        worker.kill()
        await worker.wait()
        return first, await asyncio.gather(*(checker.check(Grammar("regex", f"b{{{count}}}")) for count in range(1, 6)))

    assert checking(vocabulary, work) == ([""] * 5, [""] * 5)
    assert len(starts) == 2, "one at first, one after its death"


def test_a_client_that_leaves_in_between(vocabulary):
    """Its grammar's answer must not be taken for the next one's."""

    async def work(checker):
        assert await checker.check(Grammar("regex", "a+")) == ""
        question = asyncio.create_task(checker.check(SLOW))
        await asyncio.sleep(0.2)
        question.cancel()
        return await asyncio.wait_for(checker.check(Grammar("regex", "((")), 30), await checker.check(Grammar("regex", "b+"))

    wrong, good = checking(vocabulary, work)
    assert "parenthesis" in wrong and good == ""


# --- the routes ----------------------------------------------------------------------------------------------------------


ROUTES = [("/generate", {"input_ids": [504]}), ("/v1/completions", {"prompt": [504]}),
          ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})]


def with_fields(route, body, fields):
    return {**body, "sampling_params": fields} if route == "/generate" else {**body, **fields}


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_what_the_planner_gets(front, route, body):
    front.ask(route, with_fields(route, body, {"regex": "[a-c]+", "ignore_eos": True}))
    request = front.wait_received(GenerateRequest, 1)[-1]
    assert request.sampling.grammar == Grammar("regex", "[a-c]+")
    assert len(front.behaviour.received_of(PrepareGrammar)) <= 1  # once, for the first of the routes
    assert 2 in request.sampling.stop_token_ids  # the end of the grammar ends the answer in any case


@pytest.mark.parametrize(("route", "body"), ROUTES)
@pytest.mark.parametrize(("fields", "name"), [
    ({"regex": "(("}, "regex"), ({"json_schema": '{"type":"foo"}'}, "json_schema"), ({"ebnf": "root ::= x"}, "ebnf"),
    ({"json_schema": '{"$ref":"#"}'}, "json_schema"), ({"structural_tag": "{}"}, "structural_tag"), ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
])
def test_refusals(front, route, body, fields, name):
    response = front.post(route, with_fields(route, body, fields))
    assert response.status_code == 400 and response.json()["param"] == name and name in response.json()["message"], response.text
    assert front.wait_idle()


def test_response_format_refusals(front):
    for route, body in ROUTES[1:]:
        form = {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}
        response = front.post(route, {**body, "response_format": form})
        assert response.status_code == 400 and response.json()["param"] == "response_format", response.text
        response = front.post(route, {**body, "response_format": {"type": "json_object"}, "regex": "a"})
        assert response.status_code == 400 and "exclude" in response.json()["message"], response.text
        response = front.post(route, {**body, "response_format": {"type": "json_object"}, "min_tokens": 3})
        assert response.status_code == 400 and response.json()["param"] == "min_tokens", response.text


# --- the other library ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_front(config, tokenizer):
    with Front(config, tokenizer, grammar_backend="llguidance") as running:
        yield running


TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_llguidance(other_front, route, body):
    for fields in ({"regex": "[a-c]+"}, {"json_schema": SCHEMA}, {"ebnf": 'root ::= "a"'}, {"ebnf": 'start: "a" | "b"'}):
        other_front.ask(route, with_fields(route, body, fields))
    for fields, name in (({"regex": "(("}, "regex"), ({"json_schema": '{"type":"foo"}'}, "json_schema"), ({"ebnf": "start: x"}, "ebnf")):
        response = other_front.post(route, with_fields(route, body, fields))
        assert response.status_code == 400 and response.json()["param"] == name and "\n<state>" not in response.text, response.text
    response = other_front.post(route, with_fields(route, body, {"structural_tag": TAG}))
    assert response.status_code == 400 and response.json()["param"] == "structural_tag", response.text
    assert "--grammar-backend llguidance" in response.json()["message"]
    assert other_front.wait_idle()


def test_the_ranks_are_warmed_without_anybody_waiting(front):
    client = front.state.engine().client
    front.on_loop(client.warm_grammars)
    message = front.wait_received(PrepareGrammar, 1)[0]
    assert (message.request_id, message.grammar.kind) == (0, "regex")
    assert front.ask("/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 1}})["output_ids"] == [504]
