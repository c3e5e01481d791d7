"""Start, stop and death of a server: real processes and signals, made-up engine."""
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from kits.front_server import FrontServer
from kits.server import PYTHON_ROOT
from sglane.entrypoints.processes import Child, Family, WorkFolder, bind_http

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 1024, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 1, "torch_dtype": "float32",
}
BODY = {"input_ids": [5], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
READY = "The server is fired up and ready to roll!"


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def flags(model, *more):
    return ("--model-path", str(model), "--skip-tokenizer-init", *more)


@pytest.fixture
def temporary():
    """A short folder of our own for temporary files: unix sockets allow no long paths."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


class Stream:
    """A stream in a thread: its events, or how it failed."""

    def __init__(self, server, num_tokens):
        self.lines = []
        self.error = None
        self._url = server.url
        self._body = {**BODY, "stream": True, "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True}}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self.lines:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def _run(self):
        try:
            with httpx.stream("POST", self._url + "/generate", json=self._body, timeout=60, trust_env=False) as response:
                for line in response.iter_lines():
                    if line:
                        self.lines.append(line)
        except httpx.TransportError as error:
            self.error = error

    def join(self, timeout_s=10):
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the client still waits"
        return self


def test_start_serve_stop(model, temporary):
    with FrontServer(*flags(model), env={"TMPDIR": str(temporary)}) as server:
        assert server.generate([5, 6], max_new_tokens=3, ignore_eos=True)["output_ids"] == [5, 6, 5]
        assert READY in server.log() and f"running on http://127.0.0.1:{server.port}" in server.log()
        assert len(list(temporary.iterdir())) == 1
        assert len(server.processes("--child")) == 2
        assert server.stop() == 0
    assert not list(temporary.iterdir()), "the work folder is left"


def test_keys_and_logs_from_a_file(model, tmp_path):
    """The warm-up has the key; every log line is JSON; neither keys nor probes are in the log."""
    file = tmp_path / "flags.yaml"
    file.write_text("api-key: kept-quiet\nadmin_api_key: also-quiet\nlog-format: json\nlog-requests: true\nenable_metrics: true\n")
    with FrontServer(*flags(model, "--config", str(file), "--log-requests-level", "0")) as server:
        assert server.post("/generate", BODY).status_code == 401
        body = {**BODY, "rid": "mine", "sampling_params": {"max_new_tokens": 2}}
        answer = httpx.post(f"{server.url}/generate", json=body, headers={"Authorization": "Bearer kept-quiet"}, trust_env=False)
        assert answer.status_code == 200
        assert server.get("/metrics").status_code == 200 and server.health() == 200
        assert server.stop() == 0
        log = server.log()
    lines = [json.loads(line) for line in log.splitlines()]
    assert "quiet" not in log and READY in {line["message"] for line in lines}
    assert [line["finish_reason"] for line in lines if line.get("event") == "finish" and line["rid"] == "mine"] == ["length"]
    access = [line["message"] for line in lines if line["logger"] == "uvicorn.access"]
    assert any("/generate" in line for line in access)
    assert not any(path in line for line in access for path in ("/health", "/metrics"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_first_signal_drains(model, number):
    """To the whole process group, as Ctrl-C in a terminal does it."""
    with FrontServer(*flags(model)) as server:
        streams = [Stream(server, 40) for _ in range(3)]
        os.killpg(server.pid, number)
        time.sleep(0.3)
        refused = server.post("/generate", BODY)
        assert refused.status_code == 503 and "shutting down" in refused.text
        assert server.health() == 503
        for stream in streams:
            stream.join()
            assert stream.lines[-1] == "data: [DONE]"
            assert json.loads(stream.lines[-2][6:])["meta_info"]["completion_tokens"] == 40
        assert server.wait_exit(20) == 0


def test_drain_ends_at_its_limit(model):
    with FrontServer(*flags(model, "--shutdown-timeout-s", "1")) as server:
        stream = Stream(server, 400)
        begin = time.monotonic()
        server.signal(signal.SIGTERM)
        stream.join()
        assert "shutting down" in stream.lines[-2] and stream.lines[-1] == "data: [DONE]"
        assert server.wait_exit(20) == 0
        assert time.monotonic() - begin < 10


def test_a_child_that_does_not_end_is_killed(model):
    with FrontServer(*flags(model), env={"FRONT_SERVER_DEAF": "60"}) as server:
        assert server.stop(40) == 0
        assert "are killed" in server.log()


def test_second_signal_stops_now(model):
    with FrontServer(*flags(model)) as server:
        stream = Stream(server, 400)
        server.signal(signal.SIGTERM)
        time.sleep(0.5)
        begin = time.monotonic()
        server.signal(signal.SIGTERM)
        assert server.wait_exit(20) == 128 + signal.SIGTERM
        assert time.monotonic() - begin < 8
        stream.join()
        assert "stopped" in stream.lines[-2]


@pytest.mark.parametrize(("word", "name"), [("planner", "planner was killed by SIGKILL"), ("executor", "executor rank 0 was killed by SIGKILL")])
def test_death_of_a_child(model, temporary, word, name):
    with FrontServer(*flags(model), env={"TMPDIR": str(temporary)}) as server:
        stream = Stream(server, 400)
        begin = time.monotonic()
        server.processes(f"--child {word}")[0].send_signal(signal.SIGKILL)
        stream.join(5)
        error = json.loads(stream.lines[-2][6:])["error"]
        assert name in error["message"] and error["code"] == 503 and stream.lines[-1] == "data: [DONE]"
        assert server.wait_exit(20) == 1
        assert time.monotonic() - begin < 10
        assert name in server.log()
    assert not list(temporary.iterdir()), "the work folder is left"


def test_last_words_of_the_planner(model):
    with FrontServer(*flags(model)) as server:
        response = server.post("/generate", {"input_ids": [7002 % 1000]})  # an ordinary token
        assert response.status_code == 200
    with FrontServer(*flags(write_vocab(model, 8000))) as server:
        response = server.post("/generate", {"input_ids": [7002]})
        assert response.status_code == 503 and "a made-up reason" in response.text
        assert server.wait_exit(20) == 1
        assert "a made-up reason" in server.log()


def write_vocab(model, vocab_size):
    (model / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab_size}))
    return model


def test_a_silent_planner(model):
    with FrontServer(*flags(model, "--health-timeout-s", "1", "--watchdog-timeout-s", "4")) as server:
        stream = Stream(server, 400)
        server.processes("--child planner")[0].send_signal(signal.SIGSTOP)
        time.sleep(2)
        assert server.health() == 503
        assert server.poll() is None
        stream.join(10)
        assert "no sign of life" in stream.lines[-2]
        assert server.wait_exit(20) == 1


def test_a_child_that_dies_at_start(model):
    server = FrontServer(*flags(model), env={"FRONT_SERVER_EXIT": "3", "FRONT_SERVER_SLOW": "60"})
    server.start()
    try:
        assert server.wait_exit(20) == 1
        assert "executor rank 0 ended with exit code 3" in server.log()
        assert READY not in server.log()
    finally:
        server.kill()


def test_signal_while_starting(model):
    server = FrontServer(*flags(model), env={"FRONT_SERVER_SLOW": "60"})
    server.start()
    try:
        while "Started server process" not in server.log():
            assert server.poll() is None
            time.sleep(0.02)
        assert server.health() == 503
        server.signal(signal.SIGTERM)
        assert server.wait_exit(20) == 0
        assert READY not in server.log()
    finally:
        server.kill()


def test_a_missing_tokenizer_is_named(model):
    server = FrontServer("--model-path", str(model))
    server.start()
    try:
        assert server.wait_exit(60) == 1
        assert f"no tokenizer in {model}" in server.log() and "--skip-tokenizer-init" in server.log()
    finally:
        server.kill()


@pytest.mark.parametrize(("arguments", "word"), [
    (["--model-path", "/no/such/folder"], "/no/such/folder"),
    (["--port", "99999"], "--port"),
    (["--cp-size", "2"], "--enable-cp-shared-kv"),
    (["--no-such-flag"], "--no-such-flag"),
])
def test_refused_command_lines(arguments, word):
    command = [sys.executable, "-m", "sglane.launch_server", *(["--port", "0"] if "--port" not in arguments else []), *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(PYTHON_ROOT)}, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert word in done.stderr


def test_a_busy_port_is_named_at_once(model):
    listener = bind_http("127.0.0.1", 0)
    port = listener.getsockname()[1]
    command = [sys.executable, "-m", "sglane.launch_server", "--port", str(port), *flags(model)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(PYTHON_ROOT)}, capture_output=True, text=True, timeout=60)
    listener.close()
    assert done.returncode == 1
    assert str(port) in done.stderr and "in use" in done.stderr


def test_killing_a_family_takes_grandchildren():
    sleeper = "import time; time.sleep(60)"
    code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {sleeper!r}]); print('up', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    grandchildren = psutil.Process(process.pid).children()
    family = Family([Child("parent", process)])
    assert family.epitaphs() == [] and not family.all_ended()
    family.kill()
    assert family.epitaphs() == ["parent was killed by SIGKILL"] and family.all_ended()
    assert grandchildren and not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in grandchildren)
    process.stdout.close()


def test_work_folder(monkeypatch, tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = WorkFolder()
    endpoints = folder.endpoints(2)
    addresses = [endpoints.to_planner, endpoints.to_front, endpoints.from_executors, *endpoints.to_executors]
    assert len(set(addresses)) == 5
    assert all(len(address.removeprefix("ipc://")) <= 107 for address in addresses), "a unix socket's path is limited"
    folder.remove()
    assert not Path(endpoints.rendezvous.removeprefix("file://")).parent.exists()


def test_a_folder_that_a_killed_launcher_left_is_removed(monkeypatch, temporary):
    """Not that of a living one, nor anything else."""
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    alive = WorkFolder()
    others = temporary / "sglane-logs"
    others.mkdir()
    program = "import os, signal; from sglane.entrypoints.processes import WorkFolder; f = WorkFolder(); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(PYTHON_ROOT)}, timeout=60)
    assert len(list(temporary.iterdir())) == 3
    WorkFolder().remove()
    assert len(list(temporary.iterdir())) == 2 and others.exists()
    alive.remove()
    assert list(temporary.iterdir()) == [others]


def test_children_that_somebody_stopped_are_named():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    family = Family([Child("it", process)])
    assert family.stopped() == [] and not family.any_killed()
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while family.stopped() != ["it is stopped"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    family.kill()
    assert family.any_killed() and family.failures() == ["it was killed by SIGKILL"]
