"""Whole models through the executor against references made by transformers, for every chunking and page size."""
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kits.checkpoints import tiny
from kits.plan_driver import PlanDriver, greedy, start_ranks
from kits.real_engine import TinyModel

pytestmark = pytest.mark.usefixtures("poison")
FAMILIES = ["llama", "qwen3", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm_moe_dsa_share"]
LENGTHS = [1, 7, 64, 65, 200]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest):
    path = tiny(request.param)
    return TinyModel(path), load_file(path / "ref.safetensors")


def check(case, page_size: int, chunk: int, cp_size: int, lengths: list[int]) -> None:
    """Prompt log probabilities over the whole vocabulary, the tokens, and the selected sets of every layer with its own indexer."""
    model, ref = case
    config = model.config
    sets: dict[tuple[int, int, int], set[int]] = {}

    def tap(layer, slot, positions, chosen):
        for i, position in enumerate(positions.tolist()):
            found = range(position + 1) if chosen is None else [p for p in chosen[i].tolist() if p >= 0]
            sets.setdefault((layer, slot, position), set()).update(found)

    drive = PlanDriver(start_ranks(config, model.shards(cp_size), page_size, tap=tap), page_size, cp_size)
    for slot, n in enumerate(lengths):
        prompt = ref[f"prompt.{n}"].tolist()
        drive.start(slot, prompt, greedy(logprobs=True, logprob_token_ids=list(range(config.vocab_size))))
        drive.prefill(slot, chunk, logprob_start=0)
    want = {slot: ref[f"greedy.{n}"].tolist() for slot, n in enumerate(lengths)}
    while len(drive.slots[0].outputs) < len(want[0]):
        drive.step({}, list(want))
    assert {slot: running.outputs for slot, running in drive.slots.items()} == want
    for block in drive.blocks:
        positions = np.frombuffer(block.positions, np.int32)
        inside = positions <= lengths[block.slot]
        got = torch.from_numpy(np.frombuffer(block.asked_logprobs, np.float32).reshape(len(positions), -1)[inside].copy())
        expected = ref[f"logits.{lengths[block.slot]}"][positions[inside] - 1].log_softmax(-1)
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    if "topk.1" in ref:
        for slot, n in enumerate(lengths):
            for layer in config.index.full_layers:
                chosen = ref[f"topk.{n}"][layer].tolist()
                assert [sets[layer, slot, p] for p in range(n)] == [{t for t in row if t >= 0} for row in chosen]


@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize("chunk", [8, 64, 1000])
def test_one_rank(case, page_size: int, chunk: int) -> None:
    check(case, page_size, chunk, 1, LENGTHS)


@pytest.mark.parametrize(("page_size", "chunk", "cp_size"), [(4, 64, 2), (16, 1000, 3), (64, 30, 2)])
def test_several_ranks(case, page_size: int, chunk: int, cp_size: int) -> None:
    check(case, page_size, chunk, cp_size, [7, 65, 200])
