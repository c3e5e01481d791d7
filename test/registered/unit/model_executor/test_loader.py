"""Checkpoints as they come: stored forms, tensors that are missing or too many, draft layers, progress."""
import json
import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kits import oracle
from kits.checkpoints import tiny
from kits.dense_attention import DenseAttention
from kits.fp8_blocks import dequantised, quantise
from sglane.configs.model_config import load_model_config
from sglane.layers.weights import dense
from sglane.model_executor.loader import CheckpointError, CheckpointWeights, load_model, open_store
from sglane.model_executor.loader_gguf import GGUFStore, halves_from_pairs
from sglane.model_executor.loader_progress import LoadProgress
from sglane.models.registry import model_class

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


def load(path, dtype=torch.float32, **options):
    return load_model(load_model_config(str(path), None), CPU, dtype, show_progress=False, **options)


def logits_of(path, n=65):
    ref = load_file(path / "ref.safetensors")
    return DenseAttention().run(load(path), ref[f"prompt.{n}"]), ref[f"logits.{n}"]


@pytest.fixture
def edited(tmp_path):
    """edited(name, change): a copy of a tiny checkpoint in one file, after change(tensors)."""

    def make(name, change, **config):
        source, tensors = tiny(name), {}
        for file in sorted(source.glob("model*.safetensors")):
            tensors |= load_file(file)
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        shutil.copy(source / "ref.safetensors", tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
        return tmp_path

    return make


def assert_right(path):
    found, expected = logits_of(path)
    assert (found - expected).abs().max() < 1e-4


def test_one_file_without_index(edited):
    assert_right(edited("llama", lambda tensors: None))


@pytest.mark.parametrize(("name", "tensor"), [
    ("llama", "model.layers.2.mlp.up_proj.weight"), ("llama", "lm_head.weight"), ("deepseek_v32", "model.layers.1.self_attn.indexer.k_norm.bias"),
    ("deepseek_v32", "model.layers.3.mlp.experts.7.down_proj.weight"), ("deepseek_v32_fp8", "model.layers.0.self_attn.q_b_proj.weight_scale_inv"),
])
def test_missing_tensor_is_named(edited, name, tensor):
    with pytest.raises(CheckpointError, match=f"'{tensor}'.*missing"):
        load(edited(name, lambda tensors: tensors.pop(tensor)))


@pytest.mark.parametrize("tensor", ["model.layers.0.self_attn.q_proj.bias", "model.layers.9.mlp.up_proj.weight", "visual.patch.weight"])
def test_unexpected_tensor_is_named(edited, tensor):
    with pytest.raises(CheckpointError, match=f"unexpected.*{tensor}"):
        load(edited("deepseek_v32", lambda tensors: tensors.update({tensor: torch.zeros(2)})))


def test_many_unexpected_tensors_are_counted(edited):
    with pytest.raises(CheckpointError, match="and 22 more"):
        load(edited("llama", lambda tensors: tensors.update({f"extra.{i}": torch.zeros(1) for i in range(30)})))


def test_scale_of_a_weight_that_is_not_fp8_is_unexpected(edited):
    with pytest.raises(CheckpointError, match="unexpected.*o_proj.weight_scale_inv"):
        load(edited("deepseek_v3", lambda t: t.update({"model.layers.0.self_attn.o_proj.weight_scale_inv": torch.ones(2, 2)})))


@pytest.mark.parametrize(("name", "tensor", "shape"), [
    ("llama", "model.layers.1.self_attn.k_proj.weight", r"\[33, 128\], expected \[32, 128\]"),
    ("deepseek_v3_fp8", "model.layers.0.mlp.down_proj.weight_scale_inv", r"\[3, 2\], expected \[2, 2\]"),
])
def test_wrong_shape_is_named(edited, name, tensor, shape):
    def change(tensors):
        tensors[tensor] = torch.cat((tensors[tensor], tensors[tensor][:1]))

    with pytest.raises(CheckpointError, match=f"'{tensor}' has shape {shape}"):
        load(edited(name, change))


def test_unsupported_stored_type_is_named(edited):
    def change(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.int8)

    with pytest.raises(CheckpointError, match="'model.layers.0.mlp.up_proj.weight' is stored as torch.int8"):
        load(edited("llama", change))


def test_rotary_buffers_are_skipped(edited):
    assert_right(edited("llama", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})))


