"""config.json in both styles, and what is refused."""
import json
import subprocess
import sys

import pytest

from sglane.configs.model_config import ModelConfigError, load_model_config

DEEPSEEK_V32 = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "first_k_dense_replace": 3,
    "intermediate_size": 18432, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "moe_layer_freq": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 163840, "num_nextn_predict_layers": 1,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096},
    "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
}
GLM5 = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "vocab_size": 154880, "hidden_size": 6144, "num_hidden_layers": 78,
    "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 192, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "first_k_dense_replace": 3,
    "intermediate_size": 12288, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829],
    "num_nextn_predict_layers": 1,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 512, "rope_theta": 5e5,
    "rms_norm_eps": 1e-5, "torch_dtype": "float16",
}


@pytest.fixture
def load(tmp_path):
    def loader(values, context_length=None, **changes):
        merged = {key: value for key, value in {**values, **changes}.items() if value != "absent"}
        (tmp_path / "config.json").write_text(json.dumps(merged))
        return load_model_config(str(tmp_path), context_length)

    return loader


def test_deepseek_v32_as_released(load):
    config = load(DEEPSEEK_V32)
    assert config.head_dim == 192 and config.num_kv_heads == 128 and config.context_length == 163840
    assert config.kv_planes() == (("target.kv", 61, 576), ("target.index", 61, 128))
    assert config.moe.layers == frozenset(range(3, 61)) and config.moe.num_groups == 8
    assert not config.index.rope_interleave
    rope = config.rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_positions, rope.amplitude) == ("yarn", 10000, 40, 4096, 1.0)
    assert (config.dtype, config.eos_token_ids, config.bos_token_id, config.num_draft_layers) == ("bfloat16", (1,), 0, 1)


def test_as_saved_by_transformers(load):
    """New rope key, lists per layer instead of numbers, no router keys: the same model."""
    scaling = DEEPSEEK_V32["rope_scaling"]
    saved = load(DEEPSEEK_V32, rope_theta="absent", rope_scaling="absent", rope_parameters={**scaling, "rope_theta": 10000, "rope_type": "yarn"},
                 torch_dtype="absent", dtype="bfloat16", scoring_func="absent", topk_method="absent", moe_layer_freq="absent",
                 first_k_dense_replace="absent", mlp_layer_types=["dense"] * 3 + ["sparse"] * 58, head_dim=64)
    assert saved == load(DEEPSEEK_V32)


def test_glm_defaults(load):
    config = load(GLM5)
    assert config.index.rope_interleave and config.index.full_layers == tuple(range(78))
    assert config.rope.theta == 1e6 and config.rope.kind == "default" and config.head_dim == 256
    assert config.eos_token_ids == (154820, 154827, 154829)
    assert not load(GLM5, indexer_rope_interleave=False).index.rope_interleave


def test_index_share_schedules_agree(load):
    full = (0, 1, 2, *range(6, 78, 4))
    marks = ["full" if i in full else "shared" for i in range(78)]
    explicit = load(GLM5, indexer_types=marks)
    assert explicit.index.full_layers == full and len(full) == 21
    assert load(GLM5, index_topk_freq=4, index_skip_topk_offset=3).index.full_layers == full
    assert load(GLM5, index_topk_pattern="".join(mark[0].upper() for mark in marks)).index.full_layers == full
    assert load(GLM5, indexer_types=marks, index_topk_pattern="F" * 78).index.full_layers == full  # the list wins
    assert explicit.kv_planes()[1] == ("target.index", 21, 128)
    assert [explicit.index.plane_layer(layer) for layer in (0, 2, 3, 6)] == [0, 2, None, 3]


def test_llama_and_qwen3(load):
    config = load(LLAMA)
    assert (config.head_dim, config.dtype, config.context_length) == (16, "float16", 512)
    assert config.kv_planes() == (("target.kv", 2, 64),)
    assert config.eos_token_ids == () and config.bos_token_id is None
    assert load(LLAMA, rope_theta="absent").rope.theta == 10000.0
    wide = load(LLAMA, model_type="qwen3", head_dim=24)
    assert wide.kv_planes() == (("target.kv", 2, 96),)
    with pytest.raises(ModelConfigError, match="rope_theta"):
        load(LLAMA, model_type="qwen3", rope_theta="absent")


def test_yarn_extends_and_amplifies(load):
    """Scaling without mscale keys: cosine and sine grow by 0.1 ln(factor) + 1, and the limit is factor times the original context."""
    config = load(LLAMA, model_type="qwen3", rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512})
    assert config.context_length == 2048
    assert config.rope.amplitude == pytest.approx(1.138629436)


def test_end_tokens_of_both_files(load, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert load(LLAMA, eos_token_id=2).eos_token_ids == (2, 5)


def test_context_length(load):
    assert load(LLAMA, context_length=100).context_length == 100
    with pytest.raises(ModelConfigError, match="--context-length 513 .* 512"):
        load(LLAMA, context_length=513)


def test_unsupported_model_type_is_named(load):
    with pytest.raises(ModelConfigError, match=r"model_type 'glm5_next'.*deepseek_v3, deepseek_v32, glm_moe_dsa, llama, qwen3"):
        load(LLAMA, model_type="glm5_next")


@pytest.mark.parametrize(("base", "changes", "word"), [
    (LLAMA, {"hidden_size": "absent"}, "'hidden_size'"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
    (LLAMA, {"use_sliding_window": True}, "use_sliding_window"),
    (LLAMA, {"torch_dtype": "int8"}, "int8"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic'"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (LLAMA, {"quantization_config": {"quant_method": "awq"}}, "'awq'"),
    (DEEPSEEK_V32, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, r"\[64, 64\]"),
    (DEEPSEEK_V32, {"scoring_func": "softmax"}, "scoring_func"),
    (DEEPSEEK_V32, {"topk_method": "greedy"}, "topk_method"),
    (DEEPSEEK_V32, {"n_group": 7}, "n_group"),
    (DEEPSEEK_V32, {"q_lora_rank": None}, "'q_lora_rank'"),
    (DEEPSEEK_V32, {"attention_bias": True}, "attention_bias"),
    (GLM5, {"indexer_types": ["full"] * 3}, "indexer_types"),
    (GLM5, {"index_topk_pattern": "X" * 78}, "index_topk_pattern"),
    (GLM5, {"index_topk_pattern": "S" + "F" * 77}, "layer 0"),
])
def test_refused(load, base, changes, word):
    with pytest.raises(ModelConfigError, match=word):
        load(base, **changes)


def test_missing_folder_and_files(tmp_path):
    with pytest.raises(ModelConfigError, match="nowhere"):
        load_model_config(str(tmp_path / "nowhere"), None)
    with pytest.raises(ModelConfigError, match="no config.json"):
        load_model_config(str(tmp_path), None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="config.json"):
        load_model_config(str(tmp_path), None)


def test_needs_no_torch():
    code = ("import sys, sglane.configs.model_config as m; m.load_model_config(None, None); "
            "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
