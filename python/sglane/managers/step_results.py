"""Merges the results of all ranks into one result per step, in step order."""
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglane.plan.io_struct import LogprobChunk
from sglane.plan.step_plan import LogprobBlock, StepResult


@dataclass
class MergedStep:
    """What all ranks together know after a step."""

    step: int
    tokens: dict[int, npt.NDArray[np.int32]] = field(default_factory=dict)  # slot -> accepted tokens
    num_drafts: dict[int, int] = field(default_factory=dict)  # slot -> drafts that were verified, if there were any
    logprobs: dict[int, list[LogprobBlock]] = field(default_factory=dict)  # slot -> blocks

    def add(self, result: StepResult) -> None:
        slots = np.frombuffer(result.slots, np.int32).tolist()
        counts = np.frombuffer(result.num_tokens, np.int32)
        tokens = np.frombuffer(result.tokens, np.int32)
        for slot, part in zip(slots, np.split(tokens, np.cumsum(counts)[:-1])):
            assert slot not in self.tokens, f"step {result.step}: slot {slot} was sampled by two ranks, one is {result.rank}"
            self.tokens[slot] = part
        self.num_drafts.update({slot: count for slot, count in zip(slots, np.frombuffer(result.num_drafts, np.int32).tolist()) if count})
        for block in result.logprobs:
            self.logprobs.setdefault(block.slot, []).append(block)


class ResultMerger:
    """Waits until every rank has answered; a gap or a repetition in a rank's step numbers is fatal."""

    def __init__(self, num_ranks: int):
        self._next_step = [1] * num_ranks
        self._open: deque[MergedStep] = deque()
        self._num_answers: deque[int] = deque()
        self._first_open = 1

    def add(self, result: StepResult) -> None:
        expected = self._next_step[result.rank]
        assert result.step == expected, f"rank {result.rank} answered step {result.step}, expected {expected}"
        self._next_step[result.rank] = expected + 1
        while self._first_open + len(self._open) <= result.step:
            self._open.append(MergedStep(self._first_open + len(self._open)))
            self._num_answers.append(0)
        index = result.step - self._first_open
        self._open[index].add(result)
        self._num_answers[index] += 1

    def complete(self) -> list[MergedStep]:
        """Steps that every rank has answered, in order."""
        done = []
        while self._open and self._num_answers[0] == len(self._next_step):
            done.append(self._open.popleft())
            self._num_answers.popleft()
            self._first_open += 1
        return done

    def laggards(self, step: int) -> list[int]:
        """Ranks that have not answered `step` yet."""
        return [rank for rank, following in enumerate(self._next_step) if following <= step]


def to_chunk(block: LogprobBlock, num_tokens: int) -> LogprobChunk:
    """A rank's log probabilities of consecutive positions as the front gets them; of the first `num_tokens` at most."""
    num_rows = len(block.positions) // 4

    def first(data: bytes) -> bytes:
        return data if num_tokens >= num_rows else data[:len(data) // num_rows * num_tokens]

    first_position = int(np.frombuffer(block.positions, np.int32, 1)[0])
    return LogprobChunk(first_position, first(block.token_ids), first(block.logprobs), block.num_top, first(block.top_ids), first(block.top_logprobs),
                        first(block.asked_logprobs))
