"""The step loop with a toy model: every chunking, page size and number of ranks gives the tokens of the naive reference."""
import numpy as np
import pytest
import torch

from kits.plan_driver import PlanDriver, greedy, ints, start_ranks
from kits.toy_model import ToyConfig, ToyModel, prompt
from sglane.plan.io_struct import SamplingParams
from sglane.plan.step_plan import StepPlan, TailCopy

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("poison")
KINDS = ["gqa", "mla", "dsa"]


def driver(kind: str, page_size: int = 4, cp_size: int = 1) -> tuple[PlanDriver, ToyModel]:
    model = ToyModel(ToyConfig(kind))
    return PlanDriver(start_ranks(model.config, [model] * cp_size, page_size), page_size, cp_size), model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (4, 8), (4, 100), (16, 30), (64, 100)])
def test_greedy_tokens_equal_the_reference(kind: str, cp_size: int, page_size: int, chunk: int) -> None:
    drive, model = driver(kind, page_size, cp_size)
    for slot, length in enumerate((1, 5, 40)):
        tokens = prompt(slot, length)
        assert drive.generate(slot, tokens, 8, chunk) == model.greedy(tokens, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_mixed_batches_and_reused_pages(kind: str, cp_size: int) -> None:
    """Slots of different ages extend and continue in one step; ended ones give their pages back, poisoned, to later ones."""
    drive, model = driver(kind, 4, cp_size)
    drive.free = drive.free[:40]  # scarce, so that pages come round
    waiting = [prompt(20 + i, n) for i, n in enumerate((30, 3, 17, 1, 44, 9, 26))]
    want = {tuple(tokens): model.greedy(tokens, 6) for tokens in waiting}
    done = {}
    while waiting or drive.slots:
        if waiting and len(drive.slots) < 3:
            slot = min(set(range(4)) - set(drive.slots))
            drive.start(slot, waiting.pop(), greedy())
        extends = {slot: 11 for slot, running in drive.slots.items() if running.fed < len(running.prompt)}
        drive.step(extends, [slot for slot, running in drive.slots.items() if slot not in extends])
        for slot in [slot for slot, running in drive.slots.items() if len(running.outputs) == 6]:
            running = drive.release(slot)
            done[tuple(running.prompt)] = running.outputs
    assert done == want


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("num_shared", [0, 8, 10, 12])
def test_prefix_hit_with_a_tail_copy(kind: str, cp_size: int, num_shared: int) -> None:
    drive, model = driver(kind, 4, cp_size)
    first = prompt(1, 30)
    drive.generate(0, first, 2, 100)
    second = first[:num_shared] + prompt(2, 9)
    donor = drive.slots[0].pages
    cached, copies = donor[:num_shared // 4], []
    if num_shared % 4:
        source = donor[num_shared // 4]
        private = drive.take_page(source % cp_size)
        cached, copies = [*cached, private], [TailCopy(source, private, num_shared % 4)]
    drive.start(1, second, greedy(), cached, num_shared, copies)
    drive.prefill(1, 5)
    for _ in range(5):
        drive.step({}, [1, 0])
    assert drive.slots[1].outputs == model.greedy(second, 6)
    assert drive.slots[0].outputs == model.greedy(first, 7)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_prompt_and_output_logprobs(cp_size: int) -> None:
    drive, model = driver("gqa", 4, cp_size)
    tokens = prompt(3, 33)
    drive.start(0, tokens, greedy(logprobs=True, num_top_logprobs=3, logprob_token_ids=[5, 7, 61]))
    drive.prefill(0, 10, logprob_start=6)
    drive.step({}, [0])
    every = tokens + drive.slots[0].outputs
    want = model.reference(every).log_softmax(-1)
    rows = {}
    for block in drive.blocks:
        positions, ids, values = (np.frombuffer(data, kind) for data, kind in (
            (block.positions, np.int32), (block.token_ids, np.int32), (block.logprobs, np.float32)))
        top_ids, top = np.frombuffer(block.top_ids, np.int32).reshape(-1, 3), np.frombuffer(block.top_logprobs, np.float32).reshape(-1, 3)
        asked = np.frombuffer(block.asked_logprobs, np.float32).reshape(-1, 3)
        for i, position in enumerate(positions.tolist()):
            assert position not in rows and block.num_top == 3
            rows[position] = (ids[i], values[i], top_ids[i], top[i], asked[i])
    assert sorted(rows) == list(range(6, 35))
    for position, (token, value, top_ids, top, asked) in rows.items():
        row = want[position - 1]
        assert token == every[position]
        assert value == pytest.approx(row[token].item(), abs=1e-4)
        assert top_ids.tolist() == row.topk(3).indices.tolist()
        assert top == pytest.approx(row.topk(3).values.numpy(), abs=1e-4)
        assert asked[:2] == pytest.approx(row[[5, 7]].numpy(), abs=1e-4) and asked[2] == float("-inf")


def test_prompt_logprobs_stop_at_the_prompt_and_span_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a retraction the extend also holds output tokens, which are not reported again."""
    monkeypatch.setattr("sglane.model_executor.logprobs.TILE_ROWS", 4)
    drive, model = driver("gqa")
    tokens = prompt(4, 25)
    drive.start(0, tokens, greedy(), num_prompt=20)
    drive.prefill(0, 100, logprob_start=0)
    (block,) = drive.blocks
    assert np.frombuffer(block.positions, np.int32).tolist() == list(range(1, 20))
    want = model.reference(tokens).log_softmax(-1)
    assert np.frombuffer(block.logprobs, np.float32) == pytest.approx([want[p - 1, tokens[p]].item() for p in range(1, 20)], abs=1e-4)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_sampling_does_not_depend_on_batch_mates_slot_or_chunks(cp_size: int) -> None:
    params = SamplingParams(max_new_tokens=50, temperature=1.3, top_p=0.9, seed=77, frequency_penalty=0.4, repetition_penalty=1.2)
    alone, _ = driver("gqa", 4, cp_size)
    want = alone.generate(2, prompt(5, 21), 10, 100, params)
    crowded, _ = driver("gqa", 16, cp_size)
    for slot in (0, 1):
        crowded.start(slot, prompt(slot, 12), SamplingParams(max_new_tokens=50, seed=slot))
        crowded.prefill(slot, 100)
    crowded.start(5, prompt(5, 21), params)
    while len(crowded.slots[5].outputs) < 10:
        extends = {5: 8} if crowded.slots[5].fed < 21 else {}
        crowded.step(extends, [1, 0] if extends else [1, 5, 0])
    assert crowded.slots[5].outputs == want


def test_a_gap_in_the_numbers_is_fatal() -> None:
    drive, _ = driver("gqa")
    drive.step({})
    with pytest.raises(AssertionError, match="plan 3 came after plan 1"):
        drive.run(StepPlan(3))


def test_a_read_of_a_poisoned_page_is_fatal() -> None:
    drive, _ = driver("gqa")
    drive.generate(0, prompt(6, 10), 1, 100)
    drive._poison = [drive.slots[0].pages[0]]
    with pytest.raises(AssertionError, match="poisoned row"):
        drive.step({}, [0])


def test_plans_that_do_not_fit_the_slot_table_are_fatal() -> None:
    drive, _ = driver("gqa")
    drive.generate(0, prompt(6, 10), 1, 100)
    drive.slots[0].fed = 5
    with pytest.raises(AssertionError, match="slot 0 extends at 5, but has 10 rows"):
        drive.step({0: 1})
    other, _ = driver("gqa")
    with pytest.raises(AssertionError, match="slot 3 is not taken"):
        other.run(StepPlan(1, releases=ints([3])))
