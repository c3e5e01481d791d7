"""The packaged demonstration model: it fits its package, reads as text, and its drafts are accepted as often after every kind of hit as cold."""
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from kits.oracle import Oracle
from kits.real_engine import TinyModel
from sglane.configs.model_config import PACKAGED_MODELS, load_model_config

FOLDER = PACKAGED_MODELS["tiny-dsa"]
PROMPTS = (
    "ROMEO\nBut soft, what light through yonder window breaks?\nIt is the east, and Juliet is the sun.\nArise, fair sun,\n",
    "<|user|>Good morrow, my lord. What news from the king, and what says the queen of it?<|assistant|>",
    "And it came to pass in those days, that there went out a decree from", "KING HENRY\nMy lords, what",
)
NUM_NEW = 48


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@cache
def prompts() -> list[list[int]]:
    return [tokenizer()(text).input_ids for text in PROMPTS]


@cache
def model(num_steps: int) -> TinyModel:
    flags = {"speculative_algorithm": "NEXTN", "speculative_num_steps": num_steps} if num_steps else {}
    return TinyModel(FOLDER, **flags)


def test_it_is_small_and_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 20_000_000
    config = load_model_config("tiny-dsa", None, "")
    assert config.source.path == str(FOLDER) and config.model_type == "deepseek_v32" and config.draft is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-dsa").mkdir()
    (tmp_path / "tiny-dsa" / "config.json").write_text((FOLDER / "config.json").read_text())
    assert load_model_config("tiny-dsa", None).source.path == "tiny-dsa"  # a folder of that name goes before it


def test_it_agrees_with_the_oracle() -> None:
    """Greedy tokens, and the first draft, which is right more often than not."""
    oracle = Oracle(FOLDER)
    engine = model(0).engine(page_size=16, chunk=64, num_pages=64)
    for i, prompt in enumerate(prompts()):
        engine.add(str(i), prompt, NUM_NEW, sampling={"logprobs": True})
    engine.run()
    right, count = 0, 0
    for i, prompt in enumerate(prompts()):
        tokens = torch.tensor(prompt + engine.outputs[str(i)])
        logits, hidden = oracle.run(tokens, {})
        expected = logits.log_softmax(-1)[len(prompt) - 1:-1].max(-1).values  # of the token that the oracle would take
        chunks = [chunk for message in engine.messages[str(i)] for chunk in message.output_logprobs]
        found = np.concatenate([np.frombuffer(chunk.logprobs, np.float32) for chunk in chunks])
        assert np.abs(found - expected.numpy()).max() < 1e-3
        drafts = oracle.mtp(tokens[1:], hidden[:-1], {})[0].argmax(-1)
        agree = (drafts[:-1] == tokens[2:])[len(prompt):]
        right, count = right + int(agree.sum()), count + len(agree)
    assert right / count > 0.4, right / count


@pytest.mark.parametrize("num_steps", [1, 3])
def test_acceptance_is_the_same_after_every_kind_of_hit(num_steps: int) -> None:
    """Answers and verify steps: cold, from the device (ending with a page or inside one), from the host, after a flush, and once more."""
    engine = model(num_steps).engine(page_size=16, chunk=64, num_pages=40, num_host_pages=400)
    plain = model(0).engine(page_size=16, chunk=64, num_pages=40)
    seen: dict[str, list[tuple[list[int], int]]] = {}
    tails, hosts = set(), set()

    def ask_all(name: str) -> None:
        seen[name] = []
        for i, prompt in enumerate(prompts()):
            rid = f"{name} {i}"
            engine.add(rid, prompt, NUM_NEW, sampling={"stop_token_ids": [1]})
            engine.run(max_turns=100_000)
            last = engine.last[rid]
            seen[name].append((engine.outputs[rid], last.spec.num_verify_steps))
            hit = name not in ("cold", "flushed")
            assert last.num_cached_tokens == (len(prompt) - 1 if hit else 0)
            if hit:
                tails.add(last.num_cached_tokens % 16 > 0)
                hosts.add(last.num_cached_host > 0)

    ask_all("cold")
    ask_all("device")
    for i in range(6):
        engine.add(f"other {i}", np.random.default_rng(i).integers(8, 4000, 300), 1)
        engine.run(max_turns=100_000)
    ask_all("host")
    assert engine.scheduler.flush()
    ask_all("flushed")
    ask_all("again")
    assert hosts == {True, False} and True in tails
    for name, answers in seen.items():
        assert answers == seen["cold"], name
    num_tokens, num_steps_taken = sum(len(tokens) for tokens, _ in seen["cold"]), sum(steps for _, steps in seen["cold"])
    assert num_tokens / num_steps_taken > 1.3
    for i, prompt in enumerate(prompts()):
        plain.add(str(i), prompt, NUM_NEW, sampling={"stop_token_ids": [1]})
        plain.run()
        assert plain.outputs[str(i)] == seen["cold"][i][0]
