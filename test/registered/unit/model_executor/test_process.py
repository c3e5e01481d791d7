"""Rank processes as the launcher starts them: start-up protocol, plans over sockets, ends."""
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from safetensors.torch import load_file

from kits.checkpoints import tiny
from kits.plan_driver import PlanDriver, TicketBox, greedy
from sglane.plan.io_struct import Endpoints, StartProfile, StopProfile
from sglane.plan.step_plan import (
    ExecutorError,
    ExecutorReady,
    FromExecutor,
    PoolInit,
    PoolReady,
    ProfileDone,
    Progress,
    StepPlan,
    StepResult,
    Stop,
    TicketEnded,
)
from sglane.server_args import ProcessSpec, ServerArgs
from sglane.utils.ipc import Receiver, Sender

COMMAND = [sys.executable, "-m", "sglane.model_executor"]


class Ranks:
    """The planner's side of the sockets."""

    def __init__(self, folder: Path, size: int, path: Path, **flags: object):
        self.size = size
        self.box = TicketBox()
        self.endpoints = Endpoints(to_planner="unused", to_front="unused", to_executors=[f"ipc://{folder}/e{rank}" for rank in range(size)],
                                   from_executors=f"ipc://{folder}/p", rendezvous=f"file://{folder}/meet")
        self._args = ServerArgs(model_path=str(path), dtype="float32", cp_size=size, enable_cp_shared_kv=size > 1, max_total_tokens=6400, **flags)
        self._context = zmq.Context()
        self._receiver = Receiver(self._context, self.endpoints.from_executors, FromExecutor)
        self._senders = [Sender(self._context, address) for address in self.endpoints.to_executors]

    def spec(self, rank: int) -> bytes:
        return ProcessSpec(server_args=self._args, endpoints=self.endpoints, rank=rank).to_json()

    def send(self, message: object) -> None:
        for sender in self._senders:
            sender.send(message)

    def receive(self, kind: type, timeout_s: float = 120) -> object:
        while True:
            assert self._receiver.poll(int(timeout_s * 1000)), f"no {kind.__name__} within {timeout_s} s"
            message = self._receiver.recv()
            if isinstance(message, TicketEnded):
                self.box.send(message)
            elif not isinstance(message, Progress):
                assert isinstance(message, kind), message
                return message

    def run(self, plan: StepPlan) -> list[StepResult]:
        self.send(plan)
        return [self.receive(StepResult) for _ in range(self.size)]

    def start_up(self) -> list[ExecutorReady]:
        ready = [self.receive(ExecutorReady) for _ in range(self.size)]
        self.send(PoolInit(min(r.max_rows for r in ready), 8, 100, min(r.max_host_rows for r in ready)))
        assert sorted(self.receive(PoolReady).rank for _ in range(self.size)) == list(range(self.size))
        return ready

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        self._receiver.close()
        self._context.destroy(linger=0)


