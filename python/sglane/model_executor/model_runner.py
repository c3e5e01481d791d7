"""One forward of a step: from entries to the final hidden states of this rank's tokens."""
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sglane.distributed.groups import Groups
from sglane.forward.expert_rows import expert_rows
from sglane.forward.forward_batch import ForwardBatch, LayerHooks
from sglane.forward.layer_hooks import NO_HOOKS, OPEN_GATE, LayerGate
from sglane.forward.token_split import Entry, TokenSplit, split_tokens
from sglane.layers.attention.indexer import SelectionTap
from sglane.layers.attention.paged import PagedAttention
from sglane.layers.attention.prefetch import PrefetchThread, PrefixReader
from sglane.layers.attention.prefix import prefix_pages
from sglane.layers.attention.step_view import StepRows, StepRules, build_view
from sglane.model_executor.kv_pool import KVPool


class ModelSizes(Protocol):
    """What the executor needs of a model's configuration; ModelConfig has it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def context_length(self) -> int:
        """Longest prompt + output in tokens."""
        ...

    @property
    def dtype(self) -> str:
        """Type of the checkpoint: float32, bfloat16 or float16."""
        ...

    def kv_planes(self) -> tuple[tuple[str, int, int], ...]:
        """(name, layers, width in elements) of every plane."""
        ...

    def written_after(self) -> dict[str, tuple[int, ...]]:
        """For each layer of every plane the layer of the model after which its rows of a step are written; ascending."""
        ...

    def query_widths(self) -> tuple[int, int, int]:
        """Per token and layer: elements of the queries of all heads, of their partial results, and keys that are selected (0: all)."""
        ...


class Model(Protocol):
    """What the runner needs of a loaded model."""

    weight_bytes: int

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [m, hidden] of the batch's `outputs` after the final norm."""
        ...

    def draft(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """The draft layer, of models that were loaded with it. Each row's token is the one after it; hidden [n, hidden] of the same rows after the
        final norm. Returns [m, hidden] of the batch's `outputs`, after the layer's own norm."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden] -> float32 [m, V]."""
        ...


@dataclass(frozen=True)
class StepForward:
    """hidden [m, hidden] of the global tokens `tokens` int64 [m], ascending."""

    hidden: Tensor
    tokens: np.ndarray

    def rows_of(self, tokens: np.ndarray) -> Tensor:
        """Hidden rows [k, hidden] of global tokens int64 [k], all of which were asked for."""
        index = np.searchsorted(self.tokens, tokens)
        return self.hidden.index_select(0, torch.from_numpy(index).to(self.hidden.device))


class ModelRunner:
    """Runs the model over the local tokens of a step."""

    def __init__(self, model: Model, pool: KVPool, groups: Groups, hooks: LayerHooks, page_size: int, device: torch.device,
                 rules: StepRules, tap: SelectionTap | None = None):
        self._model = model
        self._pool = pool
        self._exchange = groups.attention
        self._experts = groups.experts
        self._hooks = hooks
        self._page_size = page_size
        self._device = device
        self._rules = rules
        self._tap = tap
        self._prefetch_exchange = groups.prefetch
        # Mapped pages are only copied; a thread that does so ahead takes a core from a rank that all others wait for. And it would read other lanes'
        # pools before the layer's own exchange has told that their loads have come.
        self._prefetch_thread = PrefetchThread() if groups.prefetch.size > 1 and not pool.lanes else None
        self.prefix_wait_s = 0.0  # since the start, see PrefixReader

    def split(self, entries: list[Entry]) -> TokenSplit:
        return split_tokens(entries, self._page_size, self._exchange.size)

    def rows(self, entries: list[Entry], num_extends: int, split: TokenSplit) -> StepRows:
        """entries: `num_extends` extends, then continues. Every rank calls it with the same arguments."""
        exchange = self._exchange
        view = build_view(entries, num_extends, split, exchange.rank, exchange.size, self._page_size, self._device, self._rules)
        return StepRows(split, split.local(exchange.rank), view)

    def forward(self, rows: StepRows, tokens: np.ndarray, outputs: np.ndarray, gate: LayerGate = OPEN_GATE) -> StepForward:
        """tokens int64 [T] in global order, those of other ranks may be anything; outputs int64 [M], ascending: tokens of all ranks, by their place
        in that order, whose hidden states are wanted; each rank returns its own. Every rank calls it, also without local tokens, with the same
        outputs. gate: what this rank's layers wait for."""
        lanes = rows.split.lanes(outputs)
        own = outputs[lanes == self._exchange.rank]
        max_outputs = int(np.bincount(lanes, minlength=1).max())
        with self._prefix("target.", rows, gate) as prefix:
            attention = PagedAttention(self._pool.plane("target.kv"), self._pool.planes.get("target.index"), rows.view, self._exchange, prefix,
                                       self._tap, gate)
            hidden = self._model.forward(self._batch(rows, tokens, own, max_outputs, attention, self._hooks))
        self.prefix_wait_s += prefix.waited_s
        return StepForward(hidden, own)

    def draft(self, rows: StepRows, tokens: np.ndarray, hidden: Tensor, own: np.ndarray, max_outputs: int, *, ends_step: bool,
              gate: LayerGate = OPEN_GATE) -> Tensor:
        """One pass of the draft layer over the same rows. tokens int64 [T], global order: the token after each row; hidden [n, hidden] of the local
        rows. Returns [m, hidden] of this rank's tokens `own` int64 [m], ascending; max_outputs: those of the rank that has most. ends_step: the
        rows of the draft planes are final."""
        with self._prefix("draft.", rows, gate) as prefix:
            attention = PagedAttention(self._pool.plane("draft.kv"), self._pool.planes.get("draft.index"), rows.view, self._exchange, prefix,
                                       None, gate)
            hooks = self._hooks if ends_step else NO_HOOKS
            found = self._model.draft(self._batch(rows, tokens, own, max_outputs, attention, hooks), hidden)
        self.prefix_wait_s += prefix.waited_s
        return found

    def _batch(self, rows: StepRows, tokens: np.ndarray, own: np.ndarray, max_outputs: int, attention: PagedAttention,
               hooks: LayerHooks) -> ForwardBatch:
        local, device = rows.local, self._device
        return ForwardBatch(torch.from_numpy(tokens[local]).to(device), torch.from_numpy(rows.split.positions[local]).to(device),
                            torch.from_numpy(np.searchsorted(local, own)).to(device), attention, hooks,
                            expert_rows(self._experts, rows.split.max_length), expert_rows(self._experts, max_outputs))

    def _prefix(self, kind: str, rows: StepRows, gate: LayerGate) -> PrefixReader:
        """kind: the beginning of the planes' names: the draft's are read by the draft, when the target has been computed."""
        pool = self._pool
        pages = {name: prefix_pages(plane, pool.lanes.get(name, []), self._prefetch_exchange) for name, plane in pool.planes.items()
                 if name.startswith(kind)}
        return PrefixReader(pages, rows.view.prefix, self._prefetch_thread, gate)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden] -> float32 [m, V]."""
        return self._model.logits(hidden)
