"""Ranks over one shared KV cache answer as one rank does, own pages each, and share the experts."""
import os

import pytest
from safetensors.torch import load_file

from kits.audit import assert_clean, assert_conserved, wait_idle
from kits.checkpoints import tiny
from kits.server import Server

FLAGS = ("--dtype", "float32", "--page-size", "16", "--max-total-tokens", "4096", "--chunked-prefill-size", "96")
PROMPTS = {
    "one token": [42],
    "less than a page": list(range(100, 109)),
    "a page and one token": list(range(200, 217)),
    "several chunks": [300 + (7 * i) % 5000 for i in range(301)],
    "a prefix of that, and other tokens": [300 + (7 * i) % 5000 for i in range(150)] + list(range(900, 931)),
}


def answers(server: Server) -> dict[str, list[int]]:
    found = {name: server.generate(prompt, max_new_tokens=24, ignore_eos=True)["output_ids"] for name, prompt in PROMPTS.items()}
    sampling = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    batch = server.ask("/generate", {"input_ids": list(PROMPTS.values()), "sampling_params": sampling})
    assert [answer["output_ids"] for answer in batch] == list(found.values()), "a batch answers differently"
    return found


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """What one rank answers."""
    with Server(*FLAGS) as one:
        found = answers(one)
        assert_clean(wait_idle(one))
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("flags", "transport"), [((), "peer"), (("--cp-exchange", "collective"), "collective")])
def test_two_ranks_answer_as_one(expected: dict[str, list[int]], flags: tuple[str, ...], transport: str) -> None:
    named = set(os.listdir("/dev/shm"))
    with Server(*FLAGS, "--cp-size", "2", "--enable-cp-shared-kv", *flags, env={"SGLANE_POISON": "1"}) as two:
        assert two.log().count(f"CP exchange: {transport} ") == 2
        assert answers(two) == expected
        ledger = wait_idle(two)
        assert_clean(ledger)
        assert ledger["cp_size"] == 2
        assert min(ledger["device"]["cached"]) > 0, f"a lane owns nothing: {ledger}"
        two.flush_cache()
        assert_conserved(two.kv_ledger())
        assert answers(two) == expected, "the answers change after a flush"
        assert "Paris" in two.chat("What is the capital of France?", max_tokens=32)["choices"][0]["message"]["content"]
    assert set(os.listdir("/dev/shm")) == named


@pytest.mark.timeout(600)
def test_three_ranks_share_eight_experts():
    """Each loads its own ones; the answers are the reference's."""
    path = tiny("glm_moe_dsa")
    ref = load_file(path / "ref.safetensors")
    flags = ("--model-path", str(path), "--skip-tokenizer-init", *FLAGS, "--cp-size", "3", "--enable-cp-shared-kv")
    with Server(*flags, env={"SGLANE_POISON": "1"}) as server:
        for n in (1, 65, 200):
            answer = server.generate(ref[f"prompt.{n}"].tolist(), max_new_tokens=len(ref[f"greedy.{n}"]), ignore_eos=True)
            assert answer["output_ids"] == ref[f"greedy.{n}"].tolist(), n
        assert_clean(wait_idle(server))


@pytest.mark.timeout(300)
def test_a_killed_rank_ends_a_server_whose_ranks_share_memory() -> None:
    with Server(*FLAGS, "--cp-size", "2", "--enable-cp-shared-kv", "--cp-exchange", "peer") as two:
        two.processes("executor_CP1")[0].kill()
        assert two.wait_exit(60.0) != 0
