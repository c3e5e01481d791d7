"""Rows of a mixture-of-experts layer on their way to the ranks that hold the experts, and the sums on their way back."""
from typing import Protocol

import torch
from torch import Tensor

from sglane.distributed.exchange.local import Exchange

#: An expert id that no rank holds: what padding rows choose.
NO_EXPERT = -1
#: Fields of a packed row start at multiples of this many bytes, so that each can be viewed in its own type.
ALIGNMENT = 8


class RoutedExperts(Protocol):
    """The routed experts of one layer that this rank holds."""

    @property
    def shard(self) -> tuple[int, int]:
        """(rank, number of ranks) that they were divided for."""
        ...

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """All experts are here. x [n, hidden], ids int64 [n, k], weights float32 [n, k]; returns the weighted sums [n, hidden] in x's type."""
        ...

    def partial(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The share of this rank's experts in the same sums, float32 [n, hidden]; ids that it does not hold add nothing."""
        ...


class ExpertRows(Protocol):
    """How the rows of one forward reach the routed experts. A layer calls it once, also without rows: ranks exchange inside."""

    def __call__(self, experts: RoutedExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [n, hidden], the local rows; ids int64 [n, k], weights float32 [n, k]: what they chose; returns the weighted sums [n, hidden]."""
        ...


class LocalRows:
    """One rank holds all experts: nothing moves."""

    def __call__(self, experts: RoutedExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        assert experts.shard[1] == 1, f"one rank needs all experts, but holds those of rank {experts.shard[0]} of {experts.shard[1]}"
        return experts(x, ids, weights)


class ExchangedRows:
    """Every rank sees the rows of all, adds up what its own experts give, and gets the sums of its own rows back.

    One all-gather (rows, ids and weights packed into bytes) and one reduce-scatter (float32) per layer.
    """

    def __init__(self, exchange: Exchange, max_rows: int):
        """max_rows: rows of the rank that has most, the same number on every rank."""
        self._exchange = exchange
        self._max_rows = max_rows

    def __call__(self, experts: RoutedExperts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self._max_rows == 0:
            return x  # no rank has a row
        ranks = (self._exchange.rank, self._exchange.size)
        assert experts.shard == ranks, f"rank {ranks[0]} of {ranks[1]} holds the experts of rank {experts.shard[0]} of {experts.shard[1]}"
        packed = self._exchange.all_gather(pack(x, ids, weights, self._max_rows)).flatten(0, 1)  # uint8 [N * max_rows, row bytes]
        sums = experts.partial(*unpack(packed, x.shape[1], ids.shape[1], x.dtype))  # float32 [N * max_rows, hidden]
        own = self._exchange.reduce_scatter(sums.unflatten(0, (self._exchange.size, self._max_rows)))
        return own[:x.shape[0]].to(x.dtype)


def expert_rows(exchange: Exchange, max_rows: int) -> ExpertRows:
    """For one forward, or for one layer that computes fewer rows than the others; max_rows: see ExchangedRows."""
    return LocalRows() if exchange.size == 1 else ExchangedRows(exchange, max_rows)


def pack(x: Tensor, ids: Tensor, weights: Tensor, max_rows: int) -> Tensor:
    """uint8 [max_rows, row bytes]: ids int32, weights float32, x. Padding rows are zeros that chose no expert."""
    n, k = ids.shape
    begin, end = _row_bytes(x.shape[1], k, x.dtype)
    packed = x.new_zeros((max_rows, end), dtype=torch.uint8)
    choices = packed[:, :8 * k]
    choices[:, :4 * k].view(torch.int32).fill_(NO_EXPERT)[:n] = ids
    choices[:, 4 * k:].view(torch.float32)[:n] = weights
    packed[:n, begin:begin + x.shape[1] * x.element_size()].view(x.dtype).copy_(x)
    return packed


def unpack(packed: Tensor, hidden_size: int, topk: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """packed uint8 [n, row bytes]; returns x [n, hidden], ids int64 [n, k] and weights float32 [n, k]; x and weights are views of it."""
    begin, _ = _row_bytes(hidden_size, topk, dtype)
    x = packed[:, begin:begin + hidden_size * dtype.itemsize].view(dtype)
    return x, packed[:, :4 * topk].view(torch.int32).long(), packed[:, 4 * topk:8 * topk].view(torch.float32)


def _row_bytes(hidden_size: int, topk: int, dtype: torch.dtype) -> tuple[int, int]:
    """Where x begins in a packed row, and where the row ends."""
    begin = 8 * topk
    return begin, -(-(begin + hidden_size * dtype.itemsize) // ALIGNMENT) * ALIGNMENT
