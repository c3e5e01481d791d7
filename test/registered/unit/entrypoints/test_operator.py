"""Pause, profile and log by HTTP: what reaches the planner, what is refused."""
import logging
import threading
import time

import httpx
import pytest

from sglane.plan.io_struct import ContinueGeneration, PauseGeneration, SetLogLevel, StartProfile, StopProfile

BODY = {"input_ids": [504], "sampling_params": {"max_new_tokens": 3}}


@pytest.fixture(autouse=True)
def undo(front):
    root = logging.getLogger()
    level = root.level
    yield
    front.post("/continue_generation")
    front.behaviour.is_profiling = False
    front.post("/configure_logging", {"log_requests": False, "log_requests_level": 2})
    root.setLevel(level)


@pytest.mark.parametrize(("body", "mode"), [(None, "abort"), ({}, "abort"), ({"mode": "retract"}, "retract"), ({"mode": "in_place"}, "in_place")])
def test_pause_and_continue(front, body, mode):
    response = front.post("/pause_generation", body)
    assert (response.status_code, response.json()["status"]) == (200, "ok")
    assert [message.mode for message in front.behaviour.received_of(PauseGeneration)] == [mode]
    answers = []
    thread = threading.Thread(target=lambda: answers.append(httpx.post(front.url + "/generate", json=BODY, timeout=30, trust_env=False)))
    thread.start()
    time.sleep(0.2)
    assert not answers, "it must wait"
    for probe in ("/health", "/health_generate", "/ready"):
        assert front.http.get(probe).status_code == 200
    assert front.post("/continue_generation", {}).json()["status"] == "ok"
    thread.join(10.0)
    assert answers[0].json()["output_ids"] == [504] * 3
    assert len(front.behaviour.received_of(ContinueGeneration)) == 1


@pytest.mark.parametrize(("path", "body", "field"), [
    ("/pause_generation", {"mode": "sleep"}, "mode"),
    ("/pause_generation", {"mode": 3}, "mode"),
    ("/start_profile", {"num_steps": 0}, "num_steps"),
    ("/start_profile", {"activities": "CPU"}, "activities"),
    ("/start_profile", {"activities": ["CPU", "TPU"]}, "activities"),
    ("/start_profile", {"activities": [[]]}, "activities"),
    ("/start_profile", {"output_dir": 3}, "output_dir"),
    ("/start_profile", {"output_dir": "a\0b"}, "output_dir"),
    ("/start_profile", {"profile_prefix": "../up"}, "profile_prefix"),
    ("/start_profile", {"with_stack": "yes"}, "with_stack"),
    ("/start_profile", {"merge_profiles": True}, "merge_profiles"),
    ("/configure_logging", {"log_requests": 1}, "log_requests"),
    ("/configure_logging", {"log_requests_level": 4}, "log_requests_level"),
    ("/configure_logging", {"log_level": "loud"}, "log_level"),
    ("/configure_logging", {"dump_requests_folder": "/tmp"}, "dump_requests_folder"),
])
def test_refusals_name_the_field_and_change_nothing(front, path, body, field):
    response = front.post(path, body)
    assert response.status_code == 400 and response.json()["param"] == field, response.text
    assert not [message for message in front.behaviour.received if not hasattr(message, "rid")]


def test_profile(front, tmp_path):
    body = {"output_dir": str(tmp_path), "num_steps": 3, "activities": ["CPU"], "profile_prefix": "mine", "merge_profiles": False, "start_step": None}
    assert front.post("/start_profile", body).status_code == 200
    message = front.behaviour.received_of(StartProfile)[0]
    assert (message.folder, message.num_steps, message.activities, message.with_stack) == (str(tmp_path), 3, ["CPU"], False)
    assert message.name.startswith("mine-")
    again = front.http.get("/start_profile")
    assert again.status_code == 400 and "recording" in again.json()["message"]
    front.behaviour.is_profiling = True
    assert front.http.get("/stop_profile").status_code == 200
    assert front.post("/stop_profile").status_code == 400
    assert len(front.behaviour.received_of(StopProfile)) == 2


def test_request_log_is_switched_while_the_server_runs(front, caplog):
    def num_lines(body):
        assert front.post("/configure_logging", body).status_code == 200
        caplog.clear()
        with caplog.at_level(logging.INFO, "sglane.observability.request_log"):
            front.ask("/generate", BODY)
        return [hasattr(record, "input_ids") for record in caplog.records if record.name == "sglane.observability.request_log"]

    assert num_lines({}) == []
    assert num_lines({"log_requests": True, "log_requests_level": 0}) == [False, False]
    assert num_lines({"log_requests": True, "log_requests_level": 2}) == [True, False]
    assert num_lines({"log_requests": False}) == []


def test_log_level_goes_to_every_process(front):
    assert front.post("/configure_logging", {"log_level": "warning"}).status_code == 200
    assert [message.level for message in front.wait_received(SetLogLevel, 1)] == ["warning"]
    assert logging.getLogger().level == logging.WARNING
