"""What an executor asks of whoever makes its drafts."""
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from sglane.forward.layer_hooks import LayerGate
from sglane.forward.window import Window
from sglane.layers.attention.step_view import StepRows

#: A window of this rank with the tokens it has yielded, int64 [c].
Run = tuple[Window, np.ndarray]


class Drafter(Protocol):
    """Every rank makes the same calls. Which windows a step has is known to all ranks, what they hold to the rank that computes them."""

    #: The draft extend needs the hidden states of all rows of a step, not only of those that are sampled from.
    reads_all_rows: bool

    def num_rows(self, slot: int, most: int) -> int:
        """Rows of a continue that may feed up to `most` >= 2: 1 .. most, the same on every rank."""
        ...

    def draft(self, windows: Sequence[Window], tokens: np.ndarray) -> None:
        """Write the drafts of this rank's windows to tokens int64 [T], behind the first row of each."""
        ...

    def extend(self, rows: StepRows, following: np.ndarray, hidden: Tensor, windows: Sequence[Window], runs: Sequence[Run], gate: LayerGate) -> None:
        """Compute what later drafts need of a step's rows. following int64 [T]: the token after each row; hidden [n, hidden]: the local rows after
        the target's final norm; runs: of this rank's windows."""
        ...

    def exchange(self, windows: Sequence[Window]) -> None:
        """With the step exchange: slots may go on in another lane."""
        ...


class NoDrafter:
    """Every continue feeds its last token and nothing else."""

    reads_all_rows = False

    def num_rows(self, slot: int, most: int) -> int:
        return 1

    def draft(self, windows: Sequence[Window], tokens: np.ndarray) -> None:
        pass

    def extend(self, rows: StepRows, following: np.ndarray, hidden: Tensor, windows: Sequence[Window], runs: Sequence[Run], gate: LayerGate) -> None:
        pass

    def exchange(self, windows: Sequence[Window]) -> None:
        pass


class LookupDrafter(NoDrafter):
    """Prompt lookup: drafts are what followed the same tokens earlier in the slot."""

    def __init__(self, histories: "Histories", lookup: "Lookup"):
        self._histories = histories
        self._lookup = lookup
        self._found: dict[int, np.ndarray] = {}  # of the step under way, by slot

    def num_rows(self, slot: int, most: int) -> int:
        found = self._lookup.find(self._histories.history(slot))[:most - 1]
        self._found[slot] = found
        return 1 + len(found)

    def draft(self, windows: Sequence[Window], tokens: np.ndarray) -> None:
        for window in windows:
            if window.num_rows > 1:
                tokens[window.drafts] = self._found[window.slot]
        self._found.clear()


class Histories(Protocol):
    """All tokens of every slot."""

    def history(self, slot: int) -> np.ndarray:
        """int32 [n], a view."""
        ...


class Lookup(Protocol):
    """A pure function of the tokens so far."""

    def find(self, tokens: np.ndarray) -> np.ndarray:
        """tokens int32 [n]; returns drafts int32 [m], m may be 0."""
        ...
