"""A whole launcher in processes of its own, with stand-ins for its children: a FakePlanner and executors that do nothing.

    with FrontServer("--model-path", folder) as server: ...

`python -m kits.front_server FLAGS` is `python -m sglane.launch_server FLAGS` with the stand-ins. Environment:
FRONT_SERVER_EXIT=3: the executor ends with exit code 3 at once. FRONT_SERVER_SLOW=60: the planner takes 60 s to start.
FRONT_SERVER_DEAF=60: the executor takes 60 s to end. FRONT_SERVER_STEP=0.05: seconds of a step.
"""
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import zmq

from kits.fake_planner import Behaviour, FakePlanner
from kits.server import PYTHON_ROOT, Server
from sglane.entrypoints import processes
from sglane.entrypoints.launcher import serve
from sglane.plan.step_plan import Stop, ToExecutor
from sglane.server_args import ProcessSpec
from sglane.utils.ipc import Receiver, Sender

TEST_ROOT = Path(__file__).resolve().parents[1]
STAND_INS = {"sglane.managers": "planner", "sglane.model_executor": "executor"}


class FrontServer(Server):
    """A server under test whose engine is made up."""

    def start(self) -> None:
        environment = {**os.environ, **self._env, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join([str(PYTHON_ROOT), str(TEST_ROOT)])}
        command = [sys.executable, "-m", "kits.front_server", "--host", "127.0.0.1", "--port", str(self.port), *self._flags]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=self._log_file, stderr=subprocess.STDOUT,
                                         start_new_session=True)


def spawn_stand_in(module: str, spec: ProcessSpec) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "kits.front_server", "--child", STAND_INS[module]]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(spec.to_json())
    process.stdin.close()
    return process


def run_planner(spec: ProcessSpec) -> None:
    time.sleep(float(os.environ.get("FRONT_SERVER_SLOW", "0")))
    FakePlanner(spec.endpoints, Behaviour(step_s=float(os.environ.get("FRONT_SERVER_STEP", "0.05")))).run()
    context = zmq.Context()
    for address in spec.endpoints.to_executors:
        sender = Sender(context, address)
        sender.send(Stop())
        sender.close()
    context.term()


def run_executor(spec: ProcessSpec) -> None:
    if os.environ.get("FRONT_SERVER_EXIT"):
        sys.exit(int(os.environ["FRONT_SERVER_EXIT"]))
    receiver = Receiver(zmq.Context.instance(), spec.endpoints.to_executors[spec.rank], ToExecutor)
    receiver.recv()
    time.sleep(float(os.environ.get("FRONT_SERVER_DEAF", "0")))
    receiver.close()


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        spec = ProcessSpec.from_json(sys.stdin.buffer.read())
        (run_planner if sys.argv[2] == "planner" else run_executor)(spec)
        return 0
    processes.spawn = spawn_stand_in
    return serve()


if __name__ == "__main__":
    sys.exit(main())