@pytest.mark.parametrize("declared", [0, 1])
def test_draft_layer_may_be_there_or_not(edited, declared):
    """Present without being declared, or declared without being present: both load."""
    def drop(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.4.")]:
            del tensors[name]

    change = drop if declared else (lambda tensors: None)
    path = edited("deepseek_v32", change, num_nextn_predict_layers=declared)
    assert_right(path)
    names = open_store(load_model_config(str(path), None)).names()
    assert any(name.startswith("model.layers.4.") for name in names) != bool(declared)


def test_tied_head(edited):
    """Tied models load without a head, and with a copy of it."""
    assert_right(tiny("qwen3"))
    assert_right(edited("qwen3", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})))


def test_fused_expert_tensors(edited):
    """All experts of a layer in one tensor, gate rows before up rows."""
    def fuse(tensors):
        for layer in (1, 2, 3):
            p = f"model.layers.{layer}.mlp.experts."
            gate, up, down = ([tensors.pop(f"{p}{e}.{kind}_proj.weight") for e in range(8)] for kind in ("gate", "up", "down"))
            tensors[f"{p}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up)])
            tensors[f"{p}down_proj"] = torch.stack(down)

    path = edited("deepseek_v32", fuse)
    assert_right(path)
    config = load_model_config(str(path), None)
    plain = load(tiny("deepseek_v32"))
    assert load_model(config, CPU, torch.float32, False).weight_bytes == plain.weight_bytes


def test_part_of_a_fused_fp8_tensor(edited):
    """Blocks and scales of one expert out of all, in both forms."""
    experts = [quantise(torch.randn(160, 192), powers_of_two=False) for _ in range(3)]

    def add(tensors):
        tensors["x"], tensors["x_scale_inv"] = (torch.stack(part) for part in zip(*experts))

    config = load_model_config(str(edited("deepseek_v3", add)), None)
    for keep in (True, False):
        weights = CheckpointWeights(open_store(config), config, CPU, torch.float32, LoadProgress("", False), keep_fp8=keep)
        for part, (data, scales) in enumerate(experts):
            matrix = weights.matrix("x", (160, 192), part)
            assert (matrix.scales is not None) == keep
            assert torch.equal(dense(matrix, torch.float32), dequantised(data, scales))


def test_too_few_fused_experts(edited):
    def fuse(tensors):
        p = "model.layers.1.mlp.experts."
        tensors[f"{p}gate_up_proj"] = torch.stack([torch.cat([tensors.pop(f"{p}{e}.{kind}_proj.weight") for kind in ("gate", "up")])
                                                   for e in range(8)])[:5]
        tensors[f"{p}down_proj"] = torch.stack([tensors.pop(f"{p}{e}.down_proj.weight") for e in range(8)])

    with pytest.raises(CheckpointError, match=r"experts.gate_up_proj' has shape \[5, 128, 192\]"):
        load(edited("deepseek_v32", fuse))


@pytest.mark.parametrize("form", ["uint8", "float8_e8m0fnu", "bfloat16"])
def test_scale_forms(edited, form):
    """Powers of two as exponent bytes, in a type of their own, or in bfloat16."""
    def change(tensors):
        for name, scale in tensors.items():
            if name.endswith("_scale_inv"):
                exponent = torch.log2(scale)
                assert torch.equal(exponent, exponent.round())
                tensors[name] = (exponent + 127).to(torch.uint8) if form == "uint8" else scale.to(getattr(torch, form))

    assert_right(edited("deepseek_v32_fp8", change))


def test_scale_of_a_wrong_type(edited):
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    with pytest.raises(CheckpointError, match=f"{name}' is stored as torch.int32"):
        load(edited("deepseek_v3_fp8", lambda tensors: tensors.update({name: tensors[name].int()})))


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa_share", "deepseek_v3"])
def test_fp8_kept_in_memory(family):
    """The form CUDA keeps (FP8 + block scales) computes the same, in less memory."""
    path = tiny(f"{family}_fp8")
    config, ref = load_model_config(str(path), None), load_file(path / "ref.safetensors")
    sizes = {}
    for keep in (True, False):
        weights = CheckpointWeights(open_store(config), config, CPU, torch.float32, LoadProgress("", False), keep_fp8=keep)
        model = model_class(config)(config, weights)
        weights.finish()
        sizes[keep] = model.weight_bytes
        assert (DenseAttention().run(model, ref["prompt.200"]) - ref["logits.200"]).abs().max() < 1e-4
    assert sizes[True] < 0.5 * sizes[False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_and_run_types(edited, dtype):
    def change(tensors):
        for name, value in tensors.items():
            tensors[name] = value.to(dtype)

    path = edited("llama", change)
    model = load(path, torch.bfloat16)
    numel = sum(value.numel() for value in load_file(path / "model.safetensors").values())
    assert model.weight_bytes == 2 * numel


def test_shard_errors(tmp_path):
    source = tiny("llama")
    shutil.copy(source / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"model.safetensors does not exist, and neither"):
        load(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00007.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model-00007.safetensors does not exist, but .* lists it"):
        load(tmp_path)
    (tmp_path / "model-00007.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(CheckpointError, match="model-00007.safetensors"):
        load(tmp_path)


def test_progress_bar(capsys):
    path = tiny("deepseek_v32")
    num_shards = len({value for name, value in json.loads((path / INDEX).read_text())["weight_map"].items() if ".layers.4." not in name})
    config = load_model_config(str(path), None)
    load_model(config, CPU, torch.float32, show_progress=True)
    assert capsys.readouterr().err == ""  # not a terminal
    load_model(config, CPU, torch.float32, show_progress=True, force_progress=True)
    shown = capsys.readouterr().err
    assert f"Loading safetensors checkpoint shards: 100% Completed | {num_shards}/{num_shards}" in shown
    load_model(config, CPU, torch.float32, show_progress=False, force_progress=True)
    assert capsys.readouterr().err == ""


def test_bar_counts_whole_shards(capsys):
    progress = LoadProgress("shards", True, force=True)
    progress.start({"a": "1", "b": "1", "c": "2"})
    progress.taken("a")
    progress.taken("c")
    progress.finish()
    assert " 50% Completed | 1/2" in capsys.readouterr().err


def test_gguf_rows_of_q_and_k_are_put_back():
    """The converter interleaves the two halves of each head; un-permuting must give the original rows."""
    heads, dim, columns = 3, 8, 5
    original = np.arange(heads * dim * columns, dtype=np.float32).reshape(heads * dim, columns)
    stored = original.reshape(heads, 2, dim // 2, columns).swapaxes(1, 2).reshape(original.shape)
    assert not np.array_equal(stored, original)
    assert np.array_equal(halves_from_pairs(stored, heads), original)


def test_gguf_file_of_a_tiny_llama(tmp_path):
    """A whole model through GGUF: names, permuted rows, an output head of its own, rope factors."""
    path, to_gguf = tmp_path / "llama.gguf", tiny("llama")
    config, tensors = json.loads((to_gguf / "config.json").read_text()), load_file(to_gguf / "model.safetensors")
    write_gguf(path, config, tensors)
    ref = load_file(to_gguf / "ref.safetensors")
    loaded = load_model_config(str(path), None)
    assert not loaded.tie_word_embeddings and loaded.dtype == "float32"
    logits = DenseAttention().run(load(path), ref["prompt.65"])
    assert (logits - ref["logits.65"]).abs().max() < 1e-4


def test_gguf_unknown_tensor_is_named(tmp_path):
    path, source = tmp_path / "llama.gguf", tiny("llama")
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    write_gguf(path, config, tensors, {"blk.0.attn_qkv.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(CheckpointError, match="unexpected.*blk.0.attn_qkv.weight"):
        load(path)
    assert "blk.0.attn_qkv.weight" in GGUFStore(load_model_config(str(path), None)).names()


def write_gguf(path, config, tensors, extra=None):
    """What a converter writes for a llama: q and k rows permuted, llama3 rope as a tensor of divisors."""
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
             "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(0)
    for name, value in tensors.items():
        stem = name.removesuffix(".weight")
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
        own = names[stem if layer is None else stem.split(".", 3)[3]]
        rows = value.numpy()
        if own in heads:
            rows = rows.reshape(heads[own], 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        writer.add_tensor(f"{own}.weight" if layer is None else f"blk.{layer}.{own}.weight", np.ascontiguousarray(rows))
    writer.add_tensor("rope_freqs.weight", rope_divisors(config))
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rope_divisors(config):
    rope, dim = config["rope_parameters"], config["head_dim"]
    return (oracle.frequencies({"rope_theta": rope["rope_theta"]}, dim) / oracle.frequencies(config, dim)).numpy()
