"""The in-process engine over real weights: a tiny checkpoint, one rank or several ranks as threads."""
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kits.engine import Engine
from sglane.configs.model_config import load_model_config
from sglane.mem_cache.page_layout import PageLayout
from sglane.model_executor.executor import Executor
from sglane.model_executor.loader import load_model
from sglane.plan.step_plan import PoolInit, StepPlan, StepResult
from sglane.server_args import ServerArgs


class OneRank:
    """An executor without a process."""

    def __init__(self, executor: Executor):
        self._executor = executor

    def run(self, plan: StepPlan) -> list[StepResult]:
        return [self._executor.run(plan)]


class TinyModel:
    """A loaded checkpoint that many engines share."""

    def __init__(self, path: Path):
        torch.set_num_threads(1)
        self.path = path
        self.config = load_model_config(str(path), None)
        self.weights = load_model(self.config, torch.device("cpu"), torch.float32, show_progress=False)

    def engine(self, *, page_size: int = 4, chunk: int = 8, num_pages: int = 128, num_slots: int = 8, overlap: bool = True, tap: Any = None,
               **limits: Any) -> Engine:
        """A fresh pool and slot table; `tap` sees the selected index sets."""
        layout = PageLayout(page_size, 1)
        args = ServerArgs(model_path=str(self.path), dtype="float32", page_size=page_size)
        executor = Executor(self.config, self.weights, args, tap=tap)
        num_rows = num_pages + 1
        executor.init_pool(PoolInit(num_rows, num_slots, num_pages))
        return Engine(OneRank(executor), layout, num_rows, num_slots, chunk, overlap, **limits)


def full_logprobs(vocab_size: int) -> dict[str, Any]:
    """Sampling fields that report the log probability of every token of the vocabulary at every position."""
    return {"logprobs": True, "logprob_token_ids": list(range(vocab_size))}


def reported_logprobs(engine: Engine, rid: str, vocab_size: int) -> np.ndarray:
    """float32 [positions, vocab]: prompt positions 1.., then one row per output token."""
    rows = []
    for message in engine.messages[rid]:
        for chunk in [*message.input_logprobs, *message.output_logprobs]:
            rows.append(np.frombuffer(chunk.asked_logprobs, np.float32).reshape(-1, vocab_size))
    return np.concatenate(rows)
