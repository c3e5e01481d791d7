"""Configurations of the tiny checkpoints: sizes small enough for a CPU, large enough that every mechanism shows.

Hidden size 192 makes FP8 blocks of 128 + 64; 16 selected keys make prompts of 64 and more sparse; 16 index heads keep scores from being
exactly zero, where ties would be decided by accident.
"""
from typing import Any

#: Families; the latent-attention ones also have variants stored in bfloat16 and FP8, and with a config.json as released.
FAMILIES = ("deepseek_v32", "glm_moe_dsa", "glm_moe_dsa_share", "deepseek_v3", "qwen3", "llama")
LATENT_FAMILIES = FAMILIES[:4]
VARIANTS = ("bf16", "fp8")
CHECKPOINTS = FAMILIES + tuple(f"{family}_{variant}" for family in LATENT_FAMILIES for variant in VARIANTS)
RELEASED = tuple(f"{family}_released" for family in LATENT_FAMILIES)
#: Seeds whose margins are healthy (see `healthy` in make_tiny), by checkpoint; others are searched only if these fail.
SEEDS = {
    "deepseek_v32": 1, "deepseek_v32_bf16": 61, "deepseek_v32_fp8": 74, "glm_moe_dsa": 5, "glm_moe_dsa_bf16": 8, "glm_moe_dsa_fp8": 5,
    "glm_moe_dsa_share": 36, "glm_moe_dsa_share_bf16": 36, "glm_moe_dsa_share_fp8": 36, "deepseek_v3": 1, "deepseek_v3_bf16": 1,
    "deepseek_v3_fp8": 4, "qwen3": 0, "llama": 0,
}

_LATENT: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 192, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 1, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "num_nextn_predict_layers": 1,
}
_INDEX: dict[str, Any] = {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 16}
_YARN: dict[str, Any] = {
    "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
}
_DENSE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1,
}
_DEEPSEEK: dict[str, Any] = {"n_group": 4, "topk_group": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
_GLM: dict[str, Any] = {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "indexer_rope_interleave": True}


def transformers_config(family: str) -> Any:
    """A transformers configuration object."""
    import transformers

    if family == "deepseek_v32":
        return transformers.DeepseekV32Config(**_LATENT, **_INDEX, **_DEEPSEEK, rope_scaling=dict(_YARN))
    if family == "deepseek_v3":
        return transformers.DeepseekV3Config(**_LATENT, **_DEEPSEEK, rope_scaling=dict(_YARN))
    if family == "glm_moe_dsa":  # an indexer in every layer
        return transformers.GlmMoeDsaConfig(**_LATENT, **_INDEX, **_GLM, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    if family == "glm_moe_dsa_share":  # layers 2 and 4 reuse a selection
        sizes = {**_LATENT, "num_hidden_layers": 6}
        return transformers.GlmMoeDsaConfig(**sizes, **_INDEX, **_GLM, index_topk_freq=2, index_skip_topk_offset=2,
                                            index_share_for_mtp_iteration=True, rope_parameters={"rope_theta": 8e6, "rope_type": "default"})
    if family == "qwen3":
        return transformers.Qwen3Config(**_DENSE, head_dim=24, rms_norm_eps=1e-6, tie_word_embeddings=True,
                                        rope_parameters={"rope_theta": 1e6, "rope_type": "default"})
    if family == "llama":
        return transformers.LlamaConfig(**_DENSE, head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=False, rope_parameters={
            "rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64})
    raise KeyError(family)


def released_style(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration with the keys that released checkpoints use, misleading ones included."""
    dropped = ("layer_types", "mlp_layer_types", "head_dim", "qk_head_dim", "mlp_bias", "output_router_logits", "dtype")
    new = {key: value for key, value in config.items() if key not in dropped}
    new |= {"torch_dtype": config.get("dtype", "float32"), "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if config["model_type"].startswith("deepseek"):
        rope = dict(new.pop("rope_parameters"))
        new |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {key: value for key, value in rope.items() if key != "rope_type"}}
        return new
    new["head_dim"] = 192
    if set(new["indexer_types"]) == {"full"}:
        del new["indexer_types"]
    return new
