"""The children of a launcher: planner and executor ranks. Started, watched, and killed here; nothing of them outlives the launcher."""
import fcntl
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from sglane.plan.io_struct import Endpoints
from sglane.server_args import ProcessSpec, ServerArgs
from sglane.utils.addresses import HostPort

logger = logging.getLogger(__name__)

#: A unix socket's path holds 107 bytes; the longest file name below is shorter than the rest.
MAX_FOLDER_CHARACTERS = 80
BACKLOG = 2048
#: Name of the lock in a work folder.
LOCK = "lock"
#: Seconds after which a process that was killed but does not end is given up: it hangs in the kernel.
KILL_S = 10.0


@dataclass(frozen=True)
class Child:
    """One process with the name that messages use."""

    name: str
    process: subprocess.Popen[bytes]

    def epitaph(self) -> str | None:
        """How it ended, None while it lives: `executor rank 1 was killed by SIGKILL`."""
        code = self.process.poll()
        if code is None:
            return None
        if code >= 0:
            return f"{self.name} ended with exit code {code}"
        return f"{self.name} was killed by {signal.Signals(-code).name}"


class Family:
    """All children of one launcher."""

    def __init__(self, children: Sequence[Child]):
        self._children = children

    @classmethod
    def start(cls, args: ServerArgs, endpoints: Endpoints) -> Self:
        """The node's executors, which take longest, then on node 0 the planner.

        Call from the main thread: children die with the thread that started them.
        """
        children: list[Child] = []
        for rank in args.ranks_of_node():
            spec = ProcessSpec(server_args=args, endpoints=endpoints, rank=rank)
            children.append(Child(f"executor rank {rank}", spawn("sglane.model_executor", spec)))
        if args.node_rank == 0:
            children.append(Child("planner", spawn("sglane.managers", ProcessSpec(server_args=args, endpoints=endpoints))))
        return cls(children)

    def epitaphs(self) -> list[str]:
        """Of all children that have ended."""
        return [text for child in self._children if (text := child.epitaph()) is not None]

    def failures(self) -> list[str]:
        """Epitaphs of those that ended with another exit code than 0."""
        return [text for child in self._children if (text := child.epitaph()) is not None and child.process.returncode != 0]

    def any_killed(self) -> bool:
        """Some child was ended by a signal, not by itself."""
        return any(child.epitaph() is not None and child.process.returncode < 0 for child in self._children)

    def stopped(self) -> list[str]:
        """Names of children that somebody has stopped (SIGSTOP) and that can therefore not go on."""
        found = []
        for child in self._children:
            try:
                if psutil.Process(child.process.pid).status() == psutil.STATUS_STOPPED:
                    found.append(f"{child.name} is stopped")
            except psutil.NoSuchProcess:
                continue
        return found

    def all_ended(self) -> bool:
        return len(self.epitaphs()) == len(self._children)

    def kill(self) -> None:
        """SIGKILL to every child and everything they started, then wait for them."""
        family: list[psutil.Process] = []
        for child in self._children:
            try:
                process = psutil.Process(child.process.pid)
                family += [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for child in self._children:
            try:
                child.process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                logger.error("%s (pid %d) was killed but does not end", child.name, child.process.pid)
        psutil.wait_procs(family, timeout=5.0)


#: Polls of a waiting OpenMP thread before it sleeps, about 0.1 ms: products follow each other closer than that, and an idle server spins no longer.
SPIN_COUNT = "10000"


def spawn(module: str, spec: ProcessSpec) -> subprocess.Popen[bytes]:
    """`python -m module` in a session of its own, so that Ctrl-C in a terminal does not reach it; the spec on its standard input. It ends with us."""
    environment = {"GOMP_SPINCOUNT": SPIN_COUNT, **os.environ, "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "sglane.utils.parent", str(os.getpid()), module]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    assert process.stdin is not None
    try:
        process.stdin.write(spec.to_json())
        process.stdin.close()
    except BrokenPipeError:
        logger.error("%s ended before it could be told what to do", module)
    return process


class WorkFolder:
    """Temporary folder with the sockets' files and the rendezvous file of one launcher.

    A launcher that was killed leaves its folder; the next one removes it. A lock that dies with its process says whose is left.
    """

    def __init__(self) -> None:
        default = tempfile.gettempdir()
        parent = Path(default if len(default) <= MAX_FOLDER_CHARACTERS - len("/sglane-12345678") else "/tmp")
        for lock in parent.glob(f"sglane-*/{LOCK}"):
            _remove_if_left(lock)
        self._path = Path(tempfile.mkdtemp(prefix="sglane-", dir=parent))
        self._lock = (self._path / "lock.new").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self._path / "lock.new").rename(self._path / LOCK)  # nobody sees it before it is locked

    def endpoints(self, num_ranks: int) -> Endpoints:
        def address(name: str) -> str:
            return f"ipc://{self._path / name}"

        return Endpoints(
            to_planner=address("planner"),
            to_front=address("front"),
            to_executors=[address(f"rank{rank}") for rank in range(num_ranks)],
            from_executors=address("results"),
            rendezvous=f"file://{self._path / 'rendezvous'}",
            vocabulary=str(self._path / "vocabulary"),
        )

    def remove(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)
        self._lock.close()


def _remove_if_left(lock: Path) -> None:
    """Remove the lock's folder if the process that made it is gone."""
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    except OSError:  # locked, another user's, or just removed
        return
    logger.info("removed %s, which a killed server had left", lock.parent)


def bind_http(host: str, port: int) -> socket.socket:
    """The public socket, bound and listening. Raises OSError at once when the port is taken."""
    return HostPort(host, port).listen(BACKLOG)
