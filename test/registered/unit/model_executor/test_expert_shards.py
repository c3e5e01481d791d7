"""Loading a share of the experts: what is read, what is only checked, and what it weighs; every stored form of experts."""
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kits.checkpoints import tiny
from sglane.configs.model_config import load_model_config
from sglane.layers.moe.shard import ExpertShard
from sglane.model_executor.loader import CheckpointError, CheckpointWeights, load_model, open_store
from sglane.model_executor.loader_progress import LoadProgress
from sglane.model_executor.loader_safetensors import SafetensorsStore
from sglane.models.registry import model_class

CPU = torch.device("cpu")
NUM_EXPERTS, LAYERS = 8, (1, 2, 3)  # of the tiny checkpoints
FORMS = ("deepseek_v32", "fused", "deepseek_v32_fp8", "fused_fp8")


def fuse(tensors):
    """All experts of a layer in one tensor, gate rows before up rows. In FP8, the joined rows need a grid of scales of their own."""
    for layer in LAYERS:
        p = f"model.layers.{layer}.mlp.experts."
        for suffix in ("", "_scale_inv"):
            parts = [[tensors.pop(f"{p}{e}.{kind}_proj.weight{suffix}", None) for e in range(NUM_EXPERTS)] for kind in ("gate", "up", "down")]
            if parts[0][0] is None:
                continue
            gate, up, down = parts
            # 64 + 64 rows of gate and up share one row of blocks: the test looks at what is read, not at numbers.
            tensors[f"{p}gate_up_proj{suffix}"] = torch.stack(gate if suffix else [torch.cat(pair) for pair in zip(gate, up)])
            tensors[f"{p}down_proj{suffix}"] = torch.stack(down)


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(form, change): a folder with the model in one file, after change(tensors)."""
    def make(form, change=lambda tensors: None):
        source, tensors = tiny("deepseek_v32_fp8" if form.endswith("fp8") else "deepseek_v32"), {}
        for file in sorted(source.glob("model*.safetensors")):
            tensors |= load_file(file)
        if form.startswith("fused"):
            fuse(tensors)
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        shutil.copy(source / "config.json", tmp_path)
        return tmp_path

    return make


class SpyStore(SafetensorsStore):
    """Remembers (tensor, part) of everything that is read."""

    def __init__(self, path):
        super().__init__(path)
        self.reads = []

    def read(self, name, part=None):
        self.reads.append((name, part))
        return super().read(name, part)


def load_spied(path, rank, size, keep_fp8):
    """The model of one rank, and its store."""
    config, store = load_model_config(str(path), None), SpyStore(str(path))
    weights = CheckpointWeights(store, config, CPU, torch.float32, LoadProgress("", False), keep_fp8=keep_fp8)
    model = model_class(config)(config, weights, ExpertShard(rank, size))
    weights.finish()
    return model, store


def is_routed(name):
    return ".mlp.experts." in name


def expert_of(name, part):
    return int(re.search(r"experts\.(\d+)\.", name).group(1)) if part is None else part


@pytest.mark.parametrize("keep_fp8", [False, True])
@pytest.mark.parametrize("size", [1, 3, 8, 11])
@pytest.mark.parametrize("form", FORMS)
def test_a_rank_reads_its_own_experts_and_everything_else(checkpoint, form, size, keep_fp8):
    """Over all ranks every piece of an expert is read once, and the memory adds up."""
    path = checkpoint(form)
    whole, store = load_spied(path, 0, 1, keep_fp8)
    routed = sorted(read for read in store.reads if is_routed(read[0]))
    common = sorted(read for read in store.reads if not is_routed(read[0]))
    assert routed and len(set(store.reads)) == len(store.reads)
    every, found = [], []
    for rank in range(size):
        model, store = load_spied(path, rank, size, keep_fp8)
        own = [read for read in store.reads if is_routed(read[0])]
        assert {expert_of(*read) for read in own} == set(ExpertShard(rank, size).held(NUM_EXPERTS))
        assert sorted(read for read in store.reads if not is_routed(read[0])) == common
        every += own
        found.append(model.weight_bytes)
    assert sorted(every) == routed
    replicated = load_spied(path, 0, NUM_EXPERTS + 1, keep_fp8)[0].weight_bytes  # the first of nine ranks holds no expert
    assert sum(found) == whole.weight_bytes + (size - 1) * replicated


@pytest.mark.parametrize(("form", "tensor", "error"), [
    ("deepseek_v32", "model.layers.3.mlp.experts.7.down_proj.weight", "missing"),
    ("deepseek_v32_fp8", "model.layers.2.mlp.experts.6.up_proj.weight_scale_inv", "missing"),
    ("fused", "model.layers.1.mlp.experts.down_proj", "missing"),
    ("fused_fp8", "model.layers.1.mlp.experts.gate_up_proj_scale_inv", "missing"),
])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_another_rank_reads_must_be_there(checkpoint, form, tensor, error, rank):
    """Every rank says so, not only the one that would read it."""
    path = checkpoint(form, lambda tensors: tensors.pop(tensor))
    with pytest.raises(CheckpointError, match=f"'{tensor}'.*{error}"):
        load_spied(path, rank, 2, keep_fp8=False)


@pytest.mark.parametrize(("form", "tensor", "shape"), [
    ("deepseek_v32", "model.layers.1.mlp.experts.5.gate_proj.weight", r"\[65, 192\], expected \[64, 192\]"),
    ("deepseek_v32_fp8", "model.layers.1.mlp.experts.5.gate_proj.weight_scale_inv", r"\[2, 2\], expected \[1, 2\]"),
    ("fused", "model.layers.1.mlp.experts.gate_up_proj", r"\[9, 128, 192\], expected \[8, 128, 192\]"),
    ("fused_fp8", "model.layers.2.mlp.experts.down_proj_scale_inv", r"\[9, 2, 1\], expected \[8, 2, 1\]"),
])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_another_rank_reads_must_have_its_shape(checkpoint, form, tensor, shape, rank):
    def change(tensors):
        tensors[tensor] = torch.cat((tensors[tensor], tensors[tensor][:1]))

    path = checkpoint(form, change)
    with pytest.raises(CheckpointError, match=f"'{tensor}' has shape {shape}"):
        load_spied(path, rank, 2, keep_fp8=False)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.8.up_proj.weight", "model.layers.1.mlp.experts.7.up_proj.weight_scale_inv"])
@pytest.mark.parametrize("rank", [0, 1])
def test_more_than_the_experts_is_unexpected(checkpoint, name, rank):
    path = checkpoint("deepseek_v32", lambda tensors: tensors.update({name: torch.zeros(1, 2)}))
    with pytest.raises(CheckpointError, match=f"unexpected.*{name}"):
        load_spied(path, rank, 2, keep_fp8=False)


@pytest.mark.parametrize("size", [2, 9])
def test_progress_ends_at_all_shards(capsys, size):
    """Files that hold nothing but other ranks' experts count too."""
    path = tiny("deepseek_v32")
    files = {file for name, file in json.loads((path / "model.safetensors.index.json").read_text())["weight_map"].items() if ".layers.4." not in name}
    for rank in (0, size - 1):
        load_model(load_model_config(str(path), None), CPU, torch.float32, True, force_progress=True, shard=ExpertShard(rank, size))
        assert f"100% Completed | {len(files)}/{len(files)}" in capsys.readouterr().err


