"""Exact, deterministic selection of the best keys: larger score first, then lower position."""
import torch
from torch import Tensor


def select_topk(scores: Tensor, topk: int) -> Tensor:
    """scores float32 [m, T], -inf where a key does not count; columns in ascending position.

    Returns int64 [m, k], k = min(topk, T): columns in ascending order. A row with fewer than k finite scores is filled
    up with columns of score -inf.
    """
    num_rows, num_keys = scores.shape
    k = min(topk, num_keys)
    if k == num_keys:
        return torch.arange(num_keys, device=scores.device).expand(num_rows, num_keys)
    cut = scores.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)  # [m, 1] score of the k-th best key
    chosen = scores >= cut
    if int(chosen.sum()) != num_rows * k:
        above = scores > cut
        tied = scores == cut
        room = k - above.sum(dim=1, keepdim=True)
        chosen = above | (tied & (tied.cumsum(dim=1) <= room))
    return chosen.nonzero()[:, 1].view(num_rows, k)


def merge_topk(scores: Tensor, positions: Tensor, topk: int) -> Tensor:
    """The global cut over candidates of several lanes.

    scores float32 [N, m, k], -inf for padding; positions int64 [N, m, k], any value for padding.
    Returns bool [N, m, k]: candidates that belong to the `topk` best of their row over all lanes.
    """
    num_lanes, num_rows, k = scores.shape
    flat_scores = scores.transpose(0, 1).reshape(num_rows, num_lanes * k)
    flat_positions = positions.transpose(0, 1).reshape(num_rows, num_lanes * k)
    by_position = flat_positions.argsort(dim=1)
    best = select_topk(flat_scores.gather(1, by_position), topk)
    kept = torch.zeros_like(flat_scores, dtype=torch.bool).scatter_(1, by_position.gather(1, best), True)
    kept &= flat_scores > float("-inf")
    return kept.view(num_rows, num_lanes, k).transpose(0, 1)


def keep_best(scores: Tensor, positions: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The best candidates of each row by (score descending, position ascending).

    scores float32 [m, c], -inf for padding; positions int64 [m, c]. Returns both as [m, min(topk, c)], ascending positions.
    """
    positions, order = positions.sort(dim=1)
    scores = scores.gather(1, order)
    best = select_topk(scores, topk)
    return scores.gather(1, best), positions.gather(1, best)
