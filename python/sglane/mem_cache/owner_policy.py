"""Which lane owns each new page. Pure functions; the owners they return always fit into `available` when the total fits.

Owning a page means computing its tokens. The prefill policy balances attention work (zigzag: each lane has one early and one late block) and
chooses the home, the lane of the last page, where few other requests have theirs: there the request computes its decode rows and grows. The
decode policy stays at home, where the chain of the request's last token is.
"""
import numpy as np
import numpy.typing as npt

from sglane.mem_cache.page_layout import LaneCounts, Lanes, PageLayout


def prefill_owners(num_pages: int, layout: PageLayout, lane_tokens: LaneCounts, lane_homes: LaneCounts, available: LaneCounts) -> Lanes:
    """Owners of the pages of one prefill chunk, int32 [num_pages].

    lane_tokens: int64 [cp_size] tokens that each lane already computes in this step. lane_homes: int64 [cp_size] other requests at home in each
    lane. available: int64 [cp_size] pages that each lane can give. None of them is changed.
    The last page, where the request goes on growing, goes to the lane with the fewest homes, then the fewest tokens, the most available pages,
    the lowest id. 2 * cp_size pages or more: zigzag over 2 * cp_size blocks, of which that lane has the first and the last one, and the others
    follow in turn. Fewer: each other page in turn to the lane with the fewest tokens in this step, then the most available pages, then the
    lowest id. A lane that can give no more is replaced by that same rule.
    Raises ValueError if fewer than num_pages are available in total.
    """
    _check_total(num_pages, available)
    cp_size = layout.cp_size
    if cp_size == 1 or not num_pages:
        return np.zeros(num_pages, np.int32)
    left = [int(n) for n in available]
    tokens = [int(n) for n in lane_tokens]
    if num_pages < 2 * cp_size:
        owners = np.empty(num_pages, np.int32)
        owners[-1] = home = _choose_home(1, tokens, lane_homes, left)
        tokens[home] += layout.page_size
        left[home] -= 1
        _fill_least_loaded(owners, np.arange(num_pages - 1), layout.page_size, tokens, left)
        return owners
    block = np.arange(num_pages, dtype=np.int64) * (2 * cp_size) // num_pages
    role = np.minimum(block, 2 * cp_size - 1 - block)
    home = _choose_home(int((role == 0).sum()), tokens, lane_homes, left)
    owners = ((role + home) % cp_size).astype(np.int32)
    refused = []  # indices of pages whose lane can give no more
    for lane in range(cp_size):
        mine = np.flatnonzero(owners == lane)[::-1]  # the last page is the last to be refused
        refused.append(mine[left[lane] :])
        num_taken = min(len(mine), left[lane])
        left[lane] -= num_taken
        tokens[lane] += num_taken * layout.page_size
    _fill_least_loaded(owners, np.sort(np.concatenate(refused)), layout.page_size, tokens, left)
    return owners


def decode_owner(home_lane: int, num_pages: int, lane_homes: LaneCounts, available: LaneCounts) -> Lanes:
    """Owners of the next pages of a decoding request, int32 [num_pages]: home as long as it can give, else move to the lane with the fewest
    homes (then the most available pages, then the lowest id), which is the new home. lane_homes: as for prefill_owners. Raises ValueError if the
    total does not fit."""
    _check_total(num_pages, available)
    left = available.copy()
    owners = np.empty(num_pages, np.int32)
    home, start = home_lane, 0
    while start < num_pages:
        if left[home] <= 0:
            home = min((int(lane_homes[lane]), -int(left[lane]), lane) for lane in np.flatnonzero(left > 0).tolist())[2]
        num_taken = min(int(left[home]), num_pages - start)
        owners[start : start + num_taken] = home
        left[home] -= num_taken
        start += num_taken
    return owners


def _check_total(num_pages: int, available: LaneCounts) -> None:
    if num_pages > int(available.sum()):
        raise ValueError(f"{num_pages} pages do not fit into {available.tolist()}")


def _choose_home(num_pages: int, tokens: list[int], lane_homes: LaneCounts, left: list[int]) -> int:
    """The lane with the fewest homes among those that can give `num_pages` pages, or any at all if none can; then as _fill_least_loaded."""
    lanes = [lane for lane, most in enumerate(left) if most >= num_pages] or [lane for lane, most in enumerate(left) if most]
    return min((int(lane_homes[lane]), tokens[lane], -left[lane], lane) for lane in lanes)[3]


def _fill_least_loaded(owners: Lanes, indices: npt.NDArray[np.int64], page_size: int, tokens: list[int], left: list[int]) -> None:
    """Give owners[indices], in turn, to the least loaded lane that can still take a page; `tokens` and `left` are updated."""
    lanes = range(len(left))
    for index in indices.tolist():
        lane = min((tokens[lane], -left[lane], lane) for lane in lanes if left[lane] > 0)[2]
        owners[index] = lane
        tokens[lane] += page_size
        left[lane] -= 1