@contextmanager
def started(folder: Path, size: int, hold: str = "", family: str = "llama", **flags: object) -> Iterator[tuple[Ranks, list[subprocess.Popen]]]:
    ranks = Ranks(folder, size, tiny(family), **flags)
    environment = {**os.environ, "SGLANE_HOLD": hold, "SGLANE_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen(COMMAND, stdin=subprocess.PIPE, env=environment) for _ in range(size)]
    try:
        for rank, process in enumerate(processes):
            process.stdin.write(ranks.spec(rank))
            process.stdin.close()
        yield ranks, processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
        ranks.close()


@pytest.mark.parametrize(("family", "size"), [("llama", 1), ("llama", 2), ("glm_moe_dsa", 2)])
def test_start_up_plans_and_stop(tmp_path: Path, family: str, size: int) -> None:
    ref = load_file(tiny(family) / "ref.safetensors")
    with started(tmp_path, size, family=family, page_size=16) as (ranks, processes):
        ready = ranks.start_up()
        assert {r.rank for r in ready} == set(range(size))
        assert {(r.vocab_size, r.context_length, r.max_rows, r.device_name) for r in ready} == {(512, 4096, 400 // size + 1, "cpu")}
        elements = {"llama": 4 * 2 * 2 * 16, "glm_moe_dsa": 4 * (64 + 16) + 4 * 32}[family]  # of a token
        assert ready[0].weight_bytes > 0 and ready[0].num_bytes_per_page == elements * 16 * 4
        drive = PlanDriver(ranks.run, 16, size, 100)
        for slot, n in enumerate((65, 7, 200)):
            assert drive.generate(slot, ref[f"prompt.{n}"].tolist(), 12, 30) == ref[f"greedy.{n}"].tolist()
        ranks.send(Stop())
        assert [process.wait(30) for process in processes] == [0] * size


def test_a_gap_is_reported_and_ends_the_process(tmp_path: Path) -> None:
    with started(tmp_path, 1) as (ranks, (process,)):
        ranks.start_up()
        ranks.send(StepPlan(2))
        assert "plan 2 came after plan 0" in ranks.receive(ExecutorError).message
        assert process.wait(30) != 0


def test_an_injected_failure_is_reported(tmp_path: Path) -> None:
    with started(tmp_path, 1, hold='{"rank": 0, "point": "forward", "sleep_ms": -1}') as (ranks, (process,)):
        ranks.start_up()
        drive = PlanDriver(ranks.run, 64, 1, 100)
        drive.start(0, [3, 4, 5], greedy())
        with pytest.raises(AssertionError, match="fails at forward"):
            drive.prefill(0, 100)
        assert process.wait(30) != 0


TIER = {"enable_hierarchical_cache": True, "hicache_size": 0.01}


@pytest.mark.parametrize(("family", "size"), [("llama", 1), ("glm_moe_dsa_share", 2)])
def test_a_prefix_comes_back_from_the_host_tier(tmp_path: Path, family: str, size: int) -> None:
    ref = load_file(tiny(family) / "ref.safetensors")
    prompt, want = ref["prompt.200"].tolist(), ref["greedy.200"].tolist()[:4]
    slow = '{"rank": 0, "point": "load", "sleep_ms": 20}'
    with started(tmp_path, size, family=family, page_size=16, hold=slow, **TIER) as (ranks, processes):
        ready = ranks.start_up()
        assert {r.max_host_rows for r in ready} == {10**7 // ready[0].num_bytes_per_page}
        drive = PlanDriver(ranks.run, 16, size, 100, num_host_rows=100)
        drive.start(0, prompt, greedy())
        while drive.slots[0].fed < 200:
            drive.step({0: 60}, backup=True)
        while any(ranks.box.lanes(ticket) != lanes for ticket, lanes in drive.ticket_lanes.items()):
            drive.step({})  # it also receives
        host = [drive.copies[page] for page in drive.slots[0].pages[:12]]
        drive.release(0)
        drive.step({})
        ticket, pages = drive.load(host)
        drive.start(1, prompt, greedy(), pages, 192)
        drive.step({1: 100}, needs_load=ticket)
        while len(drive.slots[1].outputs) < 4:
            drive.step({}, [1])
        assert drive.slots[1].outputs == want
        assert ranks.box.lanes(ticket) == drive.lanes(pages)
        ranks.send(Stop())
        assert [process.wait(30) for process in processes] == [0] * size


def test_a_failed_copy_ends_an_idle_rank(tmp_path: Path) -> None:
    with started(tmp_path, 1, hold='{"rank": 0, "point": "ack", "sleep_ms": -1}', page_size=16, **TIER) as (ranks, (process,)):
        ranks.start_up()
        drive = PlanDriver(ranks.run, 16, 1, 100, num_host_rows=100)
        drive.start(0, list(range(3, 40)), greedy())
        drive.step({0: 100}, backup=True)
        assert "CopyFailed: host-backup: RuntimeError: fault injection" in ranks.receive(ExecutorError).message
        assert process.wait(30) != 0


def test_a_host_tier_larger_than_the_ram_is_reported_at_once(tmp_path: Path) -> None:
    with started(tmp_path, 1, enable_hierarchical_cache=True, hicache_size=1e6) as (ranks, (process,)):
        assert "--hicache-size 1e+06 needs 931322.57 GiB" in ranks.receive(ExecutorError).message
        assert process.wait(30) != 0


def test_the_start_does_not_wait_for_the_grammar_library() -> None:
    program = "import sys, sglane.model_executor.__main__; assert 'torch' in sys.modules and not {'xgrammar', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_steps_are_recorded(tmp_path: Path) -> None:
    prompt = list(range(3, 40))
    with started(tmp_path, 2, page_size=16, enable_layerwise_nvtx_marker=True) as (ranks, _processes):
        ranks.start_up()

        def ask(message: StartProfile | StopProfile) -> set[str]:
            ranks.send(message)
            return {ranks.receive(ProfileDone).error for _ in range(ranks.size)}

        def start(folder: Path, num_steps: int | None) -> set[str]:
            return ask(StartProfile(request_id=1, folder=str(folder), name="it", num_steps=num_steps, activities=["CPU", "GPU"], with_stack=False,
                                    record_shapes=False))

        drive = PlanDriver(ranks.run, 16, 2, 100)
        assert ask(StopProfile(2)) == {"no recording is under way"}
        (tmp_path / "a file").touch()
        assert all("output_dir" in error for error in start(tmp_path / "a file" / "x", None))
        assert start(tmp_path / "two", 2) == {""}
        assert all("under way" in error for error in start(tmp_path / "other", 2))
        drive.generate(0, prompt, 4, 100)
        assert ask(StopProfile(3)) == {"no recording is under way"}, "it ended with its second step"
        assert start(tmp_path / "all", None) == {""}
        drive.generate(1, prompt, 6, 100)
        assert ask(StopProfile(4)) == {""}
        counts = {}
        for name in ("two", "all"):
            files = sorted((tmp_path / name).iterdir())
            assert [file.name for file in files] == ["it-CP-0.trace.json.gz", "it-CP-1.trace.json.gz"]
            events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
            assert {"layer 0", "sample", "exchange"} <= {event.get("name") for event in events}
            counts[name] = sum(event.get("name") == "aten::embedding" for event in events)
        assert 0 < counts["two"] < counts["all"]


def test_a_missing_model_is_reported(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 1, tmp_path / "nothing")
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, stderr=subprocess.DEVNULL)
    process.communicate(ranks.spec(0), timeout=60)
    assert process.returncode != 0
    assert "nothing" in ranks.receive(ExecutorError).message
    ranks.close()


def test_no_orphan_survives_its_launcher(tmp_path: Path) -> None:
    """The launcher is killed without a chance to clean up."""
    ranks = Ranks(tmp_path, 1, tiny("llama"))
    (tmp_path / "spec").write_bytes(ranks.spec(0))
    launcher = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-m', 'sglane.model_executor'], "
         "stdin=open(sys.argv[1])); print(p.pid, flush=True); time.sleep(600)", str(tmp_path / "spec")],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    pid = int(launcher.stdout.readline())
    ranks.receive(ExecutorReady)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    deadline = time.monotonic() + 10
    while _alive(pid):
        assert time.monotonic() < deadline, "the executor outlived its launcher"
        time.sleep(0.05)
    ranks.close()


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
