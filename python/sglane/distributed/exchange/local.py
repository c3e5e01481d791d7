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


class LocalExchange:
    """One rank."""

    rank = 0
    size = 1

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def gather_rows(self, x: Tensor, max_length: int, inverse: Tensor) -> Tensor:
        return x
