"""An executor without a model: its pool holds token ids, and the next token is a hash of the rows it reads.

Any wrong page, early reuse, wrong tail copy or stale row changes the answer, so planner tests need no weights.
"""
import numpy as np

from kits.fake_copies import POISON, FakeCopies
from sglane.forward.token_split import window_rows
from sglane.mem_cache.page_layout import PageLayout
from sglane.plan.step_plan import StepPlan, StepResult

VOCAB = 997
#: With drafts a row of the pool also holds the token after it: row = token + AHEAD * (1 + next token).
AHEAD = 1 << 10
#: What is left of a draft that was not accepted.
REJECTED = AHEAD - 1


def prompt_of(seed: int, length: int) -> np.ndarray:
    """int64 [length], random."""
    return np.random.default_rng(seed).integers(0, 900, length)


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

    def __init__(self, layout: PageLayout, num_rows: int, num_slots: int, num_host_rows: int = 1, seed: int = 0, most_turns: int = 0,
                 drafts: bool = False):
        """num_host_rows, seed, most_turns: see FakeCopies. drafts: there is a draft plane; any number of a window's drafts is accepted."""
        self._drafts = np.random.default_rng(seed) if drafts else None
        self._num_slots_pages = (num_rows - 1) * layout.cp_size
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
        if self._drafts is not None:
            following, tokens = tokens // AHEAD - 1, tokens % AHEAD
            assert (tokens != REJECTED).all(), f"slot {slot} reads rejected drafts"
            old = following[:-1] >= 0  # rows of this step get theirs at its end
            assert (following[:-1] == tokens[1:])[old].all(), f"slot {slot}: draft rows belong to other tokens"
        return tokens

    def _extend_drafts(self, slot: int, begin: int, following: int) -> None:
        """The draft rows from `begin` on; following: the token after the last row."""
        for position in range(begin, self._lengths[slot]):
            last = position + 1 == self._lengths[slot]
            token = following if last else int(self._pool[self._position(slot, position + 1)]) % AHEAD
            self._pool[self._position(slot, position)] = int(self._pool[self._position(slot, position)]) % AHEAD + AHEAD * (1 + token)

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
        found: list[tuple[int, list[int], int]] = []  # slot, tokens, drafts
        for extend in plan.extends:
            self._rows[extend.slot] += np.frombuffer(extend.pages, np.int32).tolist()
            num_rows = self._lengths[extend.slot]
            assert num_rows == extend.start, f"slot {extend.slot} has {num_rows} rows, the extend starts at {extend.start}"
            for token in np.frombuffer(extend.tokens, np.int32).tolist():
                self._feed(extend.slot, token)
            if extend.sample:
                self._last[extend.slot] = next_token(self._read(extend.slot))
                found.append((extend.slot, [self._last[extend.slot]], 0))
            if self._drafts is not None:
                self._extend_drafts(extend.slot, num_rows, self._last[extend.slot] if extend.sample else extend.lookahead)
        slots = np.frombuffer(plan.continues.slots, np.int32).tolist()
        windows = np.frombuffer(plan.continues.windows, np.int32).tolist()
        counts = np.frombuffer(plan.continues.num_new_pages, np.int32).tolist()
        pages = np.frombuffer(plan.continues.new_pages, np.int32).tolist()
        for slot, window, count in zip(slots, windows, counts):
            self._rows[slot] += pages[:count]
            del pages[:count]
            found.append((slot, *self._continue(slot, window)))
        self.copies.end(plan)
        return self._results(plan.step, found)

    def _continue(self, slot: int, window: int) -> tuple[list[int], int]:
        """The new tokens, and the number of drafts."""
        layout, begin = self._layout, self._lengths[slot]
        limit = self._num_slots_pages * layout.page_size
        num_rows = window_rows(window, begin, np.array(self._rows[slot]), layout.page_size, layout.cp_size, limit)
        if not num_rows:
            return [], 0
        tokens: list[int] = []
        for _ in range(1 if self._drafts is None else int(self._drafts.integers(1, num_rows + 1))):
            self._feed(slot, self._last[slot])
            self._last[slot] = next_token(self._read(slot))
            tokens.append(self._last[slot])
        if self._drafts is not None:
            self._extend_drafts(slot, begin, self._last[slot])
            for position in range(self._lengths[slot], begin + num_rows):
                self._pool[self._position(slot, position)] = REJECTED
        return tokens, num_rows - 1

    def _results(self, step: int, found: list[tuple[int, list[int], int]]) -> list[StepResult]:
        results = []
        for rank in range(self._layout.cp_size):
            mine = [(slot, tokens, drafts) for slot, tokens, drafts in found
                    if self._position(slot, self._lengths[slot] - 1)[0] % self._layout.cp_size == rank]
            results.append(StepResult(
                step, rank, np.array([slot for slot, _, _ in mine], np.int32).tobytes(),
                np.array([len(tokens) for _, tokens, _ in mine], np.int32).tobytes(),
                np.array([token for _, tokens, _ in mine for token in tokens], np.int32).tobytes(),
                num_drafts=np.array([drafts for _, _, drafts in mine], np.int32).tobytes(),
            ))
        return results
