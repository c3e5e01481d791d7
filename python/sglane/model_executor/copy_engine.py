"""Copies between a rank's device pool and its host pool, beside the forwards: one worker thread for loads, one for backups.

Nothing else makes threads or streams for copies. A job is a rank's part of a ticket. Loads bring layers in the order in which the model reads
them, and a reader of a layer waits until it is there; a backup of a step's new rows copies a layer when the step has computed it. A worker that
fails makes the rank fail: waiting readers, the next plan and `check` raise CopyFailed.
"""
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sglane.forward.layer_hooks import OPEN_GATE, Holds, LayerGate
from sglane.forward.worker_thread import use_one_compute_thread
from sglane.model_executor.copy_jobs import CopyJob, CopyLayout, own_rows
from sglane.model_executor.host_pool import HostPool
from sglane.model_executor.kv_pool import KVPool
from sglane.plan.step_plan import Backup, Load, StepPlan, TailCopy, TicketEnded

#: A moment of the compute stream or of a copy stream; opaque to everyone but the stream that gave it.
Mark = Any


class CopyFailed(RuntimeError):
    """A copy between device and host pool failed; the cause says of what."""


class TicketReporter(Protocol):
    """Where ends are told to; belongs to one thread."""

    def send(self, message: TicketEnded) -> None: ...

    def close(self) -> None: ...


class CopyStream(Protocol):
    """Copies of one worker thread, in the order in which they are given."""

    def begin(self) -> None:
        """First call of the worker thread."""
        ...

    def computed(self) -> Mark:
        """All that the calling thread has given to its device so far."""
        ...

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Mark) -> Mark:
        """Copy pairwise, when `after` has been reached. Returns the copies' end."""
        ...

    def join(self, mark: Mark) -> None:
        """What the calling thread computes from now on comes after `mark`."""
        ...

    def finish(self) -> None:
        """Return when all copies have ended."""
        ...


class HostStream:
    """CPU: `copy` returns when the copies have ended. It is one call, which runs without the interpreter's lock: a call for each page would have
    to wait for that lock, page by page, while another thread computes."""

    def begin(self) -> None:
        use_one_compute_thread()  # one core copies as fast as memory allows; the others are the model's

    def computed(self) -> Mark:
        return None

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Mark) -> Mark:
        torch._foreach_copy_(targets, sources)
        return None

    def join(self, mark: Mark) -> None:
        pass

    def finish(self) -> None:
        pass


class CudaStream:
    """GPU: a stream of its own; events keep a copy behind what it reads or overwrites, and computing behind the copy it needs. The host's side
    is pinned, so copies run while the thread goes on. (Written for GPUs, and not yet run on one.)"""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def begin(self) -> None:
        torch.cuda.set_device(self._device)

    def computed(self) -> Mark:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: Mark) -> Mark:
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def join(self, mark: Mark) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        self._stream.synchronize()


class Worker:
    """One thread with its stream: jobs first in, first out; the end of each is told at once. Context (for itself): keeps what it failed of."""

    def __init__(self, name: str, carry_out: Callable[[CopyJob], bool], rank: int, holds: Holds, open_reporter: Callable[[], TicketReporter],
                 device: torch.device):
        """carry_out: copies; False: it was given up because the worker is stopping. open_reporter: called in the thread."""
        self.stream: CopyStream = CudaStream(device) if device.type == "cuda" else HostStream()
        self.changed = threading.Condition()
        self.is_stopping = False
        self._carry_out = carry_out
        self._rank = rank
        self._holds = holds
        self._failure: BaseException | None = None
        self._queue: queue.SimpleQueue[CopyJob | None] = queue.SimpleQueue()
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(open_reporter,), name=name, daemon=True)
        self._thread.start()
        self._begun.wait()  # the worker sets its number of compute threads before the rank sets its own

    def submit(self, job: CopyJob) -> None:
        self._queue.put(job)

    def check(self) -> None:
        """Raises CopyFailed if the thread has ended by an exception."""
        if self._failure is not None:
            raise CopyFailed(f"{self._thread.name}: {type(self._failure).__name__}: {self._failure}") from self._failure

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        """predicate: asked whenever something has changed, with `changed` held. Raises CopyFailed."""
        with self.changed:
            self.changed.wait_for(lambda: predicate() or self._failure is not None)
        self.check()

    def close(self, finish: bool) -> None:
        """The thread ends: after all jobs, or (not finish) as soon as it can."""
        if not finish:
            with self.changed:
                self.is_stopping = True
                self.changed.notify_all()
        self._queue.put(None)
        self._thread.join()

    @torch.inference_mode()
    def _work(self, open_reporter: Callable[[], TicketReporter]) -> None:
        with self:
            self.stream.begin()
            self._begun.set()
            reporter = open_reporter()
            try:
                while (job := self._queue.get()) is not None and not self.is_stopping:
                    if self._carry_out(job):
                        self._holds.at("ack")
                        reporter.send(TicketEnded(self._rank, job.ticket, job.is_load, job.num_bytes, time.perf_counter() - job.begin_s))
            finally:
                reporter.close()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self._begun.set()
        with self.changed:
            self._failure = error
            self.changed.notify_all()
        return True  # the rank's own thread raises it


