"""Acceptance: runs are cut where a draft differs, and what is sampled has the target's distribution."""
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglane.model_executor.sampler import SampleRow, sample
from sglane.model_executor.slot_table import Slot
from sglane.plan.io_struct import SamplingParams
from sglane.plan.step_plan import SlotStart
from sglane.speculative.accept import accepted_runs

VOCAB = 12


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), min_size=6, max_size=6)), max_size=6))
def test_a_run_ends_with_the_first_token_that_is_not_the_draft(windows: list[tuple[list[int], list[int]]]) -> None:
    asked: list[tuple[int, int]] = []

    def pick(going: list[int], taken: list[list[int]]) -> np.ndarray:
        asked.extend((i, len(run)) for i, run in zip(going, taken))
        for i, run in zip(going, taken):
            assert run == windows[i][1][:len(run)]
        return np.array([windows[i][1][len(run)] for i, run in zip(going, taken)])

    runs = accepted_runs([np.array(drafts, np.int64) for drafts, _ in windows], pick)
    for (drafts, target), run in zip(windows, runs):
        agree = [a == b for a, b in zip(drafts, target)]
        assert run.tolist() == target[:1 + (agree.index(False) if False in agree else len(drafts))]
    assert len(asked) == len(set(asked)) == sum(len(run) for run in runs)  # nothing is sampled in vain


def markov_run(logits: torch.Tensor, draft_of: np.ndarray, seed: int, num_tokens: int, num_steps: int) -> tuple[list[int], int]:
    """A run of a target whose logits follow from the last token alone, with drafts that do too. Returns its tokens and the number of steps."""
    data = Slot(SlotStart(0, b"", 0, 1, SamplingParams(max_new_tokens=num_tokens, temperature=1.0, seed=seed)))
    tokens, steps = [0], 0

    def pick(going: list[int], taken: list[list[int]]) -> np.ndarray:
        last = (tokens + taken[0])[-1]
        return sample(logits[last].unsqueeze(0), [SampleRow(0, len(tokens) + len(taken[0]), data, taken[0])])

    while len(tokens) <= num_tokens:
        drafts: list[int] = []
        for _ in range(num_steps):
            drafts.append(int(draft_of[(tokens + drafts)[-1]]))
        tokens += accepted_runs([np.array(drafts, np.int64)], pick)[0].tolist()
        steps += 1
    return tokens[1:num_tokens + 1], steps


def test_frequencies_are_the_targets() -> None:
    """Chi-square over 20,000 tokens that speculation drafted, against the distributions they should have; seeds repeat; plain runs are the same."""
    torch.manual_seed(3)
    logits = torch.randn(VOCAB, VOCAB) * 1.5
    draft_of = logits.argmax(-1).numpy()
    draft_of[::3] = (draft_of[::3] + 1) % VOCAB  # some drafts are poor
    counts = np.zeros((VOCAB, VOCAB))
    num_steps = 0
    for seed in range(200):
        run, steps = markov_run(logits, draft_of, seed, 100, 3)
        assert run == markov_run(logits, draft_of, seed, 100, 0)[0]
        num_steps += steps
        np.add.at(counts, ([0, *run[:-1]], run), 1)
    assert num_steps < 0.9 * 200 * 100  # drafts were accepted
    expected = logits.softmax(-1).numpy() * counts.sum(1, keepdims=True)
    kept = expected >= 5
    statistic = (((counts - expected) ** 2 / np.maximum(expected, 1e-9)) * kept).sum()
    degrees = kept.sum() - VOCAB
    assert counts.sum() == 20_000
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5, f"chi-square {statistic:.0f} with {degrees} degrees of freedom"
