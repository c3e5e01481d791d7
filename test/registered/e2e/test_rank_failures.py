"""Processes that are killed or stop, on one node and on two: nobody waits longer than the watchdog, nothing is left.

A server that works slowly, so that a fault hits it where the test wants it; watchdog of a few seconds.
"""
import itertools
import signal
import time

import httpx
import pytest

from kits.checkpoints import tiny
from kits.nodes import Caller, Nodes

WATCHDOG_S = 4
#: Beyond the watchdog: for looking around, telling clients, and a busy machine.
GRACE_S = 8
#: Slows every step of rank 0.
HOLD = '{"rank": 0, "point": "forward", "sleep_ms": 60}'
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


def start(num_nodes, cp_size):
    return Nodes(tiny("llama"), cp_size, "--watchdog-timeout", str(WATCHDOG_S), num_nodes=num_nodes, env={"SGLANE_HOLD": HOLD})


def callers(nodes, phase):
    """Clients whose requests are in `phase` when this returns."""
    if phase == "idle":
        return []
    shape = (3000, 4) if phase == "prefill" else (20, 3000)  # 3000 prompt tokens are 47 steps
    found = [Caller(nodes.head, *shape) for _ in range(2)]
    time.sleep(1.2)
    assert all(caller.is_alive() for caller in found), f"answered before the fault: {[caller.text for caller in found]}"
    return found


def assert_ended(nodes, clients, began_s):
    """Clear errors in time; /health and exit codes say it; nothing is left."""
    for client in clients:
        client.wait(began_s + WATCHDOG_S + GRACE_S - time.monotonic())
    assert all(client.status == 503 and "failed" in client.text for client in clients), [(client.status, client.text) for client in clients]
    while nodes.head.health() == 200:
        assert not clients and time.monotonic() < began_s + WATCHDOG_S + GRACE_S, "/health is still 200"
        time.sleep(0.05)
    assert nodes.head.wait_exit(GRACE_S) == 1
    for worker in nodes.workers:
        if worker.poll() is None:
            worker.wait_exit(GRACE_S)
        assert worker.poll() != 0, worker.log_tail()
    nodes.assert_no_orphans(GRACE_S)


CASES = [(num_nodes, cp_size, number, phase) for num_nodes, cp_size in ((1, 2), (1, 4), (2, 2), (2, 4))
         for number, phase in itertools.product((KILL, STOP), ("prefill", "decode", "idle"))]
QUICK = {(1, 2, STOP, "prefill"), (2, 2, KILL, "decode"), (2, 2, STOP, "idle")}


@pytest.mark.parametrize(("num_nodes", "cp_size", "number", "phase"),
                         [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES])
def test_a_rank(num_nodes, cp_size, number, phase):
    """The last rank: with two nodes one of node 1."""
    with start(num_nodes, cp_size) as nodes:
        clients = callers(nodes, phase)
        began_s = time.monotonic()
        nodes.executor(cp_size - 1).send_signal(number)
        if phase == "idle" and number == STOP:
            time.sleep(1)
            assert nodes.head.health() == 200, "nothing is wrong before there is work"
            began_s = time.monotonic()
            clients = [Caller(nodes.head, 20, 4)]
        assert_ended(nodes, clients, began_s)
        log = nodes.head.log()
        assert (f"executor rank {cp_size - 1} was killed by SIGKILL" if number == KILL else "made no progress") in log, nodes.head.log_tail()
        if num_nodes == 1 and number == STOP:
            assert f"executor rank {cp_size - 1} is stopped" in log
        if num_nodes == 2:
            assert nodes.workers[0].poll() == (1 if number == KILL else 3)