class Loads:
    """Records to pages. Jobs are numbered; a reader waits for all up to a number."""

    def __init__(self, pool: KVPool, host: HostPool, layout: CopyLayout, holds: Holds, open_reporter: Callable[[], TicketReporter]):
        self._targets = {name: plane.buffer for name, plane in pool.planes.items()}
        self._sources = host.planes
        self._layout = layout
        self._holds = holds
        self._submitted = 0  # number of the last job
        self._ended = 0  # jobs up to this one have ended
        self._arrived: list[Mark] = []  # pieces of the job after that
        self._newest_ticket = 0
        self._numbers: dict[int, int] = {}  # ticket that may be open -> its job, or, where this rank has no part, the one before
        self.worker = Worker("host-load", self._carry_out, pool.rank, holds, open_reporter, pool.device)

    def submit(self, ticket: int, job: CopyJob | None) -> None:
        """job: None if the rank has no part."""
        self._newest_ticket = max(self._newest_ticket, ticket)
        self._numbers = {open_: number for open_, number in self._numbers.items() if number > self._ended}
        if job is not None:
            self._submitted += 1
            job.reach(self.worker.stream.computed())
            self.worker.submit(job)
        self._numbers[ticket] = self._submitted

    def gate(self, ticket: int) -> LayerGate:
        """For readers of what the load `ticket` and those before it bring; 0: of nothing."""
        if ticket == 0:
            return OPEN_GATE
        assert ticket <= self._newest_ticket, f"load {ticket} is waited for, but was never ordered"
        return LoadGate(self, self._numbers[ticket]) if ticket in self._numbers else OPEN_GATE  # not there: it has ended

    def wait(self, number: int, plane: str, plane_layer: int) -> None:
        """Until the jobs up to `number` have brought the plane's layer."""
        if self._ended >= number:
            return
        place = self._layout.place(plane, plane_layer)
        mark: list[Mark] = []

        def is_there() -> bool:
            if self._ended == number - 1 and len(self._arrived) > place:
                mark.append(self._arrived[place])
            return bool(mark) or self._ended >= number

        self.worker.wait_for(is_there)
        if mark:
            self.worker.stream.join(mark[0])

    def _carry_out(self, job: CopyJob) -> bool:
        worker = self.worker
        targets = self._layout.views(self._targets, job.device_rows)
        sources = self._layout.views(self._sources, job.host_rows)
        for piece in self._layout.load_order:
            self._holds.at("load")
            if worker.is_stopping:
                return False
            mark = worker.stream.copy(targets[piece.plane][piece.number], sources[piece.plane][piece.number], job.reached[0])
            with worker.changed:
                self._arrived.append(mark)
                worker.changed.notify_all()
        worker.stream.finish()
        with worker.changed:
            self._ended += 1
            self._arrived = []
            worker.changed.notify_all()
        return True


@dataclass(frozen=True)
class LoadGate:
    """LayerGate of one step."""

    loads: Loads
    number: int

    def wait(self, plane: str, plane_layer: int) -> None:
        self.loads.wait(self.number, plane, plane_layer)


