"""EAGLE chain, top-k 1, over the model's own NextN layer.

Row i of the draft layer takes the embedding of token i + 1 and the target's hidden state i after the final norm; its output g[i], after the layer's
own norm, gives token i + 2 through the target's head. Every step ends with a pass over all its rows (draft extend), so the draft planes have exactly
the rows that the target planes have. The g of a slot's last row is its chain state. A window's first draft comes from it, the next ones from passes
over scratch rows, in which g of the row before stands for the hidden state that is not known yet; the draft extend overwrites them.
"""
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sglane.distributed.exchange.local import Exchange
from sglane.forward.layer_hooks import OPEN_GATE, LayerGate
from sglane.forward.token_split import Entry, TokenSplit
from sglane.forward.window import Window
from sglane.layers.attention.step_view import StepRows
from sglane.speculative.drafter import Run


class DraftRunner(Protocol):
    """Runs the draft layer; see ModelRunner."""

    def split(self, entries: list[Entry]) -> TokenSplit: ...

    def rows(self, entries: list[Entry], num_extends: int, split: TokenSplit) -> StepRows: ...

    def draft(self, rows: StepRows, tokens: np.ndarray, hidden: Tensor, own: np.ndarray, max_outputs: int, *, ends_step: bool,
              gate: LayerGate) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class NextnDrafter:
    """Chain states and the passes of the draft layer on one rank."""

    reads_all_rows = True

    def __init__(self, runner: DraftRunner, exchange: Exchange, states: Tensor, page_size: int):
        """exchange: the one that ends a step. states [slots, hidden]: chain states; a slot's is right on the rank where its next row lies."""
        self._runner = runner
        self._exchange = exchange
        self._states = states
        self._page_size = page_size

    def num_rows(self, slot: int, most: int) -> int:
        return most

    def draft(self, windows: Sequence[Window], tokens: np.ndarray) -> None:
        """See Drafter. Ranks without a window take part in the passes."""
        going = [window for window in windows if window.num_rows > 1]
        if not going:
            return
        mine = [window for window in going if window.lane == self._exchange.rank]
        hidden = self._states[self._slots(mine)]  # [m, hidden]
        drafted = self._first_of(hidden)  # int64 [m]
        tokens[[window.first_row + 1 for window in mine]] = drafted
        for j in range(2, max(window.num_rows for window in going)):
            going = [window for window in going if window.num_rows > j]
            kept = [i for i, window in enumerate(mine) if window.num_rows > j]
            mine, hidden, drafted = [mine[i] for i in kept], hidden[kept], drafted[kept]
            hidden = self._chain([(window, window.start + j - 2) for window in going], drafted, hidden)
            drafted = self._first_of(hidden)
            tokens[[window.first_row + j for window in mine]] = drafted

    def _chain(self, places: list[tuple[Window, int]], drafted: np.ndarray, hidden: Tensor) -> Tensor:
        """One pass over one row of each of these windows, at its position. drafted int64 [m] and hidden [m, hidden] of this rank's; returns g."""
        entries = [Entry(window.slot, position, 1, window.pages) for window, position in places]
        split = self._runner.split(entries)
        rows = self._runner.rows(entries, 0, split)
        tokens = np.zeros(len(places), np.int64)
        tokens[rows.local] = drafted
        return self._runner.draft(rows, tokens, hidden, rows.local, split.max_length, ends_step=False, gate=OPEN_GATE)

    def _first_of(self, hidden: Tensor) -> np.ndarray:
        """hidden [m, hidden]; returns the likeliest tokens int64 [m]."""
        if not len(hidden):
            return np.zeros(0, np.int64)
        found: np.ndarray = self._runner.logits(hidden).argmax(-1).cpu().numpy()
        return found

    def extend(self, rows: StepRows, following: np.ndarray, hidden: Tensor, windows: Sequence[Window], runs: Sequence[Run], gate: LayerGate) -> None:
        """See Drafter. The rows of a window that were not accepted are computed too: their number is not known to the other ranks, and later steps
        overwrite them."""
        last = np.array([window.first_row + len(run) - 1 for window, run in runs], np.int64)
        per_lane = np.bincount([window.lane for window in windows], minlength=1)
        found = self._runner.draft(rows, following, hidden, last, int(per_lane.max()), ends_step=True, gate=gate)
        if runs:
            self._states[self._slots([window for window, _ in runs])] = found

    def exchange(self, windows: Sequence[Window]) -> None:
        """The chain states of slots that reach the end of a page if all their drafts are accepted: their next row may lie in another lane."""
        if self._exchange.size == 1:
            return
        moving = [window for window in windows if window.end % self._page_size == 0]
        if moving:
            slots = self._slots(moving)
            lanes = torch.tensor([window.lane for window in moving])
            every = self._exchange.all_gather(self._states[slots].cpu())  # [N, m, hidden]
            self._states[slots] = every[lanes, torch.arange(len(moving))].to(self._states.device)

    def _slots(self, windows: Sequence[Window]) -> Tensor:
        return torch.tensor([window.slot for window in windows], dtype=torch.int64, device=self._states.device)
