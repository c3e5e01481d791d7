"""Prefix pages one layer, or one tile, ahead of their use: one host thread per rank fetches while the layers before compute."""
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType

import torch

from sglane import environ
from sglane.forward.layer_hooks import OPEN_GATE, LayerGate
from sglane.forward.worker_thread import use_one_compute_thread
from sglane.layers.attention.prefix import PageTile, PrefixPages, PrefixPlan
from sglane.utils import fallback


def wants_prefetch(plan: PrefixPlan) -> bool:
    """One gate for all planes, the same on every rank: a page of every lane, and enough tokens to be worth a hand-over."""
    return plan.fewest >= 1 and plan.num_tokens >= environ.SGLANE_CP_PREFETCH_MIN_TOKENS


class PrefetchThread:
    """The host thread of one rank. First in, first out, so that the collectives of all ranks meet in the same order."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "prefix-prefetch", initializer=use_one_compute_thread)
        self._pool.submit(int).result()  # before the rank sets its own number of compute threads

    def submit(self, source: "PrefixSource", plan: PrefixPlan, layer: int, tile: int) -> Future[PageTile]:
        return self._pool.submit(fetch, source, plan, layer, tile)


@dataclass(frozen=True)
class PrefixSource:
    """Where the prefix pages of plane `name` come from, and what they wait for."""

    name: str
    pages: PrefixPages
    gate: LayerGate


@torch.inference_mode()
def fetch(source: PrefixSource, plan: PrefixPlan, layer: int, tile: int) -> PageTile:
    """The tile's pages, here."""
    source.gate.wait(source.name, layer)
    return source.pages.launch(layer, source.pages.materialise(layer, plan.tiles[tile]))


class PrefixReader:
    """The prefix tiles of one step, plane by plane in the order (layer, tile). A context: what was launched has ended when it is left.

    Of each plane one tile is in use and one on its way. The next one is launched when one is taken, so the launches, too, follow from the
    plan and are the same on every rank.
    """

    def __init__(self, pages: Mapping[str, PrefixPages], plan: PrefixPlan, thread: PrefetchThread | None, gate: LayerGate = OPEN_GATE):
        """pages: by plane name. thread: None on one rank, where nothing has to be fetched. gate: passed before a layer's pages are read."""
        self._sources = {name: PrefixSource(name, found, gate) for name, found in pages.items()}
        self._plan = plan
        self._thread = thread if wants_prefetch(plan) else None
        self._ahead: dict[tuple[str, int, int], Future[PageTile]] = {}
        self._held: dict[str, PageTile] = {}
        #: Time that `take` took: what of the fetches was not hidden behind computing.
        self.waited_s = 0.0

    def __enter__(self) -> "PrefixReader":
        if self._thread is not None:
            for name in sorted(self._sources):  # target.index is needed before target.kv
                self._launch(self._thread, name, 0, 0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Nothing is cancelled: other ranks may be inside the same collective.
        ahead = list(self._ahead.values())
        wait(ahead)
        self._ahead.clear()
        self._held.clear()
        if error is None:
            for future in ahead:
                future.result()

    def take(self, name: str, layer: int, tile: int) -> PageTile:
        """The pages of one tile; those of the plane's tile before are given back. Every rank takes the same tiles in the same order.

        Raises what went wrong in the thread.
        """
        if name in self._held:
            self._held.pop(name).close()
        begin_s = time.perf_counter()
        if self._thread is None:
            found = fetch(self._sources[name], self._plan, layer, tile)
        else:
            found = self._take_ahead(self._thread, name, layer, tile)
        self.waited_s += time.perf_counter() - begin_s
        self._held[name] = found
        return found

    def _take_ahead(self, thread: PrefetchThread, name: str, layer: int, tile: int) -> PageTile:
        if (name, layer, tile) not in self._ahead:
            fallback.count("cp_prefetch_late")
            self._launch(thread, name, layer, tile)
        found = self._ahead.pop((name, layer, tile)).result()
        if tile + 1 < len(self._plan.tiles):
            self._launch(thread, name, layer, tile + 1)
        elif layer + 1 < self._sources[name].pages.num_layers:
            self._launch(thread, name, layer + 1, 0)
        return found

    def _launch(self, thread: PrefetchThread, name: str, layer: int, tile: int) -> None:
        if (name, layer, tile) not in self._ahead:
            self._ahead[name, layer, tile] = thread.submit(self._sources[name], self._plan, layer, tile)
