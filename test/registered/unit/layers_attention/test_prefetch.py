"""The prefix plan of a step, the thread that fetches ahead, and what travels between lanes."""
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from kits.attention_world import NUM_LAYERS, World, assign_pages, poisoned_plane
from kits.plan_driver import PlanDriver
from kits.process_ranks import process_ranks, run_on, toy_worker
from kits.toy_model import ToyConfig, ToyModel
from sglane import environ
from sglane.forward.token_split import Entry
from sglane.layers.attention import blocked
from sglane.layers.attention.blocked import query_tiles
from sglane.layers.attention.plane import Plane
from sglane.layers.attention.prefetch import PrefetchThread, PrefixReader, wants_prefetch
from sglane.layers.attention.prefix import FetchedTile, MappedPages, PageTile, PrefixPlan, PrefixTile, plan_prefix
from sglane.utils import fallback

CPU = torch.device("cpu")
NUM_TILES = 2
TIMEOUT_S = 20


def entry(start: int, num_tokens: int, pages: list[int]) -> Entry:
    return Entry(0, start, num_tokens, np.array(pages, np.int32))


def test_no_prefix_no_tiles() -> None:
    plan = plan_prefix([entry(0, 9, [4, 5, 6])], 4, 2, 100, CPU)
    assert plan.tiles == [] and not wants_prefetch(plan)


