"""Where new pages come from: free pages, pages that wait for a step or a copy, then eviction of just what is missing."""
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sglane.mem_cache.hiradix_cache import Left, Residency
from sglane.mem_cache.lane_allocator import LaneAllocator
from sglane.mem_cache.page_layout import Demand, LaneCounts, Lanes, LedgerError, PageLayout, Pages, Shortfall
from sglane.mem_cache.radix_cache import RadixCache
from sglane.mem_cache.radix_node import Node
from sglane.utils import fallback
from sglane.utils.histogram import TimeHistogram

OwnerPolicy = Callable[[LaneCounts], Lanes]  # available pages of each lane -> owners of the free part of a demand

#: Upper bounds of the buckets. Seconds.
EVICTION_BOUNDS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(frozen=True)
class _Promise:
    """Pages that were evicted, or are waited for, on behalf of a holding that was told to ask again."""

    lanes: LaneCounts
    last_issued: int


class PageSupply:
    """Joins the allocator, the tree's eviction and the step stamps.

    A page that is freed while steps are outstanding is reusable only when they have retired, and one that is being backed up when that has ended,
    so an eviction may end in "ask again". What it won is promised to the one that asked, until the step after the next has retired: others then
    evict for themselves rather than take it. A promise is a preference, never a reason to refuse. Pages that only an open load leases are not
    missing either: ask again when it has ended.
    """

    def __init__(self, layout: PageLayout, allocator: LaneAllocator, tree: RadixCache, residency: Residency | None = None) -> None:
        self.layout = layout
        self._allocator = allocator
        self._tree = tree
        self._residency = residency
        self._promises: dict[int, _Promise] = {}  # by the asker's serial number
        self._promised = layout.no_counts()  # their sum
        self.last_issued = 0
        self.last_retired = 0
        self.num_evicted_pages = layout.no_counts()  # by lane, to make room; a flush does not count
        self.eviction_times = TimeHistogram(EVICTION_BOUNDS_S)
        self.num_backups_dropped = 0  # pages that were evicted before their backup had ended
        self.num_host_pages_dropped = 0  # host pages that went because a page above them was evicted and had no copy

    def issued(self, step: int) -> None:
        if step <= self.last_issued:
            raise LedgerError(f"step {step} is issued after step {self.last_issued}")
        self.last_issued = step

    def retired(self, step: int) -> None:
        if not self.last_retired < step <= self.last_issued:
            raise LedgerError(f"step {step} retires; issued so far {self.last_issued}, retired so far {self.last_retired}")
        self.last_retired = step
        for asker in [asker for asker, promise in self._promises.items() if promise.last_issued < step]:
            self.forget(asker)
        self._allocator.retire(step)

    def give(self, pages: Pages) -> Left:
        """Pages leave the tree or a request; steps issued so far may still touch them, and backups that are under way. Their own copies are given
        up."""
        if self._residency is None:
            self._allocator.free(pages, self.last_issued)
            return Left(0, 0)
        left = self._residency.leave(pages)
        is_copied = self._residency.has_open_ticket(pages)
        self._allocator.free(pages[~is_copied], self.last_issued)
        self._allocator.park(pages[is_copied])
        return left

    def backup_ended(self, pages: Pages) -> None:
        """Those of the pages that were given back meanwhile are freed."""
        self._allocator.unpark(pages[self._allocator.is_parked(pages)], self.last_issued)

    def forget(self, asker: int) -> None:
        """The asker will not ask again."""
        if asker in self._promises:
            self._promised -= self._promises.pop(asker).lanes

    def _promise(self, asker: int, lanes: LaneCounts) -> None:
        """In place of an older one."""
        self.forget(asker)
        self._promises[asker] = _Promise(lanes, self.last_issued)
        self._promised += lanes

    def fits(self, demand: Demand, ended: list[Node]) -> bool:
        """Whether the demand can be met now or after the outstanding steps and copies, once a lease of each node in `ended` has ended."""
        there = self._allocator.free_counts() + self._allocator.ticket_counts()
        if demand.fits(there + self._tree.evictable_without(ended)):
            return True
        loads = list(self._tree.loads().values())
        return bool(loads) and demand.fits(there + self._tree.evictable_without(ended + loads))

    def reserve(self, asker: int, demand: Demand, owners: OwnerPolicy) -> Pages | Shortfall:
        """Pages for the demand: first those of the fixed lanes in lane order, then the free part in the order of the policy's owners."""
        promised = self._promised_to_others(asker)
        answer = self._try_reserve(asker, demand, owners, promised)
        if isinstance(answer, Shortfall) and not answer.pending and promised.any():
            answer = self._try_reserve(asker, demand, owners, self.layout.no_counts())
        if isinstance(answer, Shortfall) and not answer.pending and self.fits(demand, []):
            answer = replace(answer, pending=True)
        return answer

    def prepare(self, asker: int, lane: int, better: npt.NDArray[np.bool_]) -> None:
        """The asker will want a page of `lane` in the next step: promise it one, evicting it if the lane has none to give. Nothing is done if a
        lane marked in `better`, bool [cp_size], has a free one, or if there is nothing to evict."""
        promised = self._promised_to_others(asker)
        free = self._allocator.free_counts() - promised
        if (free[better] > 0).any():
            return
        one = self.layout.no_counts()
        one[lane] = 1
        if free[lane] + self._allocator.ticket_counts()[lane] <= 0:
            if self._tree.evictable_counts()[lane] == 0:
                return
            self._evict(one)
        self._promise(asker, one)

    def _try_reserve(self, asker: int, demand: Demand, owners: OwnerPolicy, promised: LaneCounts) -> Pages | Shortfall:
        free = self._allocator.free_counts()
        soon = np.maximum(free + self._allocator.ticket_counts() - promised, 0)
        usable = np.minimum(free, soon)
        if demand.fits(usable):
            return self._allocate(asker, demand, owners(usable - demand.fixed))
        available = soon
        if not demand.fits(soon):
            evictable = self._tree.evictable_counts()
            if not demand.fits(soon + evictable):
                return demand.shortfall(free, pending=False)
            wanted = np.bincount(owners(soon + evictable - demand.fixed), minlength=self.layout.cp_size)
            available = soon + self.layout.lane_counts(self._evict(eviction_shares(demand, wanted, soon)))
            usable = usable + self._allocator.free_counts() - free
            if demand.fits(usable):  # what was evicted does not wait for a step or a copy
                return self._allocate(asker, demand, owners(usable - demand.fixed))
        lanes = np.bincount(owners(available - demand.fixed), minlength=self.layout.cp_size) + demand.fixed
        self._promise(asker, lanes)
        return demand.shortfall(free, pending=True)

    def _evict(self, shares: LaneCounts) -> Pages:
        """shares: pages by lane. They leave the tree; how long that took goes to the histogram and nowhere else."""
        begin_s = time.perf_counter()
        num_hosted = self._residency.num_in_use() if self._residency is not None else 0
        evicted = self._tree.evict(shares)
        assert evicted is not None, "pages counted as evictable could not be evicted"
        left = self.give(evicted)
        self.eviction_times.add(time.perf_counter() - begin_s)
        self.num_evicted_pages += self.layout.lane_counts(evicted)
        if self._residency is not None:
            self.num_backups_dropped += left.num_reserved
            self.num_host_pages_dropped += num_hosted - self._residency.num_in_use()
            for _ in range(left.num_reserved):
                fallback.count("host_backup_dropped")
        return evicted

    def _allocate(self, asker: int, demand: Demand, owners: Lanes) -> Pages:
        self.forget(asker)
        fixed = np.repeat(np.arange(self.layout.cp_size, dtype=np.int32), demand.fixed)
        pages = self._allocator.alloc(np.concatenate((fixed, owners)))
        assert not isinstance(pages, Shortfall), f"a demand that fits was refused: {pages}"
        return pages

    def _promised_to_others(self, asker: int) -> LaneCounts:
        return self._promised - self._promises[asker].lanes if asker in self._promises else self._promised.copy()


def eviction_shares(demand: Demand, wanted: LaneCounts, soon: LaneCounts) -> LaneCounts:
    """Pages to evict in each lane, int64 [cp_size]: in total exactly what is missing, as near to the wanted owners as that allows.

    wanted: owners of the demand's free part, by lane. soon: pages of each lane that need no eviction. Where the policy would rather evict than
    use free pages of another lane, the lanes with the largest shares give way, level by level.
    """
    fixed_missing = np.maximum(demand.fixed - soon, 0)
    rest = np.maximum(soon - demand.fixed, 0)
    shares = np.maximum(wanted - rest, 0)
    total = max(demand.free - int(rest.sum()), 0)
    low, high = 0, int(shares.max(initial=0))  # the highest level at which the cut shares do not exceed the total
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.minimum(shares, middle).sum()) <= total:
            low = middle
        else:
            high = middle - 1
    cut = np.minimum(shares, low)
    larger = np.flatnonzero(shares > low)
    cut[larger[: total - int(cut.sum())]] += 1
    return np.asarray(cut + fixed_missing, np.int64)
