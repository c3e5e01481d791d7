"""Drafting, verification, acceptance and draft rows of a rank, with a toy model: everything equals a naive simulation."""
import pytest
import torch

from kits.plan_driver import PlanDriver, greedy, start_ranks
from kits.toy_model import ToyConfig, ToyModel, prompt

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("poison")
KINDS = ["gqa", "mla", "dsa"]


def driver(kind: str, page_size: int = 4, cp_size: int = 1, num_steps: int = 3, mapped: bool = False) -> tuple[PlanDriver, ToyModel]:
    model = ToyModel(ToyConfig(kind, has_draft=True))
    ranks = start_ranks(model.config, [model] * cp_size, page_size, mapped=mapped, speculative_algorithm="NEXTN", speculative_num_steps=num_steps)
    return PlanDriver(ranks, page_size, cp_size), model


def states(drive: PlanDriver, slot: int) -> torch.Tensor:
    """The chain state on the rank that has the slot's last row."""
    running, executors = drive.slots[slot], drive.run.executors
    lane = running.pages[(running.fed - 1) // drive.page_size] % drive.cp_size
    return executors[lane]._drafter._states[slot]


def check_state(drive: PlanDriver, model: ToyModel, slot: int) -> None:
    running = drive.slots[slot]
    torch.testing.assert_close(states(drive, slot), model.draft_states(running.prompt + running.outputs)[0][-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize(("page_size", "chunk"), [(4, 8), (16, 30), (64, 100)])
@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_outputs_and_acceptance_equal_the_simulation(kind: str, cp_size: int, page_size: int, chunk: int, num_steps: int) -> None:
    drive, model = driver(kind, page_size, cp_size, num_steps)
    accepted = 0
    for slot, length in enumerate((1, 5, 40)):
        tokens = prompt(slot, length)
        want = model.greedy(tokens, 16)
        drive.start(slot, tokens, greedy())
        drive.prefill(slot, chunk)
        check_state(drive, model, slot)
        outputs = drive.slots[slot].outputs
        while len(outputs) < 10:
            drafts, before = model.draft_states(tokens + outputs, num_steps)[1], drive.num_drafts
            num_known = len(outputs)
            got = drive.step({}, [slot], window=num_steps + 1)[slot]
            num_drafts = drive.num_drafts - before
            agree = [draft == token for draft, token in zip(drafts[:num_drafts], want[num_known:])]
            assert len(got) == 1 + (agree.index(False) if False in agree else num_drafts)
            accepted += len(got) - 1
            check_state(drive, model, slot)
        assert outputs == want[:len(outputs)]
    assert accepted > 0
