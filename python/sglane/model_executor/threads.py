"""How many compute threads a step gets. Switching costs 0.2 us, so it is done for every step."""
import os

import torch

from sglane import environ

#: Steps of at most this many local tokens are decode-sized: their products are bound by memory, and two threads beside a busy
#: process stall for scheduler ticks.
DECODE_TOKENS = 16


class ThreadPolicy:
    """One thread for decode-sized steps, all cores of the rank for the others."""

    def __init__(self, num_ranks: int):
        self._fixed = environ.SGLANE_NUM_THREADS
        self._cores = max(1, len(os.sched_getaffinity(0)) // num_ranks)
        self.for_load()

    def for_load(self) -> None:
        """All cores of the rank."""
        torch.set_num_threads(self._fixed or self._cores)

    def for_step(self, num_tokens: int) -> None:
        """num_tokens: local tokens of the step about to run."""
        torch.set_num_threads(self._fixed or (1 if num_tokens <= DECODE_TOKENS else self._cores))
