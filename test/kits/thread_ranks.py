"""Ranks as threads of the test process: the exchange of a group without processes or sockets."""
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class ThreadExchange:
    """Exchange of one thread of a group; all threads make the same calls in the same order."""

    def __init__(self, rank: int, boxes: list[Tensor | None], barrier: threading.Barrier):
        self.rank = rank
        self.size = len(boxes)
        self._boxes = boxes
        self._barrier = barrier
        self.num_calls = 0

    def all_gather(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self._boxes[self.rank] = x
        self._barrier.wait()
        shapes = {(tuple(box.shape), box.dtype) for box in self._boxes}
        assert len(shapes) == 1, f"ranks gather different shapes: {shapes}"
        out = torch.stack(list(self._boxes))
        self._barrier.wait()
        return out

    def gather_rows(self, x: Tensor, max_length: int, inverse: Tensor) -> Tensor:
        padded = x.new_full((max_length, *x.shape[1:]), float("nan"))  # padding must never be used
        padded[:len(x)] = x
        return self.all_gather(padded).flatten(0, 1)[inverse]


def run_ranks(size: int, work: Callable[[int, ThreadExchange], Result]) -> list[Result]:
    """Call work(rank, exchange) on `size` threads and return the results in rank order; the first failure is raised."""
    barrier = threading.Barrier(size, timeout=60)
    boxes: list[Tensor | None] = [None] * size
    exchanges = [ThreadExchange(rank, boxes, barrier) for rank in range(size)]

    def guarded(rank: int) -> Result:
        try:
            return work(rank, exchanges[rank])
        except BaseException:
            barrier.abort()  # so that the others end too
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        assert len({exchange.num_calls for exchange in exchanges}) == 1, "ranks made different numbers of calls"
        return [future.result() for future in futures]
