"""Rows of a step that decide what follows them."""
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Window:
    """The last row of an extend, or all rows of a continue: its last token and its drafts. The same on every rank."""

    slot: int
    start: int  # position of the first of the rows
    first_row: int  # its place in the global order of the step's tokens
    num_rows: int
    pages: np.ndarray  # int32, the slot's row
    lane: int  # the rank that computes all of the rows, and samples

    @property
    def rows(self) -> np.ndarray:
        """int64 [num_rows]: their places in the global order."""
        return np.arange(self.first_row, self.first_row + self.num_rows)

    @property
    def drafts(self) -> slice:
        """Of the step's tokens in global order."""
        return slice(self.first_row + 1, self.first_row + self.num_rows)

    @property
    def end(self) -> int:
        """Position after the last of the rows."""
        return self.start + self.num_rows
