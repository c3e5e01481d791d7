"""Keys: what needs one, which, and the shape of a refusal."""
import sys

import pytest

from kits.front import Front
from sglane.entrypoints.launcher import launch_command
from sglane.server_args import ServerArgs

KEY, ADMIN_KEY = "a-key", "an-admin-key"
OPEN = ["/health", "/v1/health", "/ready", "/ping", "/metrics"]
CLOSED = [("GET", "/v1/models"), ("GET", "/model_info"), ("GET", "/server_info"), ("GET", "/v1/loads"), ("POST", "/generate"), ("POST", "/tokenize"),
          ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/openapi.json"), ("GET", "/no/such/route"),
          ("GET", "/health_generate")]
ADMIN = [("POST", "/flush_cache"), ("GET", "/flush_cache"), ("POST", "/abort_request"), ("POST", "/pause_generation"),
         ("POST", "/continue_generation"), ("POST", "/configure_logging"), ("POST", "/start_profile"), ("GET", "/stop_profile")]


@pytest.fixture(scope="module")
def fronts(config, tokenizer):
    """By (api key, admin key)."""
    flags = {(True, True): {"api_key": KEY, "admin_api_key": ADMIN_KEY}, (True, False): {"api_key": KEY}, (False, True): {"admin_api_key": ADMIN_KEY}}
    with (Front(config, tokenizer, enable_metrics=True, **flags[True, True]) as both, Front(config, tokenizer, **flags[True, False]) as plain,
          Front(config, tokenizer, **flags[False, True]) as admin):
        yield {(True, True): both, (True, False): plain, (False, True): admin}


def status(front, method, path, key=None, scheme="Bearer"):
    headers = {} if key is None else {"Authorization": f"{scheme} {key}".encode("latin-1")}
    response = front.http.request(method, path, headers=headers, json={} if method == "POST" else None)
    if response.status_code == 401:
        body = response.json()
        assert body["object"] == "error" and body["code"] == 401 and body["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
    return response.status_code


def test_probes_stay_open(fronts):
    for path in OPEN:
        assert status(fronts[True, True], "GET", path) == 200


@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_requests_need_the_key(fronts, method, path):
    for front in (fronts[True, True], fronts[True, False]):
        assert status(front, method, path) == 401
        assert status(front, method, path, "wrong") == 401
        assert status(front, method, path, "a-ke\u00ff") == 401
        assert status(front, method, path, KEY, "Basic") == 401
        assert status(front, method, path, KEY) != 401
        assert status(front, method, path, KEY, "bearer") != 401
    assert status(fronts[True, True], method, path, ADMIN_KEY) != 401
    assert status(fronts[False, True], method, path) != 401, "an admin key alone closes the operator's routes only"


@pytest.mark.parametrize(("method", "path"), ADMIN)
def test_operators_need_the_admin_key(fronts, method, path):
    for front in (fronts[True, True], fronts[False, True]):
        assert status(front, method, path) == 401
        assert status(front, method, path, KEY) == 401
        assert status(front, method, path, ADMIN_KEY) in (200, 400)
    assert status(fronts[True, False], method, path) == 401
    assert status(fronts[True, False], method, path, KEY) in (200, 400), "without an admin key the key opens everything"


def test_keys_are_not_shown(fronts):
    text = fronts[True, True].http.get("/server_info", headers={"Authorization": f"Bearer {KEY}"}).text
    assert KEY not in text and ADMIN_KEY not in text and '"api_key":"***"' in text


def test_the_command_line_is_shown_without_keys():
    args = ServerArgs(api_key="a", admin_api_key="b c")
    shown = launch_command(args, ["--api-key", "a", "--admin-api-key=b c", "--port", "3"])
    assert shown == f"{sys.executable} -m sglane.launch_server --api-key '***' '--admin-api-key=***' --port 3"


def test_refusals_are_counted(fronts):
    front = fronts[True, True]
    assert status(front, "POST", "/generate") == 401
    assert 'sglang:http_responses_total{endpoint="/generate",method="POST",status_code="401"}' in front.http.get("/metrics").text