def resident(path: Path) -> int:
    """Bytes of this process's mappings of a file that are in memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


def test_bytes_of_other_experts_stay_on_disk(checkpoint):
    """A fused tensor of 32 experts of 1 MiB: the memory that reading four of them maps is little more than theirs."""
    path = checkpoint("deepseek_v32", lambda tensors: tensors.update({"x": torch.randn(32, 512, 512)}))
    config = load_model_config(str(path), None)
    weights = CheckpointWeights(open_store(config), config, CPU, torch.float32, LoadProgress("", False))
    weights.expect("x", (32, 512, 512))
    assert resident(path / "model.safetensors") < 1 << 20
    total = sum(weights.matrix("x", (512, 512), part).data.sum() for part in range(8, 12))
    assert total.isfinite()
    assert 4 << 20 <= resident(path / "model.safetensors") < 12 << 20
    assert weights.resident_bytes == 4 << 20


def test_load_model_takes_the_shard():
    """The way the server goes."""
    path = tiny("glm_moe_dsa")
    config = load_model_config(str(path), None)
    whole, share = (load_model(config, CPU, torch.float32, False, shard=ExpertShard(0, size)) for size in (1, 4))
    one = 3 * config.moe.intermediate_size * config.hidden_size * 4
    assert whole.weight_bytes - share.weight_bytes == 6 * len(config.moe.layers) * one
