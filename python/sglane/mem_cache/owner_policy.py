"""Which lane owns each new page. Pure functions; the owners they return always fit into `available` when the total fits.

Owning a page means computing its tokens, so the prefill policy balances attention work (zigzag: rank r takes one early and one late block)
and the decode policy stays at home, where the chain of the request's last token is.
"""
import numpy as np
import numpy.typing as npt

from sglane.mem_cache.page_layout import LaneCounts, Lanes, PageLayout


def prefill_owners(num_pages: int, layout: PageLayout, lane_tokens: LaneCounts, available: LaneCounts) -> Lanes:
    """Owners of the pages of one prefill chunk, int32 [num_pages].

    lane_tokens: int64 [cp_size] tokens that each lane already computes in this step (not changed here).
    available: int64 [cp_size] pages that each lane can give.
    2 * cp_size pages or more: zigzag over 2 * cp_size blocks. Fewer: each page in turn to the lane with the fewest tokens in this step, then
    the most available pages, then the lowest id. A lane that can give no more is replaced by that same rule.
    Raises ValueError if fewer than num_pages are available in total.
    """
    _check_total(num_pages, available)
    cp_size = layout.cp_size
    if cp_size == 1:
        return np.zeros(num_pages, np.int32)
    left = [int(n) for n in available]
    tokens = [int(n) for n in lane_tokens]
    if num_pages < 2 * cp_size:
        owners = np.empty(num_pages, np.int32)
        _fill_least_loaded(owners, np.arange(num_pages), layout.page_size, tokens, left)
        return owners
    block = np.arange(num_pages, dtype=np.int64) * (2 * cp_size) // num_pages
    owners = np.minimum(block, 2 * cp_size - 1 - block).astype(np.int32)
    refused = []  # indices of pages whose lane can give no more
    for lane in range(cp_size):
        mine = np.flatnonzero(owners == lane)
        refused.append(mine[left[lane] :])
        num_taken = min(len(mine), left[lane])
        left[lane] -= num_taken
        tokens[lane] += num_taken * layout.page_size
    _fill_least_loaded(owners, np.sort(np.concatenate(refused)), layout.page_size, tokens, left)
    return owners


def decode_owner(home_lane: int, num_pages: int, available: LaneCounts) -> Lanes:
    """Owners of the next pages of a decoding request, int32 [num_pages]: home as long as it can give, else move to the lane with the most
    available pages (then the lowest id), which is the new home. Raises ValueError if the total does not fit."""
    _check_total(num_pages, available)
    left = available.copy()
    owners = np.empty(num_pages, np.int32)
    home, start = home_lane, 0
    while start < num_pages:
        if left[home] <= 0:
            home = int(left.argmax())
        num_taken = min(int(left[home]), num_pages - start)
        owners[start : start + num_taken] = home
        left[home] -= num_taken
        start += num_taken
    return owners


def _check_total(num_pages: int, available: LaneCounts) -> None:
    if num_pages > int(available.sum()):
        raise ValueError(f"{num_pages} pages do not fit into {available.tolist()}")


def _fill_least_loaded(owners: Lanes, indices: npt.NDArray[np.int64], page_size: int, tokens: list[int], left: list[int]) -> None:
    """Give owners[indices], in turn, to the least loaded lane that can still take a page; `tokens` and `left` are updated."""
    lanes = range(len(left))
    for index in indices.tolist():
        lane = min((tokens[lane], -left[lane], lane) for lane in lanes if left[lane] > 0)[2]
        owners[index] = lane
        tokens[lane] += page_size
        left[lane] -= 1