class Backups:
    """Pages to records. Those of the step under way follow its layers."""

    def __init__(self, pool: KVPool, host: HostPool, layout: CopyLayout, holds: Holds, open_reporter: Callable[[], TicketReporter]):
        self._targets = host.planes
        self._sources = {name: plane.buffer for name, plane in pool.planes.items()}
        self._layout = layout
        self._holds = holds
        self._following: list[CopyJob] = []  # jobs of the step under way
        self.worker = Worker("host-backup", self._carry_out, pool.rank, holds, open_reporter, pool.device)

    def submit(self, job: CopyJob, is_written: bool) -> None:
        """is_written: all layers are of earlier steps; else the calls of `layer_written` that follow say when each is due."""
        if is_written:
            job.reach(self.worker.stream.computed(), self._layout.num_layers)
        else:
            self._following.append(job)
        self.worker.submit(job)

    def layer_written(self, layer: int) -> None:
        if not self._following:
            return
        mark = self.worker.stream.computed()
        with self.worker.changed:
            for job in self._following:
                assert len(job.reached) == layer, f"backup {job.ticket}: layer {layer} was computed after {len(job.reached)} layers"
                job.reach(mark)
            self.worker.changed.notify_all()
        if layer == self._layout.num_layers - 1:
            self._following = []

    def forward_ended(self, step: int) -> None:
        """Raises AssertionError if the step had no layers for backups to follow: their worker would wait for ever."""
        assert not self._following, f"step {step}: no forward wrote the rows of backups {[job.ticket for job in self._following]}"

    def _carry_out(self, job: CopyJob) -> bool:
        self._holds.at("backup")
        if len(job.reached) == self._layout.num_layers:
            self._copy_whole(job)
        elif not self._follow(job):
            return False
        self.worker.stream.finish()
        return True

    def _copy_whole(self, job: CopyJob) -> None:
        for name, target in self._targets.items():
            source = self._sources[name]
            self.worker.stream.copy([target[row] for row in job.host_rows], [source[row] for row in job.device_rows], job.reached[-1])

    def _follow(self, job: CopyJob) -> bool:
        """False: given up."""
        worker = self.worker
        targets = self._layout.views(self._targets, job.host_rows)
        sources = self._layout.views(self._sources, job.device_rows)
        for piece in self._layout.backup_order:
            with worker.changed:
                while len(job.reached) <= piece.last and not worker.is_stopping:
                    worker.changed.wait()
            if worker.is_stopping:
                return False
            worker.stream.copy(targets[piece.plane][piece.number], sources[piece.plane][piece.number], job.reached[piece.last])
        return True


class CopyEngine:
    """A rank's door to its host tier."""

    def __init__(self, pool: KVPool, host: HostPool, layout: CopyLayout, holds: Holds, open_reporter: Callable[[], TicketReporter]):
        """open_reporter: called in each worker thread, once: where it tells the ends of tickets."""
        self.host = host
        self._pool = pool
        self._loads = Loads(pool, host, layout, holds, open_reporter)
        self._backups = Backups(pool, host, layout, holds, open_reporter)

    def begin(self, plan: StepPlan) -> LayerGate:
        """The plan's loads and backups begin; its tail copies have been made. Returns what its forward waits for. Raises CopyFailed."""
        self.check()
        for load in plan.loads:
            self._loads.submit(load.ticket, self._job(load))
        for backup in plan.backups:
            job = self._job(backup)
            if job is not None:
                self.host.use(job.host_rows)
                self._backups.submit(job, backup.is_written)
        return self._loads.gate(plan.needs_load)

    def layer_written(self, layer: int) -> None:
        """The step under way has computed the layer."""
        self._backups.layer_written(layer)

    def forward_ended(self, step: int) -> None:
        """Raises AssertionError if the plan's backups of new rows were not followed by a forward."""
        self._backups.forward_ended(step)

    def copy_tail(self, copy: TailCopy) -> None:
        """From a host page to a device page."""
        self.host.copy_tail(copy, self._pool.planes)

    def check(self) -> None:
        """Raises CopyFailed if a copy has failed."""
        self._loads.worker.check()
        self._backups.worker.check()

    def close(self, finish: bool) -> None:
        """The workers end; finish: after all that was ordered. Raises CopyFailed if something of that failed."""
        self._loads.worker.close(finish)
        self._backups.worker.close(finish)
        if finish:
            self.check()

    def _job(self, order: Load | Backup) -> CopyJob | None:
        """This rank's part; None if it has none."""
        host_rows, device_rows = own_rows(order.host_pages, order.device_pages, self._pool.cp_size, self._pool.rank)
        if not host_rows:
            return None
        self._pool.use(np.frombuffer(order.device_pages, np.int32))
        return CopyJob(order.ticket, isinstance(order, Load), host_rows, device_rows, len(host_rows) * self.host.record_bytes)
