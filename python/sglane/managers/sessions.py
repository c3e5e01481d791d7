"""Open sessions and the leases that keep their prefixes. A lease is a preference: it goes as soon as somebody needs the pages."""
from collections import OrderedDict
from typing import Any

from sglane.mem_cache.kv_ledger import Holding, KVLedger
from sglane.mem_cache.radix_key import RadixKey
from sglane.utils import fallback


class Sessions:
    """Every lease is a holding that is matched and never admitted. No clock: a session ends by a message."""

    def __init__(self, ledger: KVLedger):
        self._ledger = ledger
        self._open: OrderedDict[str, Holding | None] = OrderedDict()  # by session, the longest unused first; None: it has no lease

    def open(self, session: str) -> None:
        assert session not in self._open, f"session {session!r} is open: the front must refuse it"
        self._open[session] = None

    def close(self, session: str) -> None:
        """Its lease ends; requests of it that run go on and leave no lease."""
        self._drop(session)
        del self._open[session]

    def used(self, session: str) -> None:
        """A request of it has arrived. Requests without a session, or of a closed one, say it too."""
        if session in self._open:
            self._open.move_to_end(session)

    def keep(self, session: str, key: RadixKey, namespace: str) -> None:
        """A request of it has ended and left the rows of `key` in the tree: they are leased in place of what was."""
        if session not in self._open or not self._ledger.prefix_cache:
            return
        holding = self._ledger.match(key, namespace, len(key))
        self._drop(session)
        self._open[session] = holding
        self.used(session)

    def drop_oldest(self) -> bool:
        """Somebody needs pages: the longest unused session loses its lease. False: there is none to lose."""
        for session, holding in self._open.items():
            if holding is not None:
                fallback.count("session_lease_dropped")
                self._drop(session)
                return True
        return False

    def make_room(self, num_pages: int) -> bool:
        """Whether `num_pages` pages are free or evictable; until they are, or will be when the steps under way have ended, leases are dropped, the
        longest unused first. No lease is dropped if all of them together would not be enough."""
        num_missing = self._num_missing(num_pages)
        if num_missing > 0 and num_missing <= self._num_leased_pages():
            while self._num_missing(num_pages) > 0 and self.drop_oldest():
                pass
        return int(self._ledger.available().sum()) >= num_pages

    def _num_leased_pages(self) -> int:
        """Pages that could be evicted if all leases ended."""
        return int((self._ledger.available_without(self._holdings()) - self._ledger.available()).sum())

    def _num_missing(self, num_pages: int) -> int:
        """Of `num_pages`; pages on their way are not missing. Negative: there are more than that."""
        num_missing = num_pages - int(self._ledger.available().sum())
        if num_missing <= 0:
            return num_missing
        device: Any = self._ledger.snapshot()["device"]
        return num_missing - int(sum(device["tickets"]))

    def drop_all(self) -> None:
        """For a flush, which is not counted."""
        for session in self._open:
            self._drop(session)

    def beside(self, snapshot: dict[str, Any]) -> dict[str, Any]:
        """The ledger's snapshot with what is leased for sessions counted apart: `session_leases`, not `leases` and `requests`."""
        holdings = self._holdings()
        num_leases = sum(1 if holding.source is None else 2 for holding in holdings)
        counts = {"leases": num_leases, "requests": len(holdings)}
        return {**snapshot, **{name: snapshot[name] - count for name, count in counts.items()}, "session_leases": num_leases}

    def report(self) -> dict[str, int]:
        """Open sessions, those that have a lease, and the valid tokens of all leases; a prefix that two sessions share counts twice."""
        holdings = self._holdings()
        return {"num_open": len(self._open), "num_leased": len(holdings), "leased_tokens": sum(holding.num_cached_tokens for holding in holdings)}

    def _holdings(self) -> list[Holding]:
        return [holding for holding in self._open.values() if holding is not None]

    def _drop(self, session: str) -> None:
        holding = self._open[session]
        if holding is not None:
            self._open[session] = None
            self._ledger.cancel(holding)
