import time

import msgspec
import pytest
import torch

from sglane.forward import layer_hooks
from sglane.forward.layer_hooks import Holds, StepHooks, StepMarks, step_marks


def test_progress_is_reported_at_most_once_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(layer_hooks.time, "monotonic", lambda: now[0])
    seen: list[tuple[int, int]] = []
    hooks = StepHooks(lambda step, layer: seen.append((step, layer)), Holds(0), lambda: None)
    hooks.begin(7)
    for layer in range(50):
        now[0] += 0.1
        hooks.layer_end(layer)
    assert [step for step, _ in seen] == [7] * len(seen)
    assert len(seen) == 4 or len(seen) == 5
    hooks.begin(8)
    hooks.layer_end(0)
    assert len(seen) <= 5  # a short step says nothing


def test_holds_act_on_their_rank_and_point_only() -> None:
    text = '{"rank": 1, "point": "exchange", "sleep_ms": 30}'
    for rank, low, high in ((1, 0.03, 1.0), (0, 0.0, 0.02)):
        begin = time.monotonic()
        Holds.parse(text, rank).at("exchange")
        assert low <= time.monotonic() - begin < high
    begin = time.monotonic()
    Holds.parse(text, 1).at("result")
    Holds.parse("", 1).at("exchange")
    assert time.monotonic() - begin < 0.02


def test_a_negative_hold_fails_and_nonsense_is_refused() -> None:
    with pytest.raises(RuntimeError, match="rank 0 fails at forward"):
        Holds.parse('{"rank": 0, "point": "forward", "sleep_ms": -1}', 0).at("forward")
    with pytest.raises(msgspec.ValidationError):
        Holds.parse('{"rank": "x"}', 0)


class Notes:
    """A marker that writes down what is open."""

    def __init__(self):
        self.open, self.seen = [], []

    def push(self, name):
        self.open.append(name)
        self.seen.append(" > ".join(self.open))

    def pop(self):
        self.open.pop()


@pytest.mark.parametrize("has_rows", [True, False])
def test_ranges_of_steps_and_layers(has_rows):
    """A rank without work names no layers, and everything is closed in the end."""
    notes = Notes()
    hooks = StepHooks(lambda step, layer: None, Holds(0), lambda: None, StepMarks(notes, 2))
    for step in (1, 2):
        hooks.begin(step)
        for layer in range(2 * has_rows):
            hooks.layer_end(layer)
        hooks.before_exchange()
        hooks.before_result()
        assert notes.open == []
    inner = ["layer 0", "layer 1", "sample", "exchange"] if has_rows else ["layer 0", "exchange"]
    assert notes.seen == [f"step {step}" + name for step in (1, 2) for name in ("", *(f" > {name}" for name in inner))]


def test_recordings_show_the_ranges():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recording:
        marks = step_marks("cpu", 1)
        marks.begin(7)
        marks.layer_end(0)
        marks.before_exchange()
        marks.end()
    assert {"step 7", "layer 0", "sample", "exchange"} <= {event.name for event in recording.events()}


def test_a_layer_is_told_written_before_anything_else_happens() -> None:
    told: list[int] = []
    hooks = StepHooks(lambda step, layer: None, Holds.parse('{"rank": 0, "point": "forward", "sleep_ms": -1}', 0), lambda: None)
    hooks.tell_written(told.append)
    hooks.begin(1)
    with pytest.raises(RuntimeError, match="fails at forward"):
        hooks.layer_end(0)
    hooks.layer_end(1)
    assert told == [0, 1]
