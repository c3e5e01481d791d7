"""Layer boundaries of a step: signs of life for the watchdog, and delays that tests ask for."""
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

#: Seconds between two progress reports of one rank.
PROGRESS_INTERVAL_S = 1.0


class HoldSpec(msgspec.Struct, frozen=True):
    """Fault injection for tests: `rank` sleeps `sleep_ms` at `point` of every step; sleep_ms < 0: it fails there."""

    rank: int
    point: str  # forward (after the first layer), exchange (before the step exchange), result (before the answer)
    sleep_ms: float


@dataclass(frozen=True)
class Holds:
    """The delays of one rank."""

    rank: int
    spec: HoldSpec | None = None

    @staticmethod
    def parse(text: str, rank: int) -> "Holds":
        """text: JSON of HoldSpec, or empty. Raises msgspec.ValidationError on anything else."""
        return Holds(rank, msgspec.json.decode(text, type=HoldSpec) if text else None)

    def at(self, point: str) -> None:
        """Sleep if a delay is set for this rank and point; a negative delay raises."""
        if self.spec is None or self.spec.rank != self.rank or self.spec.point != point:
            return
        if self.spec.sleep_ms < 0:
            raise RuntimeError(f"fault injection: rank {self.rank} fails at {point}")
        time.sleep(self.spec.sleep_ms / 1e3)


class StepHooks:
    """LayerHooks of one rank: reports progress (step, layer) at most once a second."""

    def __init__(self, report: Callable[[int, int], None], holds: Holds, between_layers: Callable[[], None]):
        self._report = report
        self._between_layers = between_layers
        self._holds = holds
        self._step = 0
        self._last_report = time.monotonic()

    def begin(self, step: int) -> None:
        """Step `step` starts. The first report comes only after a second of work: short steps are their own sign of life."""
        self._step = step
        self._last_report = time.monotonic()

    def layer_end(self, layer: int) -> None:
        if layer == 0:
            self._holds.at("forward")
        self._between_layers()
        now = time.monotonic()
        if now - self._last_report >= PROGRESS_INTERVAL_S:
            self._last_report = now
            self._report(self._step, layer)

    def before_exchange(self) -> None:
        self._holds.at("exchange")

    def before_result(self) -> None:
        self._holds.at("result")
