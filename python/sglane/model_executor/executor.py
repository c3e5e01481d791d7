"""One rank: carries out plans strictly in order, in the order of duties stated in `plan/step_plan.py`."""
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from sglane import environ
from sglane.distributed.groups import Groups, local_groups
from sglane.forward.layer_hooks import OPEN_GATE, Holds, LayerGate, StepHooks, step_marks
from sglane.forward.window import Window
from sglane.layers.attention.cost import RowWidths, gathers_queries
from sglane.layers.attention.indexer import SelectionTap
from sglane.layers.attention.step_view import StepRules
from sglane.model_executor import logprobs
from sglane.model_executor.copy_engine import CopyEngine, TicketReporter
from sglane.model_executor.copy_jobs import CopyLayout
from sglane.model_executor.copy_orders import check_copies
from sglane.model_executor.host_pool import HostPool
from sglane.model_executor.kv_pool import KVPool, num_bytes_per_page, plane_specs
from sglane.model_executor.memory import available_bytes, host_rows, pool_rows, scratch_bytes
from sglane.model_executor.model_runner import Model, ModelRunner, ModelSizes
from sglane.model_executor.slot_table import SlotTable
from sglane.model_executor.step_batch import UNKNOWN, StepBatch, build_batch, continue_fields
from sglane.model_executor.step_sampler import Grammars, StepSampler
from sglane.model_executor.threads import ThreadPolicy
from sglane.plan.step_plan import ExecutorReady, Extend, LogprobBlock, PoolInit, StepPlan, StepResult, TicketEnded
from sglane.server_args import ServerArgs
from sglane.speculative.drafter import Drafter, LookupDrafter, NoDrafter
from sglane.speculative.nextn import NextnDrafter
from sglane.speculative.ngram import PromptLookup


@dataclass
class Wiring:
    """What the process around gives a rank before its pools are made."""

    open_reporter: Callable[[], TicketReporter]
    tap: SelectionTap | None
    grammars: Grammars | None = None


