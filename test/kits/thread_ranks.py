"""Ranks as threads of the test process: the exchanges of a group without processes or sockets."""
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from sglane.distributed.groups import PURPOSES, Groups
from sglane.model_executor.executor import Executor

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

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_gather(x)[:, self.rank].sum(0)

    def barrier(self) -> None:
        self._barrier.wait()


class ThreadGroup:
    """`size` ranks with one communicator for each purpose; they and `run` may be used again and again."""

    def __init__(self, size: int):
        self.size = size
        self._barriers = [threading.Barrier(size, timeout=60) for _ in PURPOSES]
        boxes: list[list[Tensor | None]] = [[None] * size for _ in self._barriers]
        self._exchanges = [[ThreadExchange(rank, *made) for made in zip(boxes, self._barriers)] for rank in range(size)]

    def exchange(self, rank: int) -> ThreadExchange:
        """Any one communicator."""
        return self._exchanges[rank][0]

    def groups(self, rank: int) -> Groups:
        return Groups(*self._exchanges[rank])

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        """Call work(rank) on all threads and return the results in rank order; the first failure is raised."""
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(self._guarded, work, rank) for rank in range(self.size)]
            errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        calls = {tuple(exchange.num_calls for exchange in exchanges) for exchanges in self._exchanges}
        assert len(calls) == 1, f"ranks made different numbers of calls: {calls}"
        return [future.result() for future in futures]

    def _guarded(self, work: Callable[[int], Result], rank: int) -> Result:
        torch.set_num_threads(1)
        done = False
        try:
            result = work(rank)
            done = True
            return result
        finally:
            if not done:
                for barrier in self._barriers:  # so that the others end too
                    barrier.abort()


def map_pools(executors: list[Executor]) -> None:
    """The ranks read the pools of all lanes in place, as they do where these lie in shared memory."""
    for executor in executors:
        executor._pool.lanes = {name: [other._pool.planes[name] for other in executors] for name in executor._pool.planes}
        executor._runner._prefetch_thread = None  # mapped pages are not fetched ahead
