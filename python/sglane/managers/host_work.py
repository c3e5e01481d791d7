"""What the copies between device and host brought, and how long they took. Monotonic counts; nothing is decided by them."""
from collections.abc import Mapping
from typing import Any

from sglane.utils.histogram import TimeHistogram

#: Upper bounds of the buckets; one more takes the rest. Seconds.
COPY_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
KINDS = ("backup", "load")


class HostWork:
    """Bytes and times of the parts of tickets that ranks have carried out."""

    def __init__(self, page_bytes: int) -> None:
        """page_bytes: of one record; 0 without a host tier."""
        self._page_bytes = page_bytes
        self._num_bytes = dict.fromkeys(KINDS, 0)
        self._times = {kind: TimeHistogram(COPY_BOUNDS_S) for kind in KINDS}
        self._oldest, self._oldest_since_s = 0, 0.0

    def ended(self, kind: str, num_bytes: int, duration_s: float) -> None:
        """A rank has said so with a TicketEnded. kind: backup or load."""
        self._num_bytes[kind] += num_bytes
        self._times[kind].add(duration_s)

    def oldest_age_s(self, ticket: int, now_s: float) -> float:
        """ticket: the oldest that is open, 0: none. Returns the seconds for which it has been the oldest, as far as calls have seen."""
        if ticket != self._oldest or not ticket:
            self._oldest, self._oldest_since_s = ticket, now_s
        return now_s - self._oldest_since_s

    def report(self, ledger_report: Mapping[str, Any]) -> dict[str, Any]:
        """`host_cache` of the planner's state. ledger_report: KVLedger.host_report(). Every ticket has one time for each rank that had a part of it;
        tokens count once, when the whole ticket has ended."""
        tickets = {
            kind: {"tokens": ledger_report[f"{kind}_tokens"], "bytes": self._num_bytes[kind], "times": self._times[kind].report()} for kind in KINDS
        }
        names = ("hits_device_tokens", "hits_host_tokens", "backup_duplicates", "dropped_tokens", "open_tickets")
        passed_on = {name: ledger_report[name] for name in names}
        return {"enabled": self._page_bytes > 0, "page_bytes": self._page_bytes, "tickets": tickets, **passed_on}
