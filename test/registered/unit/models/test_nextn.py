"""The draft layer of every family that has one, against its references: logits of all rows, chained tokens, and where its weights may lie."""
import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kits.checkpoints import CHECKPOINTS, LATENT_FAMILIES, RELEASED, tiny
from kits.dense_attention import DenseAttention
from sglane.configs.model_config import OWN_DRAFT, ModelConfigError, load_model_config
from sglane.model_executor.loader import CheckpointError, load_model

CPU = torch.device("cpu")
DRAFTED = [name for name in CHECKPOINTS + RELEASED if name.startswith(LATENT_FAMILIES)]


def load(path: Path, draft: str | None = OWN_DRAFT):
    return load_model(load_model_config(str(path), None, draft), CPU, torch.float32, show_progress=False)


@functools.lru_cache(maxsize=1)
def loaded(name: str):
    return load(tiny(name)), load_file(tiny(name) / "ref.safetensors")


def check(model, ref, n: int, chunk: int = 1 << 20) -> None:
    attention, planes = DenseAttention(), DenseAttention()
    hidden = attention.hidden(model, ref[f"prompt.{n}"])
    following = torch.cat((ref[f"prompt.{n}"][1:], ref[f"greedy.{n}"][:1]))
    g = torch.cat([planes.draft(model, following[begin:begin + chunk], hidden[begin:begin + chunk]) for begin in range(0, n, chunk)])
    assert (model.logits(g) - ref[f"mtp_logits.{n}"]).abs().max() < 1e-4, n
    chain, g = [int(model.logits(g[-1:]).argmax())], g[-1:]
    for _ in ref[f"mtp_chain.{n}"][1:]:
        g = planes.draft(model, torch.tensor(chain[-1:]), g)
        chain.append(int(model.logits(g).argmax()))
    assert chain == ref[f"mtp_chain.{n}"].tolist(), n
    assert planes.hooks.layers == [model.config.num_layers] * len(planes.hooks.layers)


@pytest.mark.parametrize("chunk", [1 << 20, 8])
@pytest.mark.parametrize("name", DRAFTED)
def test_against_references(name: str, chunk: int) -> None:
    model, ref = loaded(name)
    for n in (1, 7, 64, 65, 200):
        check(model, ref, n, chunk)


def test_planes_have_the_layer_and_its_weights_count() -> None:
    for name, planes in (("deepseek_v3", ["target.kv", "draft.kv"]), ("glm_moe_dsa_share", ["target.kv", "target.index", "draft.kv", "draft.index"])):
        model, _ = loaded(name)
        assert [plane.name for plane in model.config.kv_planes()] == planes
        assert list(model.config.written_after()) == planes
        assert model.config.written_after()["draft.kv"] == (model.config.num_layers,)
        without = load(tiny(name), None)
        assert not any(plane.name.startswith("draft.") for plane in without.config.kv_planes())
        assert model.weight_bytes > without.weight_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a checkpoint whose draft layer lies elsewhere."""
    shutil.copytree(tiny("deepseek_v32"), tmp_path / "model")
    return tmp_path / "model"


def move_draft(folder: Path, target: Path, layer: int | None, **config: object) -> Path:
    """The draft layer's tensors, with another number if `layer` is given, in a folder of their own."""
    target.mkdir()
    sizes = json.loads((folder / "config.json").read_text())
    number = sizes["num_hidden_layers"] if layer is None else layer
    tensors = load_file(folder / "model-mtp.safetensors")
    save_file({name.replace(f"layers.{sizes['num_hidden_layers']}.", f"layers.{number}."): tensor for name, tensor in tensors.items()},
              target / "model-mtp.safetensors")
    (target / "config.json").write_text(json.dumps({**sizes, **config}))
    (folder / "model-mtp.safetensors").unlink()
    for index in folder.glob("*.index.json"):
        found = json.loads(index.read_text())
        found["weight_map"] = {name: file for name, file in found["weight_map"].items() if "mtp" not in file}
        index.write_text(json.dumps(found))
    return target


@pytest.mark.parametrize("layer", [None, 0])
def test_a_folder_of_its_own(folder: Path, layer: int | None) -> None:
    target = move_draft(folder, folder.parent / "draft", layer)
    with pytest.raises(CheckpointError, match="no NextN layer.*--speculative-draft-model-path"):
        load(folder)
    check(load(folder, str(target)), load_file(folder / "ref.safetensors"), 65)


@pytest.mark.parametrize(("key", "value"), [("hidden_size", 96), ("vocab_size", 100), ("n_routed_experts", 16), ("index_topk", 8),
                                            ("kv_lora_rank", 32)])
def test_a_folder_that_does_not_fit(folder: Path, key: str, value: int) -> None:
    target = move_draft(folder, folder.parent / "draft", None, **{key: value})
    with pytest.raises(ModelConfigError, match=f"--speculative-draft-model-path .*{value}"):
        load(folder, str(target))


def test_models_without_one(folder: Path) -> None:
    for path, draft in ((tiny("llama"), OWN_DRAFT), (tiny("qwen3"), str(folder))):
        with pytest.raises(ModelConfigError, match="no NextN layer.*NGRAM"):
            load_model_config(str(path), None, draft)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelConfigError, match="num_nextn_predict_layers is 0"):
        load_model_config(str(folder), None, OWN_DRAFT)
    with pytest.raises(ModelConfigError, match="no config.json"):
        load_model_config(str(folder), None, str(folder.parent / "nowhere"))


def test_a_missing_tensor_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model-mtp.safetensors")
    name = next(name for name in tensors if name.endswith("hnorm.weight"))
    del tensors[name]
    save_file(tensors, folder / "model-mtp.safetensors")
    with pytest.raises(CheckpointError, match=name):
        load(folder)


def test_other_files_are_no_part_of_the_main_model(folder: Path) -> None:
    """A file of another draft format beside the checkpoint: nobody reads it, with drafts or without."""
    save_file({"mtp.other.weight": torch.zeros(2), "model.norm.weight": torch.zeros(3)}, folder / "other-mtp.safetensors")
    check(load(folder), load_file(folder / "ref.safetensors"), 7)
    assert load(folder, None).config.draft is None
