"""Drafts that a test decides: the tokens of a run without speculation, some of them wrong. And the histories that drafts are looked up in, compared
with what is known of these runs.

    script = Script(); script.add(prompt, output); follow(engine, script)
"""
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from kits.checked_drafts import executors_of
from kits.engine import Engine
from kits.process_ranks import serve_plans
from sglane.configs.model_config import load_model_config
from sglane.distributed.groups import Groups
from sglane.layers.moe.shard import ExpertShard
from sglane.model_executor.loader import load_model
from sglane.speculative.drafter import LookupDrafter

#: Proposed after the end of an output.
FILLER = 5


class Script:
    """Outputs of runs without speculation. A draft is wrong if its position is 3 modulo 5."""

    def __init__(self) -> None:
        self._sequences: list[tuple[list[int], Mapping[int, int]]] = []
        self.num_asked = 0

    def add(self, prompt: Sequence[int], output: Sequence[int], wrong: Mapping[int, int] | None = None) -> None:
        """wrong: what is proposed instead where drafts are wrong, by index in the output; by default a neighbour of the right token."""
        prompt, output = [int(token) for token in prompt], [int(token) for token in output]
        found = {p: token ^ 1 for p, token in enumerate(prompt + output) if p % 5 == 3}
        found |= {len(prompt) + i: token for i, token in (wrong or {}).items() if (len(prompt) + i) % 5 == 3}
        self._sequences.append((prompt + output, found))

    def begins(self, known: Sequence[int]) -> bool:
        """A sequence begins so."""
        return any(tokens[:len(known)] == list(known) for tokens, _ in self._sequences)

    def drafts(self, known: Sequence[int], count: int) -> list[int]:
        """`known` must be the beginning of a sequence, or a whole one with tokens behind it that nobody takes."""
        self.num_asked += 1
        known = list(known)
        found = [each for each in self._sequences if each[0][:len(known)] == known[:len(each[0])]]
        assert found, f"{len(known)} tokens {known[-8:]} begin no sequence"
        tokens, wrong = found[0]
        positions = range(len(known), len(known) + count)
        return [wrong.get(p, tokens[p]) if p < len(tokens) else FILLER for p in positions]


class ScriptedDrafter:
    """Around a rank's drafter with a draft layer, whose passes it makes all the same."""

    reads_all_rows = True

    def __init__(self, executor: Any, script: Script):
        self._inner = executor._drafter
        self._table = executor._table
        self._rank = executor.rank
        self._script = script

    def num_rows(self, slot: int, most: int) -> int:
        return self._inner.num_rows(slot, most)

    def draft(self, windows: Any, tokens: np.ndarray) -> None:
        self._inner.draft(windows, tokens)
        for window in windows:
            if window.lane == self._rank and window.num_rows > 1:
                drafts = self._script.drafts(self._table.history(window.slot).tolist(), window.num_rows - 1)
                tokens[window.first_row + 1:window.first_row + window.num_rows] = drafts

    def extend(self, *arguments: Any) -> None:
        self._inner.extend(*arguments)

    def exchange(self, windows: Any) -> None:
        self._inner.exchange(windows)


class ScriptedLookup:
    """In place of prompt lookup; inner: the lookup whose drafts are kept, of histories that are checked. None: drafts of the script."""

    def __init__(self, script: Script, num_drafts: int, inner: Any = None):
        self._script = script
        self._num_drafts = num_drafts
        self._inner = inner

    def find(self, tokens: np.ndarray) -> np.ndarray:
        drafts = np.array(self._script.drafts(tokens.tolist(), self._num_drafts), np.int32)
        return drafts if self._inner is None else self._inner.find(tokens)


def follow(engine: Engine, script: Script, own: bool = False) -> Engine:
    """Every rank of the engine proposes what the script says. own: it keeps what it looks up itself, and its histories are checked."""
    for executor in executors_of(engine):
        script_rank(executor, script, own)
    return engine


def script_rank(executor: Any, script: Script, own: bool = False) -> None:
    if isinstance(executor._drafter, LookupDrafter):
        lookup = executor._drafter._lookup
        executor._drafter._lookup = ScriptedLookup(script, lookup._num_drafts, lookup if own else None)
    else:
        executor._table._keeps_history = True
        executor._drafter = ScriptedDrafter(executor, script)


def speculating_worker(rank: int, groups: Groups, pipe: Connection, path: str, page_size: int, num_rows: int,
                       sequences: list[tuple[list[int], list[int]]]) -> None:
    """Serves plans as a rank of a model with a draft layer, in float32. sequences: prompts and outputs of the script."""
    script = Script()
    for prompt, output in sequences:
        script.add(prompt, output)
    config = load_model_config(path, None, "")
    model = load_model(config, torch.device("cpu"), torch.float32, show_progress=False, shard=ExpertShard(rank, groups.experts.size))
    serve_plans(config, model, rank, groups, pipe, page_size, num_rows, lambda executor: script_rank(executor, script), dtype="float32",
                model_path=path, speculative_algorithm="NEXTN", speculative_num_steps=3)
