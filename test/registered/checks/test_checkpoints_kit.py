"""The tiny checkpoints themselves: made once, healthy margins, an oracle that agrees with transformers and with itself in chunks."""
import json
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from kits import checkpoints
from kits.checkpoints import CHECKPOINTS, LATENT_FAMILIES, RELEASED, tiny
from kits.make_tiny import CHAIN, healthy, oracle_draft
from kits.oracle import Oracle
from kits.tiny_configs import SEEDS


@pytest.mark.parametrize("name", CHECKPOINTS + RELEASED)
def test_margins_and_agreement(name):
    report = json.loads((tiny(name) / "ref.json").read_text())
    assert healthy(report["margins"])
    assert max(report["differences"].values()) < 5e-5
    assert report["seed"] == SEEDS[name.removesuffix("_released")], "the known seed is not healthy any more: put the new one into SEEDS"


@pytest.mark.parametrize("name", [f"{family}_fp8" for family in LATENT_FAMILIES] + ["qwen3"])
def test_oracle_in_chunks(name):
    path = tiny(name)
    oracle, ref, cache = Oracle(path), load_file(path / "ref.safetensors"), {}
    pieces = [oracle.run(part, cache) for part in ref["prompt.65"].split(13)]
    assert (torch.cat([logits for logits, _ in pieces]) - ref["logits.65"]).abs().max() < 1e-4
    assert (torch.cat([hidden for _, hidden in pieces]) - ref["hidden.65"]).abs().max() < 1e-4


def test_oracle_drafts_what_transformers_drafts():
    path = tiny("deepseek_v32")
    ref = load_file(path / "ref.safetensors")
    next_ids = torch.cat((ref["prompt.64"][1:], ref["greedy.64"][:1]))
    logits, chain = oracle_draft(Oracle(path), next_ids, ref["hidden.64"])
    assert (logits - ref["mtp_logits.64"]).abs().max() < 1e-4
    assert len(chain) == CHAIN and torch.equal(chain, ref["mtp_chain.64"])


def test_made_once_by_many(tmp_path, monkeypatch):
    calls = []

    def make(family, folder):
        calls.append(family)
        time.sleep(0.05)
        (folder / family).mkdir()

    monkeypatch.setenv("SGLANE_TEST_CACHE", str(tmp_path))
    monkeypatch.setattr(checkpoints, "make_family", make)
    threads = [threading.Thread(target=tiny, args=("deepseek_v32_fp8",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == ["deepseek_v32"]
    assert tiny("deepseek_v3_bf16").name == "deepseek_v3_bf16" and calls[1:] == ["deepseek_v3"]
    with pytest.raises(KeyError, match="gpt2"):
        tiny("gpt2")
