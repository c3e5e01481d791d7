"""scripts/cp-memory: its weights are those that ranks load, its table in the docs is current."""
import importlib.machinery
import importlib.util
import sys

import pytest
import torch

from kits.checkpoints import tiny
from kits.structure.source import REPO
from sglane.configs.model_config import load_model_config
from sglane.layers.moe.shard import ExpertShard
from sglane.model_executor.loader import CheckpointWeights, open_store
from sglane.model_executor.loader_progress import LoadProgress
from sglane.models.registry import model_class

PAGE = REPO / "docs" / "advanced_features" / "expert_sharding.md"


@pytest.fixture(scope="module")
def script():
    loader = importlib.machinery.SourceFileLoader("cp_memory", str(REPO / "scripts" / "cp-memory"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("cp_memory", loader))
    sys.modules["cp_memory"] = module  # dataclasses look their module up
    loader.exec_module(module)
    return module


def settings(script, cp_size=8):
    return script.Settings(cp_size, page_size=64, chunk=2048, scratch=131072, fraction=0.85)


@pytest.mark.parametrize("cp_size", [1, 3, 8, 11])
@pytest.mark.parametrize("name", ["deepseek_v3_fp8", "deepseek_v32", "glm_moe_dsa_share_fp8", "llama"])
def test_weights_are_what_ranks_load(script, name, cp_size):
    """The form that stays in memory on CUDA: FP8 with its scales, everything else in bfloat16."""
    path = tiny(name)
    config = load_model_config(str(path), None)
    found = []
    for rank in range(cp_size):
        weights = CheckpointWeights(open_store(config), config, torch.device("cpu"), torch.bfloat16, LoadProgress("", False), keep_fp8=True)
        found.append(model_class(config)(config, weights, ExpertShard(rank, cp_size)).weight_bytes)
    expected = script.rank_of(config, name.endswith("fp8"), settings(script, cp_size))
    assert max(found) == expected.weights
    assert sum(found) == expected.whole + (cp_size - 1) * expected.replicated


def test_published_sizes(script):
    """Parameters and bytes of a token that are known from elsewhere."""
    configs = script.published(list(script.PUBLISHED))
    ranks = {name: script.rank_of(config, False, settings(script)) for name, config in configs.items()}
    assert 670e9 < ranks["DeepSeek-V3.2"].whole / 2 < 673e9  # 671 billion
    assert 740e9 < ranks["GLM-5"].whole / 2 < 746e9  # 744 billion
    assert {name: rank.kv_per_token for name, rank in ranks.items()} == {"DeepSeek-V3.2": 85_888, "GLM-5": 109_824, "GLM-5.2": 95_232}


def test_tokens_fill_what_is_left(script):
    """One page more would not fit; replicated KV has an eighth, and needs no tiles."""
    rank = script.Rank(whole=0, replicated=60 << 30, experts=20 << 30, kv_per_token=100_000, tiles=1 << 30, exchange=1 << 28)
    one = settings(script)
    tokens, budget = rank.tokens(140 << 30, one), 0.85 * (140 << 30)
    used = (81 << 30) + (1 << 28) + tokens // 8 * 100_000
    assert tokens % (8 * 64) == 0 and used <= budget < used + 64 * 100_000
    assert 7.7 < tokens / rank.replicated_tokens(140 << 30, one) < 8
    assert rank.tokens(80 << 30, one) == rank.replicated_tokens(80 << 30, one) == 0


def test_the_page_has_what_the_script_prints(script):
    shown = PAGE.read_text()
    configs = script.published(list(script.PUBLISHED))
    for cp_size in (8, 16):
        parts = script.table(configs, settings(script, cp_size), [139.8, 79.1]).split("\n\n")
        for part in parts if cp_size == 8 else parts[1:]:
            assert part in shown, f"run scripts/cp-memory --cp-size {cp_size} and put its tables into {PAGE.name}"
