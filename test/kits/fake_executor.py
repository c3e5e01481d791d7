"""An executor without a model: its pool holds token ids, and the next token is a hash of the rows it reads.

Any wrong page, early reuse, wrong tail copy or stale row changes the answer, so planner tests need no weights.
"""
import numpy as np

from kits.fake_copies import POISON, FakeCopies
from sglane.mem_cache.page_layout import PageLayout
from sglane.plan.step_plan import StepPlan, StepResult

VOCAB = 997


def next_token(context: np.ndarray) -> int:
    """The toy model: depends on every token and its position."""
    context = context.astype(np.int64)
    return int((context * (np.arange(len(context)) % 89 + 3)).sum() * 31 + len(context) * 7) % VOCAB


def expected_output(prompt: np.ndarray, num_tokens: int) -> list[int]:
    """What an undisturbed run of the toy model gives."""
    context = list(prompt.tolist())
    for _ in range(num_tokens):
        context.append(next_token(np.array(context)))
    return context[len(prompt) :]


class FakeExecutor:
    """Carries out plans at once; `results` are per rank, as real ranks would answer."""

    def __init__(self, layout: PageLayout, num_rows: int, num_slots: int, num_host_rows: int = 1, seed: int = 0, most_turns: int = 0):
        """num_host_rows, seed, most_turns: see FakeCopies."""
        self._layout = layout
        self._pool = np.full((num_rows * layout.cp_size, layout.page_size), POISON, dtype=np.int64)
        self._rows: list[list[int]] = [[] for _ in range(num_slots)]
        self._lengths = [0] * num_slots
        self._last = [POISON] * num_slots
        self._step = 0
        self.copies = FakeCopies(layout, num_host_rows, self._pool, seed, most_turns)

    def _position(self, slot: int, position: int) -> tuple[int, int]:
        page = self._rows[slot][position // self._layout.page_size]
        assert page >= self._layout.cp_size, f"slot {slot} position {position} lies in a sink page"
        return page, position % self._layout.page_size

    def _feed(self, slot: int, token: int) -> None:
        self._pool[self._position(slot, self._lengths[slot])] = token
        self._lengths[slot] += 1

    def _read(self, slot: int) -> np.ndarray:
        tokens = np.array([self._pool[self._position(slot, p)] for p in range(self._lengths[slot])])
        assert not (tokens == POISON).any(), f"slot {slot} reads poison at {np.flatnonzero(tokens == POISON).tolist()} of {len(tokens)}"
        return tokens

    def run(self, plan: StepPlan) -> list[StepResult]:
        self._step += 1
        assert plan.step == self._step, f"gap: plan {plan.step}, expected {self._step}"
        for update in plan.row_updates:
            pages = np.frombuffer(update.pages, np.int32).tolist()
            self._rows[update.slot][update.first_page : update.first_page + len(pages)] = pages
        self._pool[np.frombuffer(plan.poison, np.int32)] = POISON
        for start in plan.starts:
            self._rows[start.slot] = np.frombuffer(start.pages, np.int32).tolist()
            self._lengths[start.slot] = start.num_cached_tokens
        for copy in plan.tail_copies:
            assert copy.src_page % self._layout.cp_size == copy.dst_page % self._layout.cp_size, "a tail copy crosses lanes"
            source = self.copies.host if copy.from_host else self._pool
            self._pool[copy.dst_page, : copy.num_tokens] = source[copy.src_page, : copy.num_tokens]
        self.copies.begin(plan)
        sampled = []
        for extend in plan.extends:
            self._rows[extend.slot] += np.frombuffer(extend.pages, np.int32).tolist()
            num_rows = self._lengths[extend.slot]
            assert num_rows == extend.start, f"slot {extend.slot} has {num_rows} rows, the extend starts at {extend.start}"
            for token in np.frombuffer(extend.tokens, np.int32).tolist():
                self._feed(extend.slot, token)
            if extend.sample:
                sampled.append(extend.slot)
        slots = np.frombuffer(plan.continues.slots, np.int32).tolist()
        counts = np.frombuffer(plan.continues.num_new_pages, np.int32).tolist()
        pages = np.frombuffer(plan.continues.new_pages, np.int32).tolist()
        for slot, count in zip(slots, counts):
            self._rows[slot] += pages[:count]
            del pages[:count]
            self._feed(slot, self._last[slot])
            sampled.append(slot)
        self.copies.end(plan)
        return self._sample(plan.step, sampled)

    def _sample(self, step: int, slots: list[int]) -> list[StepResult]:
        by_rank: list[list[tuple[int, int]]] = [[] for _ in range(self._layout.cp_size)]
        for slot in slots:
            self._last[slot] = next_token(self._read(slot))
            owner = self._position(slot, self._lengths[slot] - 1)[0] % self._layout.cp_size
            by_rank[owner].append((slot, self._last[slot]))
        return [
            StepResult(
                step, rank, np.array([s for s, _ in mine], np.int32).tobytes(), np.ones(len(mine), np.int32).tobytes(),
                np.array([t for _, t in mine], np.int32).tobytes(),
            )
            for rank, mine in enumerate(by_rank)
        ]
