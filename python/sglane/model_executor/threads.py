"""How many compute threads a step gets. Switching costs 0.2 us, so it is done for every step."""
import os
import time
from collections.abc import Callable

import psutil
import torch

from sglane import environ

#: Steps of at most this many local tokens are decode-sized: bound by memory, if the weights are larger than the caches.
DECODE_TOKENS = 64
#: Weights below this size stay in the caches: threads would wait for one another longer than they work.
SMALL_MODEL_BYTES = 1 << 26
#: Time over which the load of other processes is averaged.
LOAD_WINDOW_S = 0.25


class ThreadPolicy:
    """One thread for decode-sized steps of small models. For the others the cores of the rank that other processes leave free meanwhile.

    Threads of one product wait for each other, so a thread that has to share its core stops all of them for scheduler ticks.
    """

    def __init__(self, num_ranks: int, weight_bytes: int):
        """weight_bytes: of this rank's model."""
        self._fixed = environ.SGLANE_NUM_THREADS
        cores = os.sched_getaffinity(0)
        self._load = ForeignLoad(cores)
        self._cores = max(1, len(cores) // num_ranks)
        self._is_small = weight_bytes < SMALL_MODEL_BYTES
        self._most = 1  # threads of the step under way
        self.for_load()

    def for_load(self) -> None:
        """All cores of the rank."""
        torch.set_num_threads(self._fixed or self._cores)

    def for_step(self, num_tokens: int) -> None:
        """num_tokens: local tokens of the step about to run."""
        self._most = self._fixed or (1 if self._is_small and num_tokens <= DECODE_TOKENS else self._cores)
        self._load.begin()
        torch.set_num_threads(self._most if self._fixed else self._free())

    def adapt(self) -> None:
        """Between two layers of a step, which may take seconds."""
        if self._most > 1 and not self._fixed:
            torch.set_num_threads(self._free())

    def _free(self) -> int:
        return 1 if self._most == 1 else max(1, min(self._most, self._load.free_cores()))


class ForeignLoad:
    """Cores of a set that are not busy with other processes, as seen while this process works: who was busy before does not matter."""

    def __init__(self, cores: set[int], clock: Callable[[], float] = time.monotonic):
        self._cores = cores
        self._clock = clock
        self._seen = float("-inf")  # last call
        self.begin()

    def begin(self) -> None:
        """Work begins. After a pause all cores count as free, until a window of work has shown otherwise."""
        now = self._clock()
        if now - self._seen > LOAD_WINDOW_S:
            self._free = len(self._cores)
            self._since, (self._busy_s, self._own_s) = now, self._times()
        self._seen = now

    def free_cores(self) -> int:
        """Cores, rounded; looked up anew every LOAD_WINDOW_S."""
        now = self._seen = self._clock()
        elapsed_s = now - self._since
        if elapsed_s >= LOAD_WINDOW_S:
            busy_s, own_s = self._times()
            foreign = (busy_s - self._busy_s - own_s + self._own_s) / elapsed_s
            self._free = len(self._cores) - round(max(0.0, foreign))
            self._since, self._busy_s, self._own_s = now, busy_s, own_s
        return self._free

    def _times(self) -> tuple[float, float]:
        """Seconds of CPU that everybody, and that this process has used on these cores."""
        every = [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in self._cores]
        return sum(times.user + times.nice + times.system for times in every), time.process_time()
