"""Servers of several nodes: one launcher a node, all on this machine, on different addresses or in different network namespaces.

    with Nodes(tiny("llama"), cp_size=2) as nodes:
        nodes.head.generate([3, 4, 5], max_new_tokens=8)
        nodes.workers[0].signal(signal.SIGTERM)
"""
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from kits.server import Server, ServerFailed

#: Address of node 0. Connections to it come from 127.0.0.1, so that is the address of the others.
HEAD_HOST = "127.0.0.2"
NUM_PORTS = 3


def free_ports(host: str = HEAD_HOST) -> int:
    """First of NUM_PORTS consecutive ports that nobody listens on right now."""
    while True:
        with socket.socket() as probe:
            probe.bind((host, 0))
            first = int(probe.getsockname()[1])
        try:
            for offset in range(NUM_PORTS):
                with socket.socket() as probe:
                    probe.bind((host, first + offset))
        except (OSError, OverflowError):
            continue
        return first


class Node(Server):
    """One launcher. prefix: words in front of its command; a node with rank > 0 has no HTTP server."""

    def __init__(self, *flags: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()):
        super().__init__(*flags, env=env)
        self._prefix = list(prefix)

    def _command(self) -> list[str]:
        return [*self._prefix, *super()._command()]


class Nodes:
    """`head` is node 0. All processes have the same working directory, by which orphans are found: it stays whatever they do."""

    def __init__(self, model: Path, cp_size: int, *flags: str, num_nodes: int = 2, env: Mapping[str, str] | None = None, host: str = HEAD_HOST,
                 prefixes: Sequence[Sequence[str]] = ((), ())):
        self._folder = tempfile.TemporaryDirectory(prefix="nodes-")
        self.address = f"{host}:{free_ports()}"
        self._flags = ("--model-path", str(model), "--skip-tokenizer-init", "--dtype", "float32", "--page-size", "16", "--max-total-tokens", "8192",
                       "--chunked-prefill-size", "64", "--cp-size", str(cp_size), *(["--enable-cp-shared-kv"] if cp_size > 1 else []),
                       *(["--nnodes", str(num_nodes), "--dist-init-addr", self.address] if num_nodes > 1 else []), *flags)
        self._env = {**(env or {}), "SGLANE_NUM_THREADS": "1"}
        self._all: list[Node] = []
        self.head = self.node(0, prefix=prefixes[0])
        self.workers = [self.node(rank, prefix=prefixes[rank]) for rank in range(1, num_nodes)]

    def node(self, rank: int, *flags: str, prefix: Sequence[str] = ()) -> Node:
        """A launcher of this server, not started."""
        rank_flags = ("--node-rank", str(rank)) if rank else ()
        self._all.append(Node(*self._flags, *rank_flags, *flags, env=self._env, prefix=[*prefix, "env", "-C", self._folder.name]))
        return self._all[-1]

    def start(self) -> None:
        for node in (self.head, *self.workers):
            node.start()

    def __enter__(self) -> Self:
        try:
            self.start()
            self.head.wait_ready()
            num_processes = len(self.executor_pids()) + 2 + len(self.workers)  # planner and launchers
            assert len(self.living()) >= num_processes, "orphans would not be found"
        except BaseException:
            self._show()
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if kind is None and self.head.poll() is None:
                self.head.stop()
                for worker in self.workers:
                    worker.wait_exit(20)
        finally:
            if kind is not None:
                self._show()
            self.close()

    def _show(self) -> None:
        for node in self._all:
            print(node.log_tail(), file=sys.stderr)

    def close(self) -> None:
        """End everything, without ceremony."""
        for node in self._all:
            if node.started():
                node.kill()
        for process in self.living():
            process.kill()
        self._folder.cleanup()

    def living(self) -> list[psutil.Process]:
        """Processes of this server on this machine."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == os.path.realpath(self._folder.name) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def assert_no_orphans(self, timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.living():
            if time.monotonic() > deadline:
                raise ServerFailed(f"left: {[(process.pid, process.cmdline()) for process in self.living()]}")
            time.sleep(0.05)

    def executor(self, rank: int) -> psutil.Process:
        """The process of a rank, on whatever node."""
        (found,) = [process for process in self.living() if f"sglane::executor_CP{rank}" in " ".join(process.cmdline())]
        return found

    def executor_pids(self) -> list[int]:
        """Processes of all ranks, by their launchers."""
        return [process.pid for node in (self.head, *self.workers) for process in node.processes("sglane::executor")]

    def planner(self) -> psutil.Process:
        (found,) = self.head.processes("sglane::planner")
        return found


class Caller(threading.Thread):
    """A client in a thread: what it got (status 0: the connection broke) and after how many seconds."""

    def __init__(self, server: Server, num_prompt_tokens: int, max_new_tokens: int):
        super().__init__()
        prompt = [3 + i % 500 for i in range(num_prompt_tokens)]
        self._body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": max_new_tokens, "ignore_eos": True, "temperature": 0}}
        self._url = server.url
        self.status = -1
        self.text = ""
        self.start()

    def run(self) -> None:
        try:
            response = httpx.post(self._url + "/generate", json=self._body, timeout=120, trust_env=False)
            self.status, self.text = response.status_code, response.text
        except httpx.TransportError as error:
            self.status, self.text = 0, repr(error)

    def wait(self, timeout_s: float) -> None:
        self.join(timeout_s)
        if self.is_alive():
            raise AssertionError(f"a client still waits after {timeout_s:.0f} s")


def ask_inside(prefix: Sequence[str], url: str, body: Any) -> Any:
    """POST JSON from within a network namespace."""
    program = "import json, sys, urllib.request as r; print(r.urlopen(r.Request(sys.argv[1], sys.argv[2].encode(), " \
        "{'content-type': 'application/json'}), timeout=60).read().decode())"
    done = subprocess.run([*prefix, sys.executable, "-c", program, url, json.dumps(body)], capture_output=True, text=True, timeout=90,
                          env={**os.environ, "no_proxy": "*"})
    if done.returncode:
        raise ServerFailed(done.stderr)
    return json.loads(done.stdout)
