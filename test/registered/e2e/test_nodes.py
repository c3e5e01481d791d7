"""Servers of two nodes: several launchers on different addresses of this machine, or in network namespaces of their own."""
import functools
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kits.audit import assert_clean, wait_idle
from kits.checkpoints import tiny
from kits.nodes import Nodes, ask_inside
from kits.server import Server
from kits.text_checkpoint import with_text

PROMPTS = [[42], list(range(100, 109)), list(range(200, 217)), [3 + (7 * i) % 500 for i in range(301)], [3 + (7 * i) % 500 for i in range(150)]]
SAMPLING = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


def answers(server: Server) -> list[list[int]]:
    batch = server.ask("/generate", {"input_ids": PROMPTS, "sampling_params": SAMPLING})
    single = [server.generate(prompt, **SAMPLING)["output_ids"] for prompt in PROMPTS]
    assert [answer["output_ids"] for answer in batch] == single, "a batch answers differently"
    return single


@functools.cache
def answers_of_one_rank(family: str) -> list[list[int]]:
    with Nodes(tiny(family), 1, num_nodes=1) as one:
        return answers(one.head)


def test_two_nodes_answer_as_one_rank():
    """The worker starts first; a second one with its rank is refused; Ctrl-C at the worker lets a running stream finish on both."""
    expected = answers_of_one_rank("llama")
    nodes = Nodes(tiny("llama"), 2, env={"SGLANE_POISON": "1"})
    nodes.workers[0].start()
    nodes.workers[0].wait_log("waiting for node 0")
    nodes.start = nodes.head.start
    with nodes:
        assert answers(nodes.head) == expected
        ledger = wait_idle(nodes.head)
        assert_clean(ledger)
        assert min(ledger["device"]["cached"]) > 0, f"a lane owns nothing: {ledger}"
        assert not nodes.head.processes("executor_CP1") and not nodes.workers[0].processes("executor_CP0")

        rival = nodes.node(1)
        rival.start()
        assert rival.wait_exit(30) == 1
        assert "--node-rank 1 is taken by node 1" in rival.log() and "--node-rank 1 is taken by node 1" in nodes.head.log()
        assert answers(nodes.head) == expected

        body = {"input_ids": [5, 6, 7], "sampling_params": {**SAMPLING, "max_new_tokens": 400}}
        events = nodes.head.stream("/generate", body)
        next(events)
        nodes.workers[0].signal(signal.SIGINT)
        assert list(events)[-1]["meta_info"]["completion_tokens"] == 400
        assert nodes.head.wait_exit(30) == 0 and nodes.workers[0].wait_exit(30) == 0
        assert "node 1 (127.0.0.1) received SIGINT" in nodes.head.log() and "node 0 has ended the server" in nodes.workers[0].log()
        nodes.assert_no_orphans()


@pytest.mark.parametrize("family", ["llama", pytest.param("glm_moe_dsa", marks=pytest.mark.slow)])
def test_four_ranks_on_two_nodes(family):
    """Addresses are IPv6 literals."""
    expected = answers_of_one_rank(family)
    with Nodes(tiny(family), 4, host="[::1]") as nodes:
        assert "node 1 (::1) has joined" in nodes.head.log()
        assert answers(nodes.head) == expected
        assert_clean(wait_idle(nodes.head))
        assert len(nodes.head.processes("sglane::executor")) == len(nodes.workers[0].processes("sglane::executor")) == 2
        nodes.head.signal(signal.SIGTERM)
        assert nodes.head.wait_exit(30) == 0 and nodes.workers[0].wait_exit(30) == 0
        nodes.assert_no_orphans()


def test_a_node_that_differs_is_refused_and_then_missed():
    nodes = Nodes(tiny("llama"), 2, "--dist-timeout", "6")
    stranger = nodes.node(1, "--page-size", "32", "--schedule-policy", "lpm")
    nodes.head.start()
    stranger.start()
    try:
        assert stranger.wait_exit(30) == 1
        told = "--page-size is 16 on node 0 and 32 on node 1; --schedule-policy is fcfs on node 0 and lpm on node 1"
        assert told in stranger.log() and told in nodes.head.log()
        assert nodes.head.wait_exit(30) == 1
        assert f"node rank 1 did not join within 6 s (--dist-timeout); node 1 was refused: {told}" in nodes.head.log()
        nodes.assert_no_orphans()
    finally:
        nodes.close()


def test_a_worker_without_node_0_gives_up():
    nodes = Nodes(tiny("llama"), 2, "--dist-timeout", "1")
    worker = nodes.workers[0]
    worker.start()
    try:
        assert worker.wait_exit(30) == 3
        assert "node 0 does not answer at 127.0.0.2:" in worker.log() and "within 1 s (--dist-timeout)" in worker.log()
    finally:
        nodes.close()


# --- network namespaces -------------------------------------------------------------------------------------------------


