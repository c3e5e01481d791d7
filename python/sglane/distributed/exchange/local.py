"""Exchange of a single rank: nothing moves."""
from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """How the ranks of a group see each other's rows. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def all_gather(self, x: Tensor) -> Tensor:
        """x [...], same shape and type on every rank; returns [size, ...] in rank order."""
        ...

    def gather_rows(self, x: Tensor, max_length: int, inverse: Tensor) -> Tensor:
        """x [n, ...] with n <= max_length differing by rank; returns [T, ...] in global order.

        inverse int64 [T]: index of each global row in the padded gather [size * max_length].
        """
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x [size, ...], same shape and type on every rank; returns [...]: the sum over ranks of their x[rank], added in rank order."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it. What a rank wrote to memory that others map is visible to them afterwards."""
        ...


class LocalExchange:
    """One rank."""

    rank = 0
    size = 1

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def gather_rows(self, x: Tensor, max_length: int, inverse: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[0]

    def barrier(self) -> None:
        pass
