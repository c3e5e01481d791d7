import time

import msgspec
import pytest

from sglane.forward import layer_hooks
from sglane.forward.layer_hooks import Holds, StepHooks


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
