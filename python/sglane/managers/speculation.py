"""What speculation brings, by request and since the start. Monotonic counts; nothing is decided by them."""
from typing import Any

from sglane.plan.io_struct import SpecCounts

#: Where the prompt of a request came from at its first admission: acceptance must be the same for all.
SOURCES = ("none", "device", "host")


class SpecTally:
    """Verify steps: decode steps that gave a token, those without a draft included."""

    def __init__(self, max_drafts: int):
        self._histogram = [0] * (max_drafts + 1)  # steps by accepted drafts
        self._num_drafts = 0

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """One step, which verified `num_drafts`."""
        self._num_drafts += num_drafts
        self._histogram[num_accepted] += 1

    def counts(self) -> SpecCounts:
        num_accepted = sum(accepted * steps for accepted, steps in enumerate(self._histogram))
        return SpecCounts(sum(self._histogram), self._num_drafts, num_accepted, list(self._histogram))


class Speculation:
    """All requests together."""

    def __init__(self, max_drafts: int):
        """max_drafts: of a step; 0: the server does not speculate."""
        self._max_drafts = max_drafts
        self._tallies = {source: SpecTally(max_drafts) for source in SOURCES}

    def add(self, cached: tuple[int, int, int] | None, num_drafts: int, num_accepted: int) -> None:
        """A step of one request. cached: see Request."""
        _, device, host = cached or (0, 0, 0)
        self._tallies["host" if host else "device" if device else "none"].add(num_drafts, num_accepted)

    def report(self) -> dict[str, Any] | None:
        """None without speculation. num_tokens: that verify steps gave, accepted drafts and one more each."""
        if not self._max_drafts:
            return None
        counts = {source: tally.counts() for source, tally in self._tallies.items()}
        parts = list(counts.values())
        total = SpecCounts(sum(part.num_verify_steps for part in parts), sum(part.num_drafts for part in parts),
                           sum(part.num_accepted for part in parts), [sum(steps) for steps in zip(*(part.histogram for part in parts))])
        return {"max_drafts": self._max_drafts, **_numbers(total), "histogram": total.histogram,
                "by_source": {source: _numbers(part) for source, part in counts.items()}}


def _numbers(counts: SpecCounts) -> dict[str, int]:
    return {"num_verify_steps": counts.num_verify_steps, "num_drafts": counts.num_drafts, "num_accepted": counts.num_accepted,
            "num_tokens": counts.num_verify_steps + counts.num_accepted}
