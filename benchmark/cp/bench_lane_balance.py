"""How evenly the lanes are loaded: the real scheduler over a made-up load, without a model.

    PYTHONPATH=python python benchmark/cp/bench_lane_balance.py [--lanes 4] [--seeds 3]

`decode` and `all`: rows of the busiest lane of each step, summed over the steps, divided by what it would be if every step were spread evenly
(1.00 is perfect, N is everything on one lane); decode rows alone, and all rows. `held`: private pages of the fullest lane against the mean, at
the fullest moment. `moves`: home moves per 1000 new pages of decoding. `waits`: requests that did not get their pages at once, per 1000 steps.
"""
import argparse
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglane.managers.limits import Limits
from sglane.managers.scheduler import Scheduler
from sglane.mem_cache.kv_ledger import KVLedger
from sglane.mem_cache.page_layout import PageLayout
from sglane.plan.io_struct import GenerateRequest, SamplingParams
from sglane.plan.step_plan import StepPlan, StepResult

PAGE_SIZE, CHUNK_TOKENS, NUM_SLOTS, VOCAB = 64, 2048, 128, 32000


@dataclass(frozen=True)
class Load:
    """Requests of one kind: ranges of prompt and output lengths in tokens, arrivals per step, pages of a lane."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    per_step: float
    num_requests: int
    num_rows: int = 1024


LOADS = {
    "chats": Load((20, 400), (20, 200), 0.5, 2000),
    "one page": Load((10, 60), (100, 101), 0.3, 2000),
    "N pages": Load((250, 256), (100, 101), 0.3, 2000),
    "bursts": Load((10, 60), (20, 200), 0.5, 2000),
    "long decodes": Load((20, 100), (1000, 3000), 0.04, 300),
    "long prompts": Load((4000, 12000), (100, 400), 0.05, 200),
    "mixed": Load((10, 6000), (10, 1500), 0.06, 400),
    "short pool": Load((20, 400), (100, 600), 0.5, 1000, num_rows=64),
}


class BlankRanks:
    """Answers every plan at once with random tokens."""

    def __init__(self, num_ranks: int, seed: int):
        self._num_ranks, self._rng = num_ranks, np.random.default_rng(seed)

    def run(self, plan: StepPlan) -> list[StepResult]:
        slots = np.array([extend.slot for extend in plan.extends if extend.sample], np.int32)
        slots = np.concatenate([slots, np.frombuffer(plan.continues.slots, np.int32)])
        tokens = self._rng.integers(1, VOCAB, len(slots)).astype(np.int32)
        first = StepResult(plan.step, 0, slots.tobytes(), np.ones_like(slots).tobytes(), tokens.tobytes())
        return [first, *(StepResult(plan.step, rank) for rank in range(1, self._num_ranks))]


@dataclass
class Skew:
    """Sums over steps of the busiest lane and of all lanes."""

    busiest: float = 0.0
    total: float = 0.0

    def add(self, lanes: np.ndarray) -> None:
        self.busiest += float(lanes.max())
        self.total += float(lanes.sum())

    def ratio(self, num_lanes: int) -> float:
        return self.busiest * num_lanes / self.total if self.total else 1.0


@dataclass
class Figures:
    decode: Skew = field(default_factory=Skew)
    rows: Skew = field(default_factory=Skew)
    held: tuple[int, float] = (0, 1.0)  # pages at the fullest moment, and how unevenly
    num_decode_rows: int = 0
    num_steps: int = 0
    num_moves: int = 0
    num_waits: int = 0

    def line(self, num_lanes: int) -> list[float]:
        return [self.decode.ratio(num_lanes), self.rows.ratio(num_lanes), self.held[1], 1000 * self.num_moves * PAGE_SIZE / self.num_decode_rows,
                1000 * self.num_waits / self.num_steps]


class Simulation:
    """One load on one number of lanes."""

    def __init__(self, load: Load, num_lanes: int, seed: int, burst: int):
        self.layout = PageLayout(PAGE_SIZE, num_lanes)
        self.ledger = KVLedger(self.layout, load.num_rows + 1, NUM_SLOTS)
        self.scheduler = Scheduler(self.ledger, self.layout, Limits(NUM_SLOTS, 1 << 20, CHUNK_TOKENS, 2), num_lanes)
        self.figures = Figures()
        self._load, self._burst = load, burst
        self._ranks = BlankRanks(num_lanes, seed)
        self._rng = np.random.default_rng(seed)
        self._num_added = 0
        self._due = 0.0
        self._answers: deque[list[StepResult]] = deque()

    def run(self) -> Figures:
        while self._num_added < self._load.num_requests or not self.scheduler.is_idle():
            self._arrive()
            plan = self.scheduler.next_plan()
            while plan is not None:
                self._measure()
                self._answers.append(self._ranks.run(plan))
                plan = self.scheduler.next_plan()
            if self._answers:
                for result in self._answers.popleft():
                    self.scheduler.add_result(result)
            self.scheduler.take_outputs()
        lanes: Any = self.scheduler.lanes()
        self.figures.num_moves = sum(lanes["home_moves"])
        self.figures.num_waits = sum(count for *_, count in lanes["page_waits"]["counts"])
        return self.figures

    def _arrive(self) -> None:
        self._due += self._load.per_step
        if self._due < self._burst:
            return
        while self._due >= 1 and self._num_added < self._load.num_requests:
            self._due -= 1
            self._num_added += 1
            prompt = self._rng.integers(1, VOCAB, self._rng.integers(*self._load.prompt)).astype(np.int32)
            params = SamplingParams(max_new_tokens=int(self._rng.integers(*self._load.output)), temperature=0.0)
            self.scheduler.add_request(GenerateRequest(rid=str(self._num_added), input_ids=prompt.tobytes(), sampling=params))

    def _measure(self) -> None:
        num_lanes, figures = self.layout.cp_size, self.figures
        decode, rows = np.zeros(num_lanes), np.zeros(num_lanes)
        for entry in self.scheduler._issued[-1].entries:
            residence = entry.request.admitted()
            end = residence.num_rows_issued
            pages = residence.holding.pages[np.arange(end - entry.num_rows, end) // PAGE_SIZE]
            lanes = np.bincount(pages % num_lanes, minlength=num_lanes)
            rows += lanes
            if not entry.is_extend:
                decode += lanes
        figures.rows.add(rows)
        if decode.sum() >= num_lanes:
            figures.decode.add(decode)
        held = np.array(self.ledger.snapshot()["device"]["held"])
        if held.sum() > figures.held[0]:
            figures.held = int(held.sum()), float(held.max() / held.mean())
        figures.num_steps += 1
        figures.num_decode_rows += int(decode.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    print("load           decode    all   held   moves   waits")
    for name, load in LOADS.items():
        runs = [Simulation(load, given.lanes, seed, given.lanes if name == "bursts" else 0).run() for seed in range(given.seeds)]
        decode, rows, held, moves, waits = np.mean([run.line(given.lanes) for run in runs], 0)
        print(f"{name:14} {decode:6.2f} {rows:6.2f} {held:6.2f} {moves:7.1f} {waits:7.1f}", flush=True)


if __name__ == "__main__":
    main()
