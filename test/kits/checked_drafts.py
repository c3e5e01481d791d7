"""Chain states and drafts of executors, compared with the oracle's at every step; and drafts that are as good as a test wants them.

    references = References(path); references.add(prompt, 40)
    engine = model.engine(keeps_history=True, ...); watch(engine, references)
"""
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kits.engine import Engine
from kits.make_tiny import healthy, oracle_draft
from kits.oracle import Oracle

TOLERANCE = 1e-4


class References:
    """Greedy sequences of a checkpoint, with what the draft layer makes of them."""

    def __init__(self, path: Path):
        self._oracle = Oracle(path)
        self._sequences: list[tuple[list[int], Tensor, Tensor]] = []  # tokens, hidden [T - 1, hidden], g [T - 1, hidden]
        self.num_checked = 0

    def add(self, prompt: Sequence[int], num_new: int) -> list[int] | None:
        """Returns the `num_new` greedy tokens; some more are known. None: some selection, routing or argmax is so close that rounding may change
        it."""
        self._reset_margins()
        tokens, cache, closest = [int(token) for token in prompt], {}, math.inf
        logits, hidden = self._oracle.run(torch.tensor(tokens), cache)
        parts = [hidden]
        for _ in range(num_new + 8):
            best = logits[-1].topk(2).values
            closest = min(closest, float(best[0] - best[1]))
            tokens.append(int(logits[-1].argmax()))
            logits, hidden = self._oracle.run(torch.tensor(tokens[-1:]), cache)
            parts.append(hidden)
        hidden = torch.cat(parts)[:-1]
        _, states = self._oracle.mtp(torch.tensor(tokens[1:]), hidden, {})
        if not healthy({**self._oracle.margins, "argmax": closest}):
            return None
        self._sequences.append((tokens, hidden, states))
        return tokens[len(prompt):len(prompt) + num_new]

    def _reset_margins(self) -> None:
        self._oracle.margins = {"index": math.inf, "router": math.inf, "zero_ties": 0.0}

    def _of(self, known: list[int]) -> tuple[list[int], Tensor, Tensor]:
        found = [sequence for sequence in self._sequences if sequence[0][:len(known)] == known]
        assert found, f"{len(known)} tokens {known[-8:]} are no greedy sequence"
        return found[0]

    def follow(self, known: list[int], count: int) -> list[int]:
        return self._of(known)[0][len(known):len(known) + count]

    def state(self, known: list[int]) -> Tensor:
        """The chain state when these tokens are known."""
        self.num_checked += 1
        return self._of(known)[2][len(known) - 2]

    def drafts(self, known: list[int]) -> list[int]:
        """Empty if rounding may change them."""
        _, hidden, _ = self._of(known)
        self._reset_margins()
        found = oracle_draft(self._oracle, torch.tensor(known[1:]), hidden[:len(known) - 1])[1].tolist()
        return found if healthy({**self._oracle.margins, "argmax": math.inf}) else []


class CheckedDrafter:
    """Around a rank's own drafter. wrong: of the drafts that are given instead, which position in a window is wrong; None: its own are kept."""

    reads_all_rows = True

    def __init__(self, executor: Any, references: References, wrong: int | None):
        self._inner = executor._drafter
        self._table = executor._table
        self._rank = executor.rank
        self._references = references
        self._wrong = wrong

    def _known(self, slot: int) -> list[int]:
        return self._table.history(slot).tolist()

    def num_rows(self, slot: int, most: int) -> int:
        return self._inner.num_rows(slot, most)

    def draft(self, windows: Any, tokens: np.ndarray) -> None:
        self._inner.draft(windows, tokens)
        for window in windows:
            if window.lane != self._rank or window.num_rows == 1:
                continue
            known, drafts = self._known(window.slot), slice(window.first_row + 1, window.first_row + window.num_rows)
            assert len(known) == window.start + 1
            if len(known) % 3 == 0:
                expected = self._references.drafts(known)[:window.num_rows - 1]
                assert tokens[drafts].tolist()[:len(expected)] == expected, f"drafts after {len(known)} tokens"
            if self._wrong is not None:
                found = np.array(self._references.follow(known, window.num_rows - 1))
                found[self._wrong:self._wrong + 1] ^= 1
                tokens[drafts] = found

    def extend(self, rows: Any, following: Any, hidden: Any, windows: Any, runs: Any, gate: Any) -> None:
        self._inner.extend(rows, following, hidden, windows, runs, gate)
        for window, run in runs:
            known = self._known(window.slot) + run.tolist()
            state = self._inner._states[window.slot]
            gap = float((state - self._references.state(known)).abs().max())
            assert gap < TOLERANCE, f"chain state after {len(known)} tokens is off by {gap}"

    def exchange(self, windows: Any) -> None:
        self._inner.exchange(windows)


def watch(engine: Engine, references: References, wrong: int | None = None) -> None:
    """Check every rank of an engine that keeps histories."""
    for executor in executors_of(engine):
        executor._table._keeps_history = True
        executor._drafter = CheckedDrafter(executor, references, wrong)


def executors_of(engine: Engine) -> list[Any]:
    runner: Any = engine.executor
    return list(runner._executors) if hasattr(runner, "_executors") else [runner._executor]
