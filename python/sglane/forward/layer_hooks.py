"""Layer boundaries of a step: what a layer waits for, signs of life for the watchdog, names for profilers, and delays that tests ask for."""
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import torch

#: Seconds between two progress reports of one rank.
PROGRESS_INTERVAL_S = 1.0


class HoldSpec(msgspec.Struct, frozen=True):
    """Fault injection for tests: `rank` sleeps `sleep_ms` at `point` of every step; sleep_ms < 0: it fails there."""

    rank: int
    #: forward (after the first layer), exchange (before the step exchange), result (before the answer); of the host tier: backup (before each
    #: backup), load (before each piece of a load), ack (before a ticket's end is told)
    point: str
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


class LayerGate(Protocol):
    """What readers of a plane pass first: rows may still be on their way from the host tier."""

    def wait(self, plane: str, plane_layer: int) -> None:
        """Return when this rank's rows of that layer are there. Any thread; on a GPU the thread's current stream waits. Raises what a copy
        failed of."""
        ...


class OpenGate:
    """Nothing is on its way."""

    def wait(self, plane: str, plane_layer: int) -> None:
        pass


OPEN_GATE = OpenGate()


class NoHooks:
    """Of passes over rows that are not final: nothing follows them."""

    def layer_end(self, layer: int) -> None:
        pass


NO_HOOKS = NoHooks()


class Marker(Protocol):
    """Named, nested ranges of a profiler."""

    def push(self, name: str) -> None: ...

    def pop(self) -> None: ...


class NvtxMarker:
    """For Nsight Systems."""

    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()


class RecordMarker:
    """For recordings of torch.profiler."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def push(self, name: str) -> None:
        self._open.append(torch.profiler.record_function(name))
        self._open[-1].__enter__()

    def pop(self) -> None:
        self._open.pop().__exit__(None, None, None)


class StepMarks:
    """Ranges of a step: `step N`, and in it one after another `layer 0` ..., `sample` (norm, head, sampling), `exchange`."""

    def __init__(self, marker: Marker, num_layers: int):
        self._marker = marker
        self._num_layers = num_layers

    def begin(self, step: int) -> None:
        self._marker.push(f"step {step}")
        self._marker.push("layer 0")

    def layer_end(self, layer: int) -> None:
        self._next(f"layer {layer + 1}" if layer + 1 < self._num_layers else "sample")

    def before_exchange(self) -> None:
        self._next("exchange")

    def end(self) -> None:
        self._marker.pop()
        self._marker.pop()

    def _next(self, name: str) -> None:
        self._marker.pop()
        self._marker.push(name)


def step_marks(device_type: str, num_layers: int) -> StepMarks:
    """NVTX on CUDA; on CPU ranges that recordings show."""
    return StepMarks(NvtxMarker() if device_type == "cuda" else RecordMarker(), num_layers)


class StepHooks:
    """LayerHooks of one rank: reports progress (step, layer) at most once a second."""

    def __init__(self, report: Callable[[int, int], None], holds: Holds, between_layers: Callable[[], None], marks: StepMarks | None = None):
        """marks: None: no ranges for profilers."""
        self._marks = marks
        self._report = report
        self._between_layers = between_layers
        self._holds = holds
        self._layer_written: Callable[[int], None] = _nobody_waits
        self._step = 0
        self._last_report = time.monotonic()

    def tell_written(self, layer_written: Callable[[int], None]) -> None:
        """layer_written(layer) is called first thing when a layer has been computed: its rows are in the pools."""
        self._layer_written = layer_written

    def begin(self, step: int) -> None:
        """Step `step` starts. The first report comes only after a second of work: short steps are their own sign of life."""
        self._step = step
        self._last_report = time.monotonic()
        if self._marks is not None:
            self._marks.begin(step)

    def layer_end(self, layer: int) -> None:
        self._layer_written(layer)
        if layer == 0:
            self._holds.at("forward")
        self._between_layers()
        now = time.monotonic()
        if now - self._last_report >= PROGRESS_INTERVAL_S:
            self._last_report = now
            self._report(self._step, layer)
        if self._marks is not None:
            self._marks.layer_end(layer)

    def before_exchange(self) -> None:
        self._holds.at("exchange")
        if self._marks is not None:
            self._marks.before_exchange()

    def before_result(self) -> None:
        if self._marks is not None:
            self._marks.end()
        self._holds.at("result")


def _nobody_waits(layer: int) -> None:
    """Without a host tier."""