def test_shared_pages_are_fetched_once_and_tails_are_cut() -> None:
    first, second = entry(11, 3, [4, 7, 9, 10]), entry(13, 5, [4, 7, 8, 6, 12])  # pages of 4 tokens; the first two are shared
    plan = plan_prefix([first, entry(0, 5, [14, 15]), second], 4, 2, 1 << 10, CPU)
    (tile,) = plan.tiles
    assert sorted(tile.lane_rows[0].tolist()) == [4 // 2, 6 // 2, 8 // 2] and sorted(tile.lane_rows[1].tolist()) == [7 // 2, 9 // 2]
    assert (plan.num_tokens, plan.fewest) == (20, 2)
    page_at = {lane * tile.most + i: int(row) * 2 + lane for lane, rows in enumerate(tile.lane_rows) for i, row in enumerate(rows)}
    assert tile.pieces[1] is None
    for piece, want in ((tile.pieces[0], first), (tile.pieces[2], second)):
        assert [page_at[place] for place in piece.places.tolist()] == want.pages[:-(-want.start // 4)].tolist()
        assert piece.positions().tolist() == list(range(want.start))


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("scratch_tokens", [1, 64, 200])
def test_tiles_are_bounded_and_cover_every_token_once(cp_size: int, scratch_tokens: int) -> None:
    rng = np.random.default_rng(cp_size)
    pages = (rng.permutation(150) + cp_size).tolist()
    entries = [entry(301, 4, pages[:77]), entry(117, 4, pages[:20] + pages[100:110])]
    plan = plan_prefix(entries, 4, cp_size, scratch_tokens, CPU)
    bound = max(scratch_tokens // 2, cp_size * 4)  # a page of each lane at least
    assert all(tile.most * cp_size * 4 <= bound for tile in plan.tiles)
    for e, one in enumerate(entries):
        seen = [piece.positions() for tile in plan.tiles if (piece := tile.pieces[e]) is not None]
        assert all((np.diff(positions) > 0).all() for positions in seen)
        assert sorted(np.concatenate(seen).tolist()) == list(range(one.start))


@pytest.mark.parametrize(("fewest", "num_tokens", "wanted"), [(1, 1024, True), (3, 5000, True), (0, 5000, False), (1, 1023, False)])
def test_the_gate(fewest: int, num_tokens: int, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environ, "SGLANE_CP_PREFETCH_MIN_TOKENS", 1024)
    assert wants_prefetch(PrefixPlan([], num_tokens, fewest)) == wanted


class RecordedPages:
    """Says when a fetch begins, and counts the tiles that are alive."""

    def __init__(self, num_layers: int, before: Callable[[int], None] = lambda layer: None):
        self.num_layers = num_layers
        self.begun: list[tuple[int, str]] = []  # layer, thread
        self.alive = self.most_alive = 0
        self._before = before

    def materialise(self, layer: int, tile: PrefixTile) -> torch.Tensor:
        self.begun.append((layer, threading.current_thread().name))
        self._before(layer)
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        return torch.full((1, 4), float(layer))

    def launch(self, layer: int, pages: torch.Tensor) -> PageTile:
        owner = self

        class Tile(FetchedTile):
            def close(self) -> None:
                owner.alive -= 1
        return Tile(pages)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> PrefixPlan:
    """Two tiles, over the gate."""
    monkeypatch.setattr(environ, "SGLANE_CP_PREFETCH_MIN_TOKENS", 1)
    plan = plan_prefix([entry(16, 1, [2, 3, 4, 5, 6])], 4, 2, 16, CPU)
    assert len(plan.tiles) == NUM_TILES
    return plan


def value_of(tile: PageTile) -> float:
    out = torch.empty(1, 4)
    tile.fill(torch.tensor([0]), out)
    return float(out[0, 0])


def test_the_next_tile_is_on_its_way_while_one_is_used(plan: PrefixPlan) -> None:
    begun: list[threading.Event] = [threading.Event() for _ in range(3)]
    pages = RecordedPages(3, lambda layer: begun[layer].set())
    before = fallback.counts()
    with PrefixReader({"target.kv": pages}, plan, PrefetchThread()) as reader:
        assert begun[0].wait(TIMEOUT_S), "the first layer is not fetched before it is asked for"
        for layer in range(3):
            for tile in range(NUM_TILES):
                assert value_of(reader.take("target.kv", layer, tile)) == layer
            if layer < 2:
                assert begun[layer + 1].wait(TIMEOUT_S), "the next layer is not fetched while this one computes"
    assert [layer for layer, _ in pages.begun] == [0, 0, 1, 1, 2, 2], "beyond the last layer, or twice"
    assert {name for _, name in pages.begun} == {"prefix-prefetch_0"}
    assert pages.most_alive <= 2
    assert fallback.counts() == before


def test_planes_share_gate_and_thread_in_one_order(plan: PrefixPlan) -> None:
    order: list[str] = []
    kv, index = RecordedPages(2, lambda layer: order.append(f"kv{layer}")), RecordedPages(1, lambda layer: order.append(f"index{layer}"))
    with PrefixReader({"target.kv": kv, "target.index": index}, plan, PrefetchThread()) as reader:
        for layer in range(2):
            for name in ["target.index", "target.kv"][layer:]:
                for tile in range(NUM_TILES):
                    reader.take(name, layer, tile)
    assert order == ["index0", "kv0", "index0", "kv0", "kv1", "kv1"]


def test_a_late_launch_is_counted(plan: PrefixPlan) -> None:
    before = fallback.counts()["cp_prefetch_late"]
    pages = RecordedPages(3)
    with PrefixReader({"target.kv": pages}, plan, PrefetchThread()) as reader:
        assert value_of(reader.take("target.kv", 2, 0)) == 2.0
        assert fallback.counts()["cp_prefetch_late"] == before + 1
    assert {name for _, name in pages.begun} == {"prefix-prefetch_0"}, "a late fetch leaves the order of the thread"


def test_below_the_gate_the_caller_fetches(plan: PrefixPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environ, "SGLANE_CP_PREFETCH_MIN_TOKENS", 1 << 20)
    pages, before = RecordedPages(2), fallback.counts()
    with PrefixReader({"target.kv": pages}, plan, PrefetchThread()) as reader:
        assert pages.begun == []
        reader.take("target.kv", 0, 0)
    assert pages.begun == [(0, threading.current_thread().name)]
    assert fallback.counts() == before


def fail_at(bad: int) -> Callable[[int], None]:
    def before(layer: int) -> None:
        if layer == bad:
            raise OSError(f"layer {bad} is gone")
    return before


def test_an_error_of_the_thread_comes_up_where_the_pages_are_needed(plan: PrefixPlan) -> None:
    with pytest.raises(OSError, match="layer 1 is gone"), PrefixReader({"target.kv": RecordedPages(2, fail_at(1))}, plan, PrefetchThread()) as reader:
        for tile in range(NUM_TILES):
            reader.take("target.kv", 0, tile)
        reader.take("target.kv", 1, 0)
        raise AssertionError("pages that never came")


def test_an_error_of_pages_that_nobody_took_comes_up_at_the_end(plan: PrefixPlan) -> None:
    with pytest.raises(OSError, match="layer 0 is gone"), PrefixReader({"target.kv": RecordedPages(2, fail_at(0))}, plan, PrefetchThread()):
        pass


def test_nothing_runs_after_a_failed_step(plan: PrefixPlan) -> None:
    left = threading.Event()
    ended: list[bool] = []

    def slow(layer: int) -> None:
        left.wait(0.2)  # longer than the step takes to fail
        ended.append(left.is_set())

    with pytest.raises(ValueError, match="the model failed"), PrefixReader({"target.kv": RecordedPages(2, slow)}, plan, PrefetchThread()):
        raise ValueError("the model failed")
    left.set()
    assert ended == [False]


def run_world(cp_size: int, steps: list[list[tuple[int, int]]], mapped: bool) -> Iterator[World]:
    """The world after each step; steps: extends of slots of 24 tokens."""
    world = World(4, cp_size, assign_pages(np.random.default_rng(3), [24, 24], 4, cp_size), 32, mapped=mapped)

    def call(attention, layer, slots, positions):
        n = len(slots)
        return attention.gqa(layer, torch.ones(n, 4, 8), torch.ones(n, 2, 8), torch.ones(n, 2, 8), 0.5)
    for extends in steps:
        world.step(extends, [], call)
        yield world


@pytest.mark.parametrize("mapped", [False, True])
def test_rows_travel_once(mapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold extends: the layer's own rows, nothing else. With a prefix: its pages besides, by a collective only if they are not mapped."""
    monkeypatch.setattr(environ, "SGLANE_CP_PREFETCH_MIN_TOKENS", 1)
    calls = [(world.last_groups.attention.num_calls, world.last_groups.prefetch.num_calls)
             for world in run_world(2, [[(0, 12), (1, 9)], [(0, 5), (1, 5)]], mapped)]
    assert calls == [(NUM_LAYERS, 0), (NUM_LAYERS, 0 if mapped else NUM_LAYERS)]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_cold_extends_read_no_pool(cp_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a pool was read")
    for name in ("read_pages", "pages", "tokens"):
        monkeypatch.setattr(Plane, name, refuse)
    steps = run_world(cp_size, [[(0, 12), (1, 9)], [(0, 5)]], False)
    next(steps)
    with pytest.raises(AssertionError, match="a pool was read"):
        next(steps)


def test_all_layers_share_the_tiles_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = []
    monkeypatch.setattr(blocked, "query_tiles", lambda positions, *rest: cuts.append(len(positions)) or query_tiles(positions, *rest))
    found = []
    for _ in run_world(1, [[(0, 12), (1, 9)], [(0, 5)]], False):
        found.append(cuts.copy())
        cuts.clear()
    assert NUM_LAYERS > 1 and found == [[12, 9], [5]]


@pytest.mark.parametrize("bad_layer", range(NUM_LAYERS))
def test_a_rank_that_fails_ends_the_step_of_all(bad_layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fetches are waited for, those of the others end with it."""
    monkeypatch.setattr(environ, "SGLANE_CP_PREFETCH_MIN_TOKENS", 1)
    world = World(4, 2, assign_pages(np.random.default_rng(3), [24], 4, 2), 32)
    lock, calls = threading.Lock(), [0] * NUM_LAYERS

    def call(attention, layer, slots, positions, fails=False):
        n = len(slots)
        with lock:
            calls[layer] += 1
            first = calls[layer] == 1
        if fails and layer == bad_layer and first:
            raise ValueError("one rank fails")
        return attention.gqa(layer, torch.ones(n, 4, 8), torch.ones(n, 2, 8), torch.ones(n, 2, 8), 0.5)
    world.step([(0, 12)], [], call)
    calls[:] = [0] * NUM_LAYERS
    with pytest.raises(ValueError, match="one rank fails"):
        world.step([(0, 5)], [], lambda *arguments: call(*arguments, fails=True))


def test_pages_are_read_in_place_lane_by_lane() -> None:
    planes = [poisoned_plane("target.kv", 6, 2, 3) for _ in range(2)]
    for lane, plane in enumerate(planes):
        for row in range(1, 6):
            plane.buffer[row, 1] = float(row * 2 + lane)  # the page
    plan = plan_prefix([entry(7, 1, [5, 4, 9, 6])], 2, 2, 1 << 10, CPU)
    pages = MappedPages(planes)
    tile = pages.launch(1, pages.materialise(1, plan.tiles[0]))
    out = torch.empty(4, 6)
    tile.fill(plan.tiles[0].pieces[0].places, out)
    assert out[:, 0].tolist() == [5.0, 4.0, 9.0, 6.0]


def test_processes_fetch_ahead_over_their_own_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host threads' collectives run beside those of the layers; the tokens are those of the reference."""
    monkeypatch.setenv("SGLANE_CP_PREFETCH_MIN_TOKENS", "1")
    model, prompt = ToyModel(ToyConfig("dsa")), np.random.default_rng(1).integers(0, 61, 150).tolist()
    with process_ranks(2, toy_worker, "dsa", 4, 60) as pipes:
        drive = PlanDriver(run_on(pipes), 4, 2, 60)
        outputs = drive.generate(0, prompt, 3, 40)
        for pipe in pipes:
            pipe.send(None)
    assert outputs == model.greedy(prompt, 3)


def test_only_what_a_fetch_is_waited_for_is_timed(plan: PrefixPlan) -> None:
    fetched = [threading.Event() for _ in range(2 * NUM_TILES)]
    order = iter(fetched)

    def slow(layer: int) -> None:
        time.sleep(0.1)
        next(order).set()

    with PrefixReader({"target.kv": RecordedPages(2, slow)}, plan, None) as reader:
        for tile in range(NUM_TILES):
            reader.take("target.kv", 0, tile)
    assert reader.waited_s >= NUM_TILES * 0.1
    order = iter(fetched)
    for event in fetched:
        event.clear()
    with PrefixReader({"target.kv": RecordedPages(2, slow)}, plan, PrefetchThread()) as reader:
        for event, (layer, tile) in zip(fetched, [(0, 0), (0, 1), (1, 0), (1, 1)]):
            assert event.wait(TIMEOUT_S)  # as if the layers before computed that long
            reader.take("target.kv", layer, tile)
    assert reader.waited_s < 0.1
