"""The books of a server must balance: at any time, and exactly zero of everything when it is idle."""
import time
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from sglane.utils.fallback import DECLARED

PAGE_CLASSES = ("free", "cached", "held", "tickets")


class HasLedger(Protocol):
    """Anything that shows a ledger: a server under test."""

    def kv_ledger(self) -> dict[str, Any]: ...


def assert_conserved(ledger: Mapping[str, Any]) -> None:
    """Every page of every lane is in exactly one class. True at any time, busy or idle."""
    cp_size = ledger["cp_size"]
    for tier in ("device", "host"):
        pages = ledger[tier]
        for name in ("total", *PAGE_CLASSES):
            assert len(pages[name]) == cp_size, f"{tier}.{name} has {len(pages[name])} lanes, not {cp_size}: {ledger}"
            assert min(pages[name]) >= 0, f"{tier}.{name} is negative: {ledger}"
        for lane in range(cp_size):
            num_pages, total = sum(pages[name][lane] for name in PAGE_CLASSES), pages["total"][lane]
            assert num_pages == total, f"{tier} lane {lane}: {num_pages} pages in all classes, {total} in total: {ledger}"
    assert 0 <= ledger["slots"]["free"] <= ledger["slots"]["total"], f"slots: {ledger}"


def leaks(ledger: Mapping[str, Any]) -> list[str]:
    """What an idle ledger still holds, in words; empty when it is idle."""
    found = []
    for tier in ("device", "host"):
        for name in ("held", "tickets"):
            if any(ledger[tier][name]):
                found.append(f"{tier}.{name} = {ledger[tier][name]}")
    if ledger["slots"]["free"] != ledger["slots"]["total"]:
        found.append(f"slots = {ledger['slots']}")
    for name in ("leases", "requests"):
        if ledger[name]:
            found.append(f"{name} = {ledger[name]}")
    return found


def wait_idle(server: HasLedger, timeout_s: float = 30.0) -> dict[str, Any]:
    """Poll until nothing is held; returns that ledger. Raises AssertionError naming what is still held after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        ledger = server.kv_ledger()
        assert_conserved(ledger)
        found = leaks(ledger)
        if not found:
            return ledger
        assert time.monotonic() < deadline, f"still held after {timeout_s:.0f} s: {'; '.join(found)}"
        time.sleep(0.05)


def assert_clean(ledger: Mapping[str, Any], *, allowed_fallbacks: Collection[str] = ()) -> None:
    """The ledger of an idle server: conserved, nothing held, and no slower path taken but those the test names."""
    assert_conserved(ledger)
    assert not leaks(ledger), f"held by nobody: {'; '.join(leaks(ledger))}"
    counts = ledger["fallbacks"]
    undeclared = set(counts) - set(DECLARED)
    assert not undeclared, f"fallbacks that are not declared: {undeclared}"
    taken = {name: count for name, count in counts.items() if count and name not in allowed_fallbacks}
    assert not taken, f"slower paths taken: {taken}"


def assert_empty(ledger: Mapping[str, Any]) -> None:
    """After a flush: clean, and every page free."""
    assert_clean(ledger, allowed_fallbacks=DECLARED)
    for tier in ("device", "host"):
        assert ledger[tier]["free"] == ledger[tier]["total"], f"{tier} pages are not all free: {ledger}"
