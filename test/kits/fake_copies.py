"""A host pool that holds token ids, and copies that are as late, or as early, as the order of a plan allows."""
from dataclasses import dataclass, field

import numpy as np

from sglane.mem_cache.page_layout import PageLayout
from sglane.plan.step_plan import Backup, Load, StepPlan, TicketEnded

POISON = -7


@dataclass
class Job:
    """A load or backup under way. Until a lane says that it has ended, its rows may be copied at any time."""

    ticket: int
    is_load: bool
    device_pages: np.ndarray
    host_pages: np.ndarray
    lanes: dict[int, int] = field(default_factory=dict)  # lane -> turns until it says that it has ended
    copied: set[int] = field(default_factory=set)  # lanes


class FakeCopies:
    """pool int64 [pages, page_size]: that of the fake executor, rows by page id. A page is copied at a random moment, at the latest when its
    lane's end is told, which comes up to `most_turns` turns later, lanes and tickets in any order."""

    def __init__(self, layout: PageLayout, num_host_rows: int, pool: np.ndarray, seed: int = 0, most_turns: int = 0):
        self._layout = layout
        self._pool = pool
        self.host = np.full((num_host_rows * layout.cp_size, layout.page_size), POISON, np.int64)
        self._random = np.random.default_rng(seed)
        self._most_turns = most_turns
        self._jobs: list[Job] = []
        self.num_loaded = 0  # pages
        self.num_backed_up = 0

    def begin(self, plan: StepPlan) -> None:
        """Before the step's rows are written or read."""
        self.host[np.frombuffer(plan.poison_host, np.int32)] = POISON
        for load in plan.loads:
            job = self._open(load, True)
            self._pool[job.device_pages] = POISON  # nothing has arrived yet
            self.num_loaded += len(job.device_pages)
        for job in self._jobs:
            if job.is_load and job.ticket <= plan.needs_load:
                for lane in list(job.lanes):
                    self._copy(job, lane)

    def end(self, plan: StepPlan) -> None:
        """When the step's rows have been written."""
        for backup in plan.backups:
            job = self._open(backup, False)
            self.num_backed_up += len(job.device_pages)

    def ended(self) -> list[TicketEnded]:
        """A turn later: what has ended now."""
        found = []
        for job in list(self._jobs):
            for lane, turns in list(job.lanes.items()):
                if turns > 0:
                    job.lanes[lane] = turns - 1
                    if self._random.integers(3) == 0:
                        self._copy(job, lane)
                    continue
                self._copy(job, lane)
                del job.lanes[lane]
                found.append(TicketEnded(lane, job.ticket, job.is_load, 1, 0.001))
            if not job.lanes:
                self._jobs.remove(job)
        return found

    def _open(self, order: Load | Backup, is_load: bool) -> Job:
        job = Job(order.ticket, is_load, np.frombuffer(order.device_pages, np.int32), np.frombuffer(order.host_pages, np.int32))
        cp_size = self._layout.cp_size
        assert len(job.device_pages) == len(job.host_pages) > 0, f"ticket {job.ticket} has no pages"
        assert (job.device_pages % cp_size == job.host_pages % cp_size).all(), f"ticket {job.ticket} crosses lanes"
        assert job.device_pages.min() >= cp_size and job.host_pages.min() >= cp_size, f"ticket {job.ticket} touches a sink row"
        for lane in np.unique(job.device_pages % cp_size).tolist():
            job.lanes[lane] = int(self._random.integers(self._most_turns + 1))
        self._jobs.append(job)
        return job

    def _copy(self, job: Job, lane: int) -> None:
        if lane in job.copied:
            return
        job.copied.add(lane)
        mine = job.device_pages % self._layout.cp_size == lane
        device, host = job.device_pages[mine], job.host_pages[mine]
        if job.is_load:
            self._pool[device] = self.host[host]
        else:
            self.host[host] = self._pool[device]
