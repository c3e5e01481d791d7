"""Registry of declared slower paths. Each has a name and a reason; each warns once and is counted."""
import logging
from collections import Counter

logger = logging.getLogger(__name__)

#: name -> when it is taken. A slower path that is not listed here must not exist.
DECLARED = {
    "tail_copy_skipped": "a hit ends inside a page, but the lane of that page has no free page: the hit is cut to the page",
    "load_back_skipped": "a hit goes on in the host tier, but its lanes have no room for the load: the hit is cut to its device part",
    "host_backup_skipped": "the host tier has no room for pages that were to be backed up: they stay on the device only",
    "host_backup_dropped": "a page left the device before its backup had ended: the host record is given up",
    "session_lease_dropped": "a session kept a prefix, but its pages are needed: the prefix may be evicted, the session stays open",
    "cp_prefetch_late": "a layer's prefix pages were asked for before their prefetch had been launched: the layer waits for them",
    "pool_memory_late": "the kernel cannot take memory ahead of its use (MADV_POPULATE_WRITE, Linux 5.14): at the first write of a page it is",
}

_counts: Counter[str] = Counter(dict.fromkeys(DECLARED, 0))
_reported: dict[int, dict[str, int]] = {}  # by rank: what other processes count


def count(name: str) -> None:
    """Record one use; raises KeyError for a name that was not declared."""
    reason = DECLARED[name]
    if _counts[name] == 0:
        logger.warning("fallback %s: %s (warned once, counted in /server_info)", name, reason)
    _counts[name] += 1


def report(rank: int, found: dict[str, int]) -> None:
    """All that the process of a rank has counted since its start; takes the place of its last report."""
    _reported[rank] = dict(found)


def counts() -> dict[str, int]:
    """Of this process and of those that reported to it."""
    return {name: number + sum(found.get(name, 0) for found in _reported.values()) for name, number in _counts.items()}
