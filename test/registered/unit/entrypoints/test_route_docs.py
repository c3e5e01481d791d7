"""/openapi.json declares every route, and every status and content type that the routes really answer with."""
import jsonschema
import pytest

from kits.front import Front
from sglane.entrypoints.page_api import FILES

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
#: (method, path, route, body): what is sent, and the route that should be declared.
CALLS = [
    ("POST", "/generate", "/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 2}}),
    ("POST", "/generate", "/generate", {"input_ids": [504], "sampling_params": {"max_new_tokens": 2}, "stream": True}),
    ("PUT", "/generate", "/generate", {}),
    ("POST", "/generate", "/generate", {"input_ids": [7001]}),
    ("POST", "/generate", "/generate", {"text": "x" * 3000}),
    ("POST", "/v1/completions", "/v1/completions", {"prompt": "hi", "max_tokens": 2}),
    ("POST", "/v1/completions", "/v1/completions", {"prompt": "hi", "max_tokens": 2, "stream": True}),
    ("POST", "/v1/chat/completions", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", "/v1/chat/completions", {**CHAT, "stream": True}),
    ("POST", "/tokenize", "/tokenize", {"prompt": "hi"}),
    ("POST", "/detokenize", "/detokenize", {"tokens": [504]}),
    ("POST", "/v1/detokenize", "/v1/detokenize", {"tokens": [-1]}),
    *(("GET", path, path, None) for path in (
        "/ping", "/health", "/v1/health", "/ready", "/health_generate", "/model_info", "/get_model_info", "/server_info", "/get_server_info",
        "/v1/models", "/v1/loads", "/get_load", "/flush_cache", "/metrics", *FILES)),
    ("GET", "/v1/models/none", "/v1/models/{model}", None),
    ("GET", "/v1/loads?include=all&format=prometheus", "/v1/loads", None),
    ("GET", "/v1/loads?format=xml", "/v1/loads", None),
    ("POST", "/flush_cache?timeout=-1", "/flush_cache", None),
    ("POST", "/abort_request", "/abort_request", {"rid": "none"}),
    ("POST", "/abort_request", "/abort_request", {"rid": 3}),
    *(("POST", path, path, body) for path, body in (
        ("/pause_generation", {"mode": "in_place"}), ("/pause_generation", {"mode": "x"}), ("/continue_generation", {}), ("/start_profile", {}),
        ("/start_profile", {"num_steps": 0}), ("/stop_profile", None), ("/stop_profile", None), ("/configure_logging", {"log_requests": False}),
        ("/configure_logging", {"log_level": "loud"}))),
    ("GET", "/start_profile", "/start_profile", None),
    ("POST", "/open_session", "/open_session", {"capacity_of_str_len": 10}),
    ("POST", "/open_session", "/open_session", {}),
    ("POST", "/open_session", "/open_session", {"capacity_of_str_len": 10, "session_id": "a"}),
    ("POST", "/close_session", "/close_session", {"session_id": "a"}),
    ("POST", "/close_session", "/close_session", {"session_id": "a"}),
    ("GET", "/stop_profile", "/stop_profile", None),
]


@pytest.fixture(scope="module")
def closed(config, tokenizer):
    with Front(config, tokenizer, enable_metrics=True, api_key="a-key", max_body_bytes=2000) as running:
        yield running


@pytest.fixture(scope="module")
def paths(closed):
    return closed.http.get("/openapi.json", headers={"Authorization": "Bearer a-key"}).json()["paths"]


@pytest.mark.parametrize("key", ["a-key", "wrong"])
@pytest.mark.parametrize(("method", "path", "route", "body"), CALLS)
def test_what_is_answered_is_declared(closed, paths, method, path, route, body, key):
    response = closed.http.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"})
    declared = paths[route][method.lower()]["responses"]
    assert str(response.status_code) in declared, (response.status_code, response.text)
    media = response.headers.get("content-type", "").partition(";")[0]
    assert media in declared[str(response.status_code)].get("content", {"": {}})
    if response.status_code >= 400:
        schema = declared[str(response.status_code)]["content"][media]["schema"]
        assert set(schema["required"]) <= set(response.json()) and response.json()["object"] == "error"


def test_every_route_is_called_above(paths):
    called = {(method, route) for method, _, route, _ in CALLS}
    declared = {(method.upper(), path) for path, operations in paths.items() for method in operations}
    assert {path for _, path in declared} - {path for _, path in called} <= {"/v1/tokenize"}


def test_other_content_types_are_declared(closed, paths):
    headers = {"Authorization": "Bearer a-key", "Content-Type": "text/plain"}
    for route in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = closed.http.post(route, content=b"{}", headers=headers)
        assert response.status_code == 415 and "415" in paths[route]["post"]["responses"]


@pytest.mark.parametrize("body", [{}, {"text": ""}, {"text": []}, {"input_ids": []}, {"text": "hi", "input_ids": [504]}])
def test_what_generate_refuses_is_not_declared(front, body):
    validator = jsonschema_of(front, "/generate")
    assert front.http.post("/generate", json=body).status_code == 400
    assert not validator.is_valid(body)


@pytest.mark.parametrize("body", [{"text": "hi"}, {"text": ["hi", "ho"]}, {"input_ids": [504]}, {"input_ids": [[504], [505]]}])
def test_what_generate_takes_is_declared(front, body):
    body = {**body, "sampling_params": {"max_new_tokens": 2}}
    assert front.http.post("/generate", json=body).status_code == 200
    assert jsonschema_of(front, "/generate").is_valid(body)


def jsonschema_of(front, route):
    """A validator of the declared body."""
    operation = front.http.get("/openapi.json").json()["paths"][route]["post"]
    return jsonschema.Draft202012Validator(operation["requestBody"]["content"]["application/json"]["schema"])


def test_without_keys_there_is_no_401(front):
    operations = [operation for item in front.http.get("/openapi.json").json()["paths"].values() for operation in item.values()]
    assert not any("401" in operation["responses"] for operation in operations)


def test_a_wrong_method_is_told_all_right_ones(front):
    for path, methods in (("/generate", "POST, PUT"), ("/flush_cache", "GET, POST"), ("/health", "GET, HEAD")):
        response = front.http.request("DELETE", path)
        assert (response.status_code, response.headers["allow"]) == (405, methods)
