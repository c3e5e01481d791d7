import numpy as np
import pytest
import torch

from sglane.model_executor import sampler
from sglane.model_executor.sampler import SampleRow, sample, uniform
from sglane.model_executor.slot_table import Slot
from sglane.plan.io_struct import SamplingParams
from sglane.plan.step_plan import SlotStart

torch.set_num_threads(1)
VOCAB = 600


def row(position: int = 10, history: list[int] | None = None, num_prompt: int = 4, **fields: object) -> SampleRow:
    params = SamplingParams(max_new_tokens=100, **fields)
    return SampleRow(0, position, Slot(SlotStart(0, b"", 0, num_prompt, params, np.array(history or [], np.int32).tobytes())))


def logits(seed: int = 0, rows: int = 1, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def counts(values: torch.Tensor, draws: int, **fields: object) -> np.ndarray:
    tokens = sample(values.expand(draws, -1), [row(position=100 + i, **fields) for i in range(draws)])
    return np.bincount(tokens, minlength=values.shape[1])


def expected_probs(values: torch.Tensor, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """One pass in float64 over the sorted vocabulary."""
    probs = (values[0].double() / temperature).softmax(-1).numpy()
    order = np.argsort(-probs, kind="stable")
    kept, mass = np.zeros(len(probs)), 0.0
    for i, token in enumerate(order):
        if (0 < top_k <= i) or mass > top_p or probs[token] < min_p * probs[order[0]]:
            break
        kept[token] = probs[token]
        mass += probs[token]
    return kept / kept.sum()


FILTERS = [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.6}, {"top_p": 0.999}, {"min_p": 0.2}, {"top_k": 400},
           {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 1.4}]


@pytest.mark.parametrize("filters", FILTERS)
def test_distribution(filters: dict) -> None:
    values, draws = logits(1), 6000
    probs = expected_probs(values, **filters)
    found = counts(values, draws, seed=5, **filters)
    assert found[probs == 0].sum() == 0
    big = probs * draws >= 10
    chi2 = (((found - probs * draws) ** 2)[big] / (probs * draws)[big]).sum()
    assert chi2 < big.sum() + 5 * np.sqrt(2 * big.sum())


@pytest.mark.parametrize("filters", FILTERS)
def test_candidates_and_the_full_sort_choose_the_same_token(filters: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    values = logits(2, 50).round()  # heavy ties
    rows = [row(position=i, seed=3, **filters) for i in range(50)]
    want = sample(values, rows)
    monkeypatch.setattr(sampler, "NUM_CANDIDATES", VOCAB)
    assert sample(values, rows).tolist() == want.tolist()


def test_batch_mates_and_order_do_not_matter() -> None:
    values = logits(4, 12)
    rows = [row(position=20 + i, seed=i % 3, history=list(range(20 + i)), **fields) for i, fields in enumerate(
        [{}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3}, {"frequency_penalty": 1.0}] * 2)]
    want = [int(sample(values[i:i + 1], [rows[i]])[0]) for i in range(12)]
    assert sample(values, rows).tolist() == want
    order = np.random.default_rng(0).permutation(12)
    assert sample(values[order], [rows[i] for i in order]).tolist() == [want[i] for i in order]


def test_noise_is_uniform_and_differs_by_seed_position_and_purpose() -> None:
    draws = np.array([[uniform(seed, position, 0) for position in range(500)] for seed in (0, 1, 2 ** 63, -5)])
    assert ((draws > 0) & (draws < 1)).all()
    assert abs(np.corrcoef(draws) - np.eye(4)).max() < 0.15
    assert np.histogram(draws, 10, (0, 1))[0] == pytest.approx([200] * 10, abs=60)
    assert uniform(1, 2, 0) != uniform(1, 2, 1) != uniform(2, 1, 0)
    assert uniform(1, 2, 0) == uniform(1 + (1 << 64), 2, 0)


def test_greedy_rows_take_the_maximum() -> None:
    values = logits(6, 4)
    rows = [row(temperature=0.0), row(top_k=1), row(temperature=0.0, top_p=0.1), row(temperature=1e-5)]
    assert sample(values, rows).tolist() == values.argmax(-1).tolist()


def test_penalties() -> None:
    """Repetition counts prompt and output, the others output only; raw logits stay as they are."""
    values = torch.zeros(1, VOCAB)
    values[0, :6] = torch.tensor([10.0, 9.5, -1.0, 9.0, 8.9, 8.0])
    before = values.clone()
    history = [0, 0, 2, 7, 1, 1, 1, 3]  # 4 of the prompt, then output
    base = {"position": 8, "history": history, "temperature": 0.0}

    def best(**fields: object) -> int:
        return int(sample(values, [row(**base, **fields)])[0])

    assert best(repetition_penalty=1.2) == 4  # 0, 1 and 3 are divided
    assert best(presence_penalty=1.0) == 0  # of the prompt only
    assert best(frequency_penalty=0.4, logit_bias={0: -5.0}) == 4  # 9.5 - 1.2, 9.0 - 0.4, 8.9
    assert best(presence_penalty=0.05, logit_bias={0: -5.0}) == 1
    assert best(presence_penalty=-2.0) == 1  # rewards repetition
    assert torch.equal(values, before)
    adjusted = values[0].clone()
    sampler._adjust(adjusted, row(**base, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25))
    assert adjusted[:6].tolist() == pytest.approx([5.0, 4.75 - 1.75, -2.0, 4.5 - 0.75, 8.9, 8.0])


def test_bias_and_minimum_length() -> None:
    values = logits(8)
    best = int(values.argmax())
    assert sample(values, [row(temperature=0.0, logit_bias={3: 100.0})])[0] == 3
    assert sample(values, [row(logit_bias={3: 100.0})])[0] == 3
    for num_outputs, allowed in ((0, False), (4, False), (5, True)):
        token = sample(values, [row(position=4 + num_outputs, temperature=0.0, min_new_tokens=5, stop_token_ids=[best])])[0]
        assert (token == best) == allowed


def test_ids_outside_the_vocabulary_and_nan_logits_harm_nobody() -> None:
    values = logits(9)
    best = int(values.argmax())
    assert sample(values, [row(temperature=0.0, logit_bias={VOCAB: 9.0, -1: 9.0}, min_new_tokens=50, stop_token_ids=[VOCAB + 3])])[0] == best
    broken = torch.full((2, VOCAB), float("nan"))
    tokens = sample(broken, [row(), row(top_p=0.5)])
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


def test_history_must_reach_the_position() -> None:
    with pytest.raises(AssertionError, match="8 tokens of history at position 9"):
        sample(logits(), [row(position=9, history=[1] * 8, presence_penalty=1.0)])