class Executor:
    """Slot table, pools, model and sampler of one rank. `init_pool` comes first, then `run` for plan 1, 2, 3, ..."""

    def __init__(self, config: ModelSizes, model: Model, args: ServerArgs, rank: int = 0, groups: Groups | None = None,
                 device: torch.device | None = None, report: Callable[[int, int], None] | None = None, tap: SelectionTap | None = None):
        """groups: the communicators if cp_size > 1. report(step, layer): sign of life inside a long step. tap: see SelectionTap."""
        self.rank = rank
        self._config = config
        self._model = model
        self._args = args
        self.groups = groups or local_groups()
        self._device = device or torch.device("cpu")
        self._threads = ThreadPolicy(args.ranks_per_node, model.weight_bytes)
        self._wiring = Wiring(_NoReporter, tap)
        self._specs = plane_specs(config.kv_planes(), self._dtype)
        marks = step_marks(self._device.type, self._specs[0].num_layers) if args.enable_layerwise_nvtx_marker else None
        self._holds = Holds.parse(environ.SGLANE_HOLD, rank)
        self._hooks = StepHooks(report or _no_report, self._holds, self._threads.adapt, marks)
        self._poison = environ.SGLANE_POISON
        self._step = 0  # last plan carried out
        self._copies: CopyEngine | None = None

    @property
    def _dtype(self) -> torch.dtype:
        return resolve_dtype(self._args, self._config)

    def ready(self, available: int) -> ExecutorReady:
        """What this rank can hold; available: device memory before the weights were loaded, in bytes."""
        page_bytes = num_bytes_per_page(self._specs, self._args.page_size)
        fixed_bytes = self._model.weight_bytes + scratch_bytes(self._specs, self._args.cp_scratch_tokens)
        max_rows = pool_rows(self._args, self._device, available, fixed_bytes, page_bytes)
        on_cpu = self._device.type == "cpu"
        taken_bytes = fixed_bytes + max_rows * page_bytes if on_cpu else 0  # a GPU's pool takes no RAM, and its weights have left it
        max_host_rows = host_rows(self._args, available if on_cpu else available_bytes(torch.device("cpu")), taken_bytes, page_bytes)
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
        return ExecutorReady(self.rank, self._specs, page_bytes, max_rows, self._model.weight_bytes, self._config.context_length,
                             self._config.vocab_size, name, max_host_rows=max_host_rows)

    def init_pool(self, init: PoolInit) -> None:
        """Allocate pools and slot table."""
        args = self._args
        page_ids = range(args.cp_size, init.num_rows * args.cp_size)
        self._table = SlotTable(init.num_slots, init.max_pages_per_slot, args.page_size, page_ids, args.looks_up_prompts())
        self._pool = KVPool(self._specs, init.num_rows, args.page_size, args.cp_size, self.rank, self._dtype, self._device, self.groups.pools)
        if self._poison:
            self._pool.poison(np.arange(page_ids.start, page_ids.stop, dtype=np.int32))
        self._runner = ModelRunner(self._model, self._pool, self.groups, self._hooks, args.page_size, self._device,
                                   StepRules(args.cp_scratch_tokens, self._directions()), self._wiring.tap)
        self._sampler = StepSampler(self._runner, self._table, self._wiring.grammars)
        self._drafter = self._make_drafter(init.num_slots)
        if init.num_host_rows:
            self._init_host(init.num_host_rows)

    def _make_drafter(self, num_slots: int) -> Drafter:
        args = self._args
        if args.uses_draft_layer():
            states = torch.zeros((num_slots, self._config.hidden_size), dtype=self._dtype, device=self._device)
            return NextnDrafter(self._runner, self.groups.step, states, args.page_size)
        if args.looks_up_prompts():
            sizes = args.speculative_ngram_min_match_window_size, args.speculative_ngram_max_match_window_size
            return LookupDrafter(self._table, PromptLookup(*sizes, args.num_drafts()))
        return NoDrafter()

    def _init_host(self, num_rows: int) -> None:
        args = self._args
        host = HostPool(self._specs, num_rows, args.page_size, args.cp_size, self.rank, self._dtype, self._device)
        if self._poison:
            host.poison(np.arange(args.cp_size, num_rows * args.cp_size, dtype=np.int32))
        layout = CopyLayout(self._specs, args.page_size, self._config.written_after())
        self._copies = CopyEngine(self._pool, host, layout, self._holds, self._wiring.open_reporter)
        self._hooks.tell_written(self._copies.layer_written)

    def _directions(self) -> Callable[[Sequence[tuple[int, int]]], list[bool]]:
        """Which extends send their queries to the lanes, by the bytes of this model's rows."""
        layers = {name: (num_layers, width) for name, num_layers, width in self._config.kv_planes() if name.startswith("target.")}
        num_layers = layers["target.kv"][0]
        key = sum(count * width for count, width in layers.values()) // num_layers  # layers that share a selection have no index keys
        widths = RowWidths(key, *self._config.query_widths())
        return partial(gathers_queries, widths=widths, num_ranks=self._args.cp_size, num_bytes_per_element=self._dtype.itemsize)

    def use_grammars(self, grammars: Grammars) -> None:
        """Without this, no request may have a grammar."""
        self._wiring.grammars = grammars

    def use_reporter(self, open_reporter: Callable[[], TicketReporter]) -> None:
        """Where the ends of loads and backups are told to, before `init_pool`. It is called in each thread that copies. Without this nobody
        hears of them."""
        self._wiring.open_reporter = open_reporter

    def work_ahead(self) -> bool:
        """Called while no plan is there: see KVPool.work_ahead."""
        return self._pool.work_ahead() or (self._copies is not None and self._copies.host.work_ahead())

    def check(self) -> None:
        """Called now and then while no plan is there. Raises CopyFailed if a load or backup has failed."""
        if self._copies is not None:
            self._copies.check()

    def close(self, finish: bool = True) -> None:
        """No plan follows. finish: loads and backups are carried out first; else they are given up. May be called again."""
        if self._copies is not None:
            copies, self._copies = self._copies, None
            copies.close(finish)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Carry out one plan. Raises AssertionError on a gap in the numbers or a plan that does not fit the slot table."""
        assert plan.step == self._step + 1, f"rank {self.rank}: plan {plan.step} came after plan {self._step}"
        self._step = plan.step
        self._hooks.begin(plan.step)
        if self._copies is not None and (self._poison or environ.SGLANE_DEBUG_LEDGER):
            check_copies(plan, self._args.cp_size, self._pool.num_rows, self._copies.host.num_rows)
        self._apply_slots(plan)
        gate = self._begin_copies(plan)
        batch = build_batch(plan, self._table, self._args.cp_size, self._drafter.num_rows)
        mine = [window for window in batch.windows if window.lane == self.rank]
        runs, blocks = self._compute(plan, batch, mine, gate)
        if self._copies is not None:
            self._copies.forward_ended(plan.step)
        self._hooks.before_exchange()
        num_extend_rows = batch.num_extend_rows
        for window, run in zip(batch.windows, self._exchange(batch.windows, mine, runs)):
            self._table.sampled(window.slot, run, len(run) if window.first_row >= num_extend_rows else 0)
        self._drafter.exchange(batch.windows)
        self._hooks.before_result()
        stalled = [slot for slot, lane in batch.stalled if lane == self.rank]
        none = [0] * len(stalled)
        return StepResult(
            plan.step, self.rank, slots=_ints([window.slot for window in mine] + stalled), num_tokens=_ints([len(run) for run in runs] + none),
            num_drafts=_ints([window.num_rows - 1 for window in mine] + none), tokens=_ints(np.concatenate(runs)) if runs else b"",
            logprobs=blocks, prefix_wait_s=self._runner.prefix_wait_s)

    def _apply_slots(self, plan: StepPlan) -> None:
        """Everything before the forward: slots, rows, poison, tail copies, new pages."""
        for slot in np.frombuffer(plan.releases, np.int32).tolist():
            self._table.release(slot)
        for update in plan.row_updates:
            self._table.update_row(update)
        self._pool.poison(np.frombuffer(plan.poison, np.int32))
        if plan.poison_host and self._copies is not None:
            self._copies.host.poison(np.frombuffer(plan.poison_host, np.int32))
        for start in plan.starts:
            self._pool.use(np.frombuffer(start.pages, np.int32))
            self._table.start(start)
        for copy in plan.tail_copies:
            self._poison_new(np.array([copy.dst_page], np.int32))
            if copy.from_host:
                assert self._copies is not None, f"step {plan.step}: a tail comes from the host tier, but there is none"
                self._copies.copy_tail(copy)
            else:
                self._pool.copy_tail(copy)
        if plan.tail_copies and self._pool.lanes:
            self.groups.attention.barrier()  # other ranks read these rows in this step; rows of earlier steps came with the step exchange
        for extend in plan.extends:
            self._append(extend.slot, np.frombuffer(extend.pages, np.int32))
        slots, _, new_pages = continue_fields(plan)
        for slot, pages in zip(slots.tolist(), new_pages):
            if len(pages):
                self._append(slot, pages)

    def _append(self, slot: int, pages: np.ndarray) -> None:
        self._poison_new(pages)
        self._pool.use(pages)
        self._table.append_pages(slot, pages)

    def _poison_new(self, pages: np.ndarray) -> None:
        if self._poison:
            self._pool.poison(pages)

    def _begin_copies(self, plan: StepPlan) -> LayerGate:
        """Loads, and backups of what earlier steps have written, go on beside the forward; the other backups follow its layers."""
        if self._copies is None:
            assert not (plan.loads or plan.backups or plan.needs_load), f"step {plan.step}: loads or backups, but there is no host tier"
            return OPEN_GATE
        for load in plan.loads:
            self._poison_new(np.frombuffer(load.device_pages, np.int32))
        return self._copies.begin(plan)

    def _compute(self, plan: StepPlan, batch: StepBatch, mine: list[Window], gate: LayerGate) -> tuple[list[np.ndarray], list[LogprobBlock]]:
        """Drafting, forward, sampling, draft extend. Returns the tokens int64 [c] of each of `mine`, and this rank's log probabilities."""
        if not batch.entries:
            return [], []
        split = self._runner.split(batch.entries)
        self._threads.for_step(split.max_length)
        self._drafter.draft(batch.windows, batch.tokens)
        # On every rank, whose tokens are wanted on all of them: the ranks of an expert layer must know how many rows each has.
        scored = [found for extend, first in zip(plan.extends, batch.firsts.tolist()) if (found := self._scored_prompt(extend, first)) is not None]
        rows = self._runner.rows(batch.entries, batch.num_extends, split)
        forward = self._runner.forward(rows, batch.tokens, self._outputs(batch, scored), gate)
        if self._poison:
            assert bool(forward.hidden.isfinite().all()), f"rank {self.rank}, step {plan.step}: a poisoned row was read"
        for entry, first in zip(batch.entries[:batch.num_extends], batch.firsts.tolist()):
            self._table.fed(entry.slot, batch.tokens[first:first + entry.num_tokens])
        blocks = [logprobs.score_prompt(self._runner, forward.rows_of(prompt.rows), prompt, self._table.get(prompt.slot).sampling)
                  for prompt in (found.only(split.lanes(found.rows) == self.rank) for found in scored) if len(prompt.rows)]
        runs, sampled_blocks = self._sampler.sample(forward, mine, batch.tokens)
        paired = list(zip(mine, runs))
        if self._drafter.reads_all_rows:
            self._drafter.extend(rows, batch.following(paired), forward.hidden, batch.windows, paired, gate)
        return runs, blocks + sampled_blocks

    def _outputs(self, batch: StepBatch, scored: list[logprobs.ScoredPrompt]) -> np.ndarray:
        """int64 [M], ascending: tokens of the step whose final hidden states are wanted."""
        if self._drafter.reads_all_rows:
            return np.arange(len(batch.tokens))
        wanted = [*(window.rows for window in batch.windows), *(prompt.rows for prompt in scored)]
        return np.unique(np.concatenate([np.zeros(0, np.int64), *wanted]))

    def _scored_prompt(self, extend: Extend, first: int) -> logprobs.ScoredPrompt | None:
        """Prompt tokens to score, by all ranks together; the row at position i scores the token at i + 1."""
        if extend.logprob_start < 0:
            return None
        slot = self._table.get(extend.slot)
        fed = np.frombuffer(extend.tokens, np.int32)
        known = fed[1:] if extend.lookahead < 0 else np.append(fed[1:], np.int32(extend.lookahead))
        positions = np.arange(len(known)) + extend.start + 1
        wanted = (positions >= extend.logprob_start) & (positions < slot.num_prompt_tokens)
        if not wanted.any():
            return None
        return logprobs.ScoredPrompt(extend.slot, first + wanted.nonzero()[0], positions[wanted], known[wanted])

    def _exchange(self, windows: list[Window], mine: list[Window], runs: list[np.ndarray]) -> list[np.ndarray]:
        """The one exchange that ends a step, also its fence: the tokens int64 [c] of the windows of all ranks."""
        if self.groups.step.size == 1:
            return runs
        found = {window.slot: run for window, run in zip(mine, runs)}
        own = torch.full((max(len(windows), 1), max((window.num_rows for window in windows), default=1)), UNKNOWN, dtype=torch.int64)
        for i, window in enumerate(windows):
            if window.slot in found:
                own[i, :len(found[window.slot])] = torch.from_numpy(found[window.slot])
        every = self.groups.step.all_gather(own).amax(0).numpy()  # [windows, most rows]
        counts = (every != UNKNOWN).sum(1)[:len(windows)]
        assert (counts > 0).all(), f"rank {self.rank}, step {self._step}: no rank sampled some of {[window.slot for window in windows]}"
        return [row[:count] for row, count in zip(every, counts.tolist())]


def _ints(values: Sequence[int] | np.ndarray) -> bytes:
    return np.asarray(values, np.int32).tobytes()


def _no_report(step: int, layer: int) -> None:
    """In-process use: nobody watches."""


class _NoReporter:
    """In-process use: nobody is told."""

    def send(self, message: TicketEnded) -> None:
        pass

    def close(self) -> None:
        pass


def resolve_dtype(args: ServerArgs, config: ModelSizes) -> torch.dtype:
    """Type of weights and KV cache."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return names[config.dtype if args.dtype == "auto" else args.dtype]
