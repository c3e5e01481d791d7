"""From the hidden states of a step to the tokens of this rank's windows, with their log probabilities."""
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from sglane.forward.window import Window
from sglane.model_executor import logprobs, sampler
from sglane.model_executor.model_runner import ModelRunner, StepForward
from sglane.model_executor.slot_table import Slot, SlotTable, TokenMask
from sglane.plan.io_struct import Grammar
from sglane.plan.step_plan import LogprobBlock
from sglane.speculative.accept import accepted_runs


class Grammars(Protocol):
    """Compiles grammars for the model's vocabulary."""

    def mask(self, grammar: Grammar) -> TokenMask:
        """For the beginning of an answer."""
        ...


class StepSampler:
    """Sampling parameters come from the slot table, grammars from the request's first sampled token on."""

    def __init__(self, runner: ModelRunner, table: SlotTable, grammars: Grammars | None):
        """grammars: None: no request may have one."""
        self._runner = runner
        self._table = table
        self._grammars = grammars

    def sample(self, forward: StepForward, windows: Sequence[Window], tokens: np.ndarray) -> tuple[list[np.ndarray], list[LogprobBlock]]:
        """windows: this rank's. tokens int64 [T] of the step, drafts included. Returns each window's tokens int64 [c]: its accepted drafts and one
        more, and the log probabilities that were asked for."""
        if not windows:
            return [], []
        rows = np.concatenate([window.rows for window in windows])
        counts = np.array([window.num_rows for window in windows])
        firsts = np.cumsum(counts) - counts
        logits = self._runner.logits(forward.rows_of(rows))  # [rows of all windows, V]
        data = [self._constrained(window.slot) for window in windows]

        def pick(going: list[int], taken: list[list[int]]) -> np.ndarray:
            index = [firsts[i] + len(run) for i, run in zip(going, taken)]
            chosen = logits if len(index) == len(logits) else logits[index]
            return sampler.sample(chosen, [sampler.SampleRow(windows[i].slot, windows[i].start + 1 + len(run), data[i], run)
                                           for i, run in zip(going, taken)])

        runs = accepted_runs([tokens[window.drafts] for window in windows], pick)
        blocks = [self._block(logits[first:first + len(run)], window, run, slot)
                  for window, first, run, slot in zip(windows, firsts.tolist(), runs, data) if slot.sampling.logprobs]
        return runs, blocks

    def _block(self, logits: Tensor, window: Window, run: np.ndarray, slot: Slot) -> LogprobBlock:
        positions = np.arange(window.start + 1, window.start + 1 + len(run))
        return logprobs.block(window.slot, positions, run, [logprobs.score(logits, run, slot.sampling)])

    def _constrained(self, slot: int) -> Slot:
        """The slot's data, its grammar compiled if it has one."""
        data = self._table.get(slot)
        if data.sampling.grammar is not None and data.mask is None:
            assert self._grammars is not None, f"slot {slot} has a grammar, but this rank has no vocabulary"
            data.constrain(self._grammars.mask(data.sampling.grammar))
        return data