@pytest.mark.parametrize(("number", "phase"), [
    (KILL, "decode"), pytest.param(STOP, "decode", marks=pytest.mark.slow), pytest.param(KILL, "idle", marks=pytest.mark.slow),
    pytest.param(STOP, "idle", marks=pytest.mark.slow),
])
def test_the_planner_of_two_nodes(number, phase):
    with start(2, 2) as nodes:
        clients = callers(nodes, phase)
        began_s = time.monotonic()
        nodes.planner().send_signal(number)
        assert_ended(nodes, clients, began_s)
        assert ("planner was killed by SIGKILL" if number == KILL else "the planner gave no sign of life") in nodes.head.log()
        assert nodes.workers[0].poll() == 3


@pytest.mark.parametrize(("number", "phase"), [
    (STOP, "decode"), (KILL, "idle"), pytest.param(KILL, "decode", marks=pytest.mark.slow), pytest.param(STOP, "idle", marks=pytest.mark.slow),
])
def test_the_launcher_of_a_worker_node(number, phase):
    """Stopped, it cannot kill its ranks: they notice by themselves that node 0 is gone."""
    with start(2, 2) as nodes:
        clients = callers(nodes, phase)
        began_s = time.monotonic()
        nodes.workers[0].signal(number)
        for client in clients:
            client.wait(WATCHDOG_S + GRACE_S)
        assert all(client.status == 503 for client in clients), [(client.status, client.text) for client in clients]
        assert nodes.head.wait_exit(GRACE_S + WATCHDOG_S) == 1
        assert time.monotonic() - began_s < WATCHDOG_S + 2 * GRACE_S
        assert ("node 1 (127.0.0.1) is lost" if number == KILL else "node 1 (127.0.0.1) gave no sign of life") in nodes.head.log()
        if number == STOP:
            deadline_s = time.monotonic() + GRACE_S
            while [process.pid for process in nodes.living()] != [nodes.workers[0].pid]:
                assert time.monotonic() < deadline_s, f"ranks of a stopped launcher are left: {nodes.living()}"
                time.sleep(0.05)
            nodes.workers[0].signal(signal.SIGCONT)
            assert nodes.workers[0].wait_exit(GRACE_S) == 3
        nodes.assert_no_orphans()


def test_the_launcher_of_node_0():
    """Its clients lose their connection; everything of the server ends, on both nodes."""
    with start(2, 2) as nodes:
        clients = callers(nodes, "decode")
        nodes.head.signal(KILL)
        for client in clients:
            client.wait(GRACE_S)
        assert all(client.status == 0 for client in clients)
        assert nodes.workers[0].wait_exit(GRACE_S) == 3
        assert "node 0 is lost" in nodes.workers[0].log()
        nodes.assert_no_orphans()


@pytest.mark.slow
def test_a_second_signal_to_a_worker_ends_the_server_now():
    with start(2, 2) as nodes:
        clients = callers(nodes, "decode")
        nodes.workers[0].signal(signal.SIGINT)
        nodes.head.wait_log("draining")
        assert httpx.post(nodes.head.url + "/generate", json={"input_ids": [5]}, trust_env=False).status_code == 503
        nodes.workers[0].signal(signal.SIGINT)
        for client in clients:
            client.wait(GRACE_S)
        assert nodes.workers[0].wait_exit(GRACE_S) == 128 + signal.SIGINT
        assert nodes.head.wait_exit(GRACE_S) == 1
        assert "its launcher received SIGINT twice" in nodes.head.log()
        nodes.assert_no_orphans()


@pytest.mark.slow
def test_the_launcher_of_node_0_stops():
    """Nobody can answer its clients, but the other node does not stay; when it goes on, it ends."""
    with start(2, 2) as nodes:
        clients = callers(nodes, "decode")
        nodes.head.signal(STOP)
        assert nodes.workers[0].wait_exit(WATCHDOG_S + GRACE_S) == 3
        assert "node 0 gave no sign of life" in nodes.workers[0].log()
        nodes.head.signal(signal.SIGCONT)
        for client in clients:
            client.wait(GRACE_S)
        assert all(client.status == 503 for client in clients), [(client.status, client.text) for client in clients]
        assert nodes.head.wait_exit(GRACE_S) == 1
        nodes.assert_no_orphans()
