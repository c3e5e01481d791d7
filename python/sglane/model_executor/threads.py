"""How many compute threads a step gets. Switching costs 0.2 us, so it is done for every step."""
import os

import torch

from sglane import environ

#: Steps of at most this many local tokens are decode-sized: bound by memory, if the weights are larger than the caches.
DECODE_TOKENS = 16
#: Weights below this size stay in the caches: threads would wait for one another longer than they work.
SMALL_MODEL_BYTES = 1 << 26


class ThreadPolicy:
    """One thread for decode-sized steps of small models, all cores of the rank for the others."""

    def __init__(self, num_ranks: int, weight_bytes: int):
        """weight_bytes: of this rank's model."""
        self._fixed = environ.SGLANE_NUM_THREADS
        self._cores = max(1, len(os.sched_getaffinity(0)) // num_ranks)
        self._is_small = weight_bytes < SMALL_MODEL_BYTES
        self.for_load()

    def for_load(self) -> None:
        """All cores of the rank."""
        torch.set_num_threads(self._fixed or self._cores)

    def for_step(self, num_tokens: int) -> None:
        """num_tokens: local tokens of the step about to run."""
        torch.set_num_threads(self._fixed or (1 if self._is_small and num_tokens <= DECODE_TOKENS else self._cores))
