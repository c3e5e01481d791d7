"""The in-process engine over real weights: a tiny checkpoint, one rank or several ranks as threads."""
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kits.engine import Engine
from kits.thread_ranks import ThreadGroup, map_pools
from kits.ticket_box import TicketBox
from sglane.configs.model_config import load_model_config
from sglane.layers.moe.shard import ExpertShard
from sglane.mem_cache.kv_ledger import HostOptions
from sglane.mem_cache.page_layout import PageLayout
from sglane.model_executor.executor import Executor, Grammars
from sglane.model_executor.loader import load_model
from sglane.models.causal_lm import CausalLM
from sglane.plan.step_plan import PoolInit, StepPlan, StepResult
from sglane.server_args import ServerArgs


class OneRank:
    """An executor without a process."""

    def __init__(self, executor: Executor):
        self._executor = executor

    def run(self, plan: StepPlan) -> list[StepResult]:
        return [self._executor.run(plan)]


class ThreadRanks:
    """Executors of all ranks, one thread each."""

    def __init__(self, executors: list[Executor], group: ThreadGroup):
        self._executors = executors
        self._group = group

    def run(self, plan: StepPlan) -> list[StepResult]:
        return self._group.run(lambda rank: self._executors[rank].run(plan))


class TinyModel:
    """A loaded checkpoint that many engines share; with several ranks, each has its own share of the experts."""

    def __init__(self, path: Path, **flags: Any):
        """flags: further ServerArgs of all engines, those of speculation for example."""
        torch.set_num_threads(1)
        self.path = path
        self._flags = flags
        self.config = load_model_config(str(path), None, self._args(4, 1, 1).draft_path())
        self.weights = self._load(ExpertShard(0, 1))
        self._shards: dict[int, list[CausalLM]] = {}

    def engine(self, *, page_size: int = 4, chunk: int = 8, num_pages: int = 128, num_slots: int = 8, overlap: bool = True, tap: Any = None,
               grammars: Grammars | None = None, scratch_tokens: int = 1 << 17, **limits: Any) -> Engine:
        """A fresh pool and slot table; `tap` sees the selected index sets. limits: also num_host_pages, min_hits (see HostOptions)."""
        host = host_options(limits, 1)
        limits = {**self._limits(), **limits}
        executor = Executor(self.config, self.weights, self._args(page_size, 1, scratch_tokens), tap=tap)
        if grammars is not None:
            executor.use_grammars(grammars)
        copies = self._init(executor, PoolInit(num_pages + 1, num_slots, num_pages, host.num_rows if host else 0), TicketBox())
        return Engine(OneRank(executor), PageLayout(page_size, 1), num_pages + 1, num_slots, chunk, overlap, host=host, copies=copies, **limits)

    def ranks(self, cp_size: int, *, page_size: int = 4, chunk: int = 8, num_pages: int = 128, num_slots: int = 8, overlap: bool = True,
              make_grammars: Callable[[], Grammars] | None = None, scratch_tokens: int = 1 << 17, mapped: bool = False, **limits: Any) -> Engine:
        """The same over `cp_size` lanes; num_pages counts all lanes. make_grammars: called once for each rank. mapped: ranks read the pools of
        all lanes in place."""
        num_rows = num_pages // cp_size + 1
        host, copies = host_options(limits, cp_size), TicketBox()
        limits = {**self._limits(), **limits}
        group, executors = ThreadGroup(cp_size), []
        weights = self.shards(cp_size)
        for rank in range(cp_size):
            executor = Executor(self.config, weights[rank], self._args(page_size, cp_size, scratch_tokens), rank, group.groups(rank))
            if make_grammars is not None:
                executor.use_grammars(make_grammars())
            self._init(executor, PoolInit(num_rows, num_slots, num_pages, host.num_rows if host else 0), copies)
            executors.append(executor)
        if mapped:
            map_pools(executors)
        return Engine(ThreadRanks(executors, group), PageLayout(page_size, cp_size), num_rows, num_slots, chunk, overlap, host=host, copies=copies,
                      **limits)

    def _init(self, executor: Executor, init: PoolInit, copies: TicketBox) -> TicketBox:
        executor.use_reporter(lambda: copies)
        executor.init_pool(init)
        return copies

    def shards(self, cp_size: int) -> list[CausalLM]:
        """The weights of each rank; dense models are whole on all of them."""
        if cp_size == 1 or self.config.moe is None:
            return [self.weights] * cp_size
        if cp_size not in self._shards:
            self._shards[cp_size] = [self._load(ExpertShard(rank, cp_size)) for rank in range(cp_size)]
        return self._shards[cp_size]

    def _load(self, shard: ExpertShard) -> CausalLM:
        return load_model(self.config, torch.device("cpu"), torch.float32, show_progress=False, shard=shard)

    def _limits(self) -> dict[str, Any]:
        args = self._args(4, 1, 1)
        return {"max_drafts": args.num_drafts(), "bigram_keys": args.uses_draft_layer(), "keeps_history": args.looks_up_prompts()}

    def _args(self, page_size: int, cp_size: int, scratch_tokens: int) -> ServerArgs:
        return ServerArgs(model_path=str(self.path), dtype="float32", page_size=page_size, cp_size=cp_size, enable_cp_shared_kv=cp_size > 1,
                          cp_scratch_tokens=scratch_tokens, **self._flags)


def host_options(limits: dict[str, Any], cp_size: int) -> HostOptions | None:
    """Takes its fields out of `limits`; num_host_pages counts all lanes."""
    num_pages, min_hits = limits.pop("num_host_pages", 0), limits.pop("min_hits", 1)
    return HostOptions(num_pages // cp_size + 1, min_hits) if num_pages else None


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
