"""The catalog of `scripts/clients` is sound, and its verdicts are strict. The clients themselves are not run here."""
import subprocess
import sys
from pathlib import Path

import pytest

from clients.__main__ import Outcome, choose, main, run_client, table
from clients.bench import Bench, ClientFailed, check
from clients.catalog import CLIENTS
from clients.client import Client
from clients.environments import Environment, Packages
from clients.runs.canitoolcall import is_fair
from clients.runs.counted import count_of
from kits.structure.source import REPO

FAST = ("openai", "llm", "sglang-bench", "sglang-router", "canitoolcall")


@pytest.fixture
def bench(tmp_path):
    def another_url(context_length: int) -> str:
        return "http://127.0.0.1:2"

    return Bench("http://127.0.0.1:1", "m", tmp_path, Environment(tmp_path), tmp_path, another_url, has_own_server=True)


def test_every_client_is_pinned_and_named_once():
    assert len({client.name for client in CLIENTS}) == len(CLIENTS)
    for client in CLIENTS:
        pins = [package.split("==")[1] for package in (*client.packages.alone, *client.packages.pinned) if "==" in package]
        assert client.version in pins, client.name


def test_the_fast_ones_are_few_and_need_no_torch():
    fast = choose([], only_fast=True)
    assert tuple(client.name for client in fast) == FAST
    assert not any(client.packages.shares_torch for client in fast)


def test_the_list_shows_all_and_an_unknown_name_is_an_error(capsys):
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [client.name for client in CLIENTS]
    with pytest.raises(SystemExit):
        main(["no-such-client"])
    assert "no-such-client" in capsys.readouterr().err


def test_the_page_has_a_row_for_every_client():
    page = (REPO / "docs" / "advanced_features" / "clients.md").read_text()
    missing = [client.name for client in CLIENTS if f"| `{client.name}` | {client.version} |" not in page]
    assert not missing


def test_a_client_that_ends_with_an_error_fails(bench):
    assert bench.run(sys.executable, "-c", "print('fine')") == "fine\n"
    with pytest.raises(ClientFailed, match="exit code 3"):
        bench.run(sys.executable, "-c", "raise SystemExit(3)")
    with pytest.raises(ClientFailed, match="not done after"):
        bench.run(sys.executable, "-c", "import time; time.sleep(60)", timeout_s=0.5)
    with pytest.raises(ClientFailed, match="wrote no report"):
        bench.read_json("report.json")


def test_a_background_process_ends_with_its_block(bench):
    with bench.background(sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)") as log:
        while not log.read_text().endswith("\n"):
            pass
    assert not Path("/proc", log.read_text().strip()).exists()


def test_a_failure_is_an_outcome_and_shows_in_the_table(bench):
    def fails(bench: Bench) -> str:
        check(False, "two of three")
        return ""

    bad = run_client(Client("bad", "1", "", Packages(()), fails), lambda client: bench)
    good = run_client(Client("good", "2", "", Packages(()), lambda bench: "all"), lambda client: bench)
    assert (bad.passed, good.passed) == (False, True)
    assert "two of three" in bad.ran
    rows = [line.split() for line in table([bad, good]).splitlines()]
    assert rows[1][:3] == ["bad", "1", "FAIL"] and rows[2][:3] == ["good", "2", "pass"]
    assert isinstance(bad, Outcome)


def test_a_script_that_stops_early_fails():
    assert count_of("one\nall 7 checks passed\n") == 7
    with pytest.raises(ClientFailed):
        count_of("failed: usage adds up")


@pytest.mark.parametrize(("status", "check_name", "detail", "fair"), [
    ("pass", "scenario", None, True),
    ("fail", "scenario", "expected at least 1 tool call(s) ['get_weather'], got []", True),
    ("fail", "scenario", "expected at least 1 tool call(s) ['a'], got []; marker '<tool_call>' leaked into content", False),
    ("fail", "scenario", "call 0 (get_weather) arguments are not valid JSON: '{'", False),
    ("error", "scenario", "HTTP 500", False),
    ("fail", "stream_equals_nonstream", "content: non-stream True vs stream False", False),
    ("skip", "stream_equals_nonstream", "a request errored", False),
])
def test_only_the_models_own_decisions_are_excused(status, check_name, detail, fair):
    assert is_fair({"status": status, "check": check_name, "detail": detail}) is fair


def test_the_script_lists_without_a_server():
    ran = subprocess.run([sys.executable, "-m", "clients", "--list"], capture_output=True, text=True, timeout=60,
                         env={"PYTHONPATH": f"{REPO / 'python'}:{REPO / 'test'}", "PATH": ""})
    assert ran.returncode == 0 and "schemathesis" in ran.stdout, ran.stderr