@pytest.fixture
def namespaces():
    """Two network namespaces joined by a pair of interfaces: (words in front of a command, address) of each."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` command")
    mark = f"{time.monotonic_ns() % 10**8:08d}"
    names = [f"sgl{mark}a", f"sgl{mark}b"]
    addresses = ["192.0.2.1", "192.0.2.2"]
    try:
        for name in names:
            refused = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if refused.returncode:
                pytest.skip(f"network namespaces are not permitted: {refused.stderr.strip()}")
        refused = subprocess.run(["ip", "-n", names[0], "link", "add", "v0", "type", "veth", "peer", "name", "v1", "netns", names[1]],
                                 capture_output=True, text=True)
        if refused.returncode:
            pytest.skip(f"interface pairs are not permitted: {refused.stderr.strip()}")
        for i, name in enumerate(names):
            subprocess.run(["ip", "-n", name, "address", "add", f"{addresses[i]}/24", "dev", f"v{i}"], check=True)
            for device in ("lo", f"v{i}"):
                subprocess.run(["ip", "-n", name, "link", "set", device, "up"], check=True)
        yield [(["ip", "netns", "exec", name], address) for name, address in zip(names, addresses)]
    finally:
        for name in names:
            if Path("/run/netns", name).exists():
                subprocess.run(["ip", "netns", "delete", name], check=True)


def test_two_network_namespaces(namespaces):
    """Nothing is shared but the wire. When that is cut nobody says goodbye, and both ends notice by themselves."""
    expected = answers_of_one_rank("llama")
    (inside, address), (inside_too, _) = namespaces
    nodes = Nodes(tiny("llama"), 2, "--watchdog-timeout", "5", host=address, prefixes=[inside, inside_too])
    nodes.start()
    try:
        nodes.head.wait_log("ready to roll", 90)
        found = ask_inside(inside, f"http://127.0.0.1:{nodes.head.port}/generate", {"input_ids": PROMPTS, "sampling_params": SAMPLING})
        assert [answer["output_ids"] for answer in found] == expected
        assert "node 1 (192.0.2.2) has joined" in nodes.head.log()
        subprocess.run([*inside, "ip", "link", "set", "v0", "down"], check=True)
        assert nodes.head.wait_exit(40) == 1 and nodes.workers[0].wait_exit(40) == 3
        assert "node 1 (192.0.2.2) gave no sign of life" in nodes.head.log() and "node 0 gave no sign of life" in nodes.workers[0].log()
        nodes.assert_no_orphans()
    finally:
        nodes.close()


# --- start and structured output ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_structured_output_on_two_nodes(tmp_path):
    """Ranks of node 1 have no tokenizer: they get the tokens' bytes from node 0. A batch, so that both ranks sample."""
    nodes = Nodes(with_text("llama", tmp_path), 2, "--no-skip-tokenizer-init")
    with nodes:
        sampling = {"temperature": 1.0, "max_new_tokens": 60, "regex": "(yes|no)-[0-9]{4}"}
        batch = nodes.head.ask("/generate", {"text": ["x" * n for n in (3, 40, 80, 120)], "sampling_params": sampling})
        assert all(re.fullmatch("(yes|no)-[0-9]{4}", answer["text"]) for answer in batch), [answer["text"] for answer in batch]
        assert_clean(wait_idle(nodes.head))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank of node 1", "launcher of node 1", "rank of node 0"])
def test_a_death_while_starting(victim):
    nodes = Nodes(tiny("llama"), 2)
    nodes.start()
    try:
        nodes.head.wait_log("has joined")
        nodes.workers[0].wait_log("ranks [1] start")
        if victim == "launcher of node 1":
            nodes.workers[0].signal(signal.SIGKILL)
        else:
            node = nodes.head if victim == "rank of node 0" else nodes.workers[0]
            while not (ranks := node.processes("model_executor")):
                time.sleep(0.01)
            ranks[0].send_signal(signal.SIGKILL)
        assert nodes.head.wait_exit(20) == 1
        told = {"rank of node 1": "node 1 (127.0.0.1): executor rank 1 was killed by SIGKILL", "launcher of node 1": "node 1 (127.0.0.1) is lost",
                "rank of node 0": "executor rank 0 was killed by SIGKILL"}
        assert told[victim] in nodes.head.log()
        assert nodes.workers[0].wait_exit(20) == {"rank of node 1": 1, "launcher of node 1": -signal.SIGKILL, "rank of node 0": 3}[victim]
        nodes.assert_no_orphans()
    finally:
        nodes.close()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_while_starting(rank):
    nodes = Nodes(tiny("llama"), 2)
    nodes.start()
    try:
        nodes.workers[0].wait_log("ranks [1] start")
        (nodes.head, nodes.workers[0])[rank].signal(signal.SIGTERM)
        assert nodes.head.wait_exit(10) == 0 and nodes.workers[0].wait_exit(10) == 0
        nodes.assert_no_orphans()
    finally:
        nodes.close()
