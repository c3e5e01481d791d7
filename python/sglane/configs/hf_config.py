"""Sizes from a Hugging Face config.json: as released (rope_theta + rope_scaling, torch_dtype) or as transformers saves it."""
import json
from pathlib import Path
from typing import Any

from sglane.configs.hf_rope import rope_config
from sglane.configs.sizes import (
    SUPPORTED_MODEL_TYPES,
    IndexConfig,
    MlaConfig,
    ModelConfig,
    ModelConfigError,
    ModelSource,
    MoeConfig,
)

#: FP8 weights carry one scale per block of this many rows and columns.
FP8_BLOCK = (128, 128)
DTYPES = ("float32", "bfloat16", "float16")
#: Families whose attention is MLA; of these, the ones with an indexer and how it rotates when the config does not say.
MLA_TYPES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
INDEXER_ROPE_INTERLEAVE = {"deepseek_v32": False, "glm_moe_dsa": True}


class HfFile:
    """A config.json with its path, for messages. A key that is null counts as absent."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.values: dict[str, Any] = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise ModelConfigError(f"{path}: {error}") from error

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            raise ModelConfigError(f"{self.path}: the key '{key}' is missing")
        return value

    def only(self, key: str, supported: Any, default: Any) -> None:
        """Refuse the model unless the key has the one supported value."""
        value = self.get(key, default)
        if value != supported:
            raise ModelConfigError(f"{self.path}: {key} = {value!r} is not supported, only {supported!r}")


def hf_model_config(source: ModelSource, context_length: int | None) -> ModelConfig:
    """Raises ModelConfigError naming the key."""
    file = HfFile(Path(source.path, "config.json"))
    model_type = file.need("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelConfigError(f"{file.path}: model_type '{model_type}' is not supported; supported are {', '.join(SUPPORTED_MODEL_TYPES)}")
    file.only("hidden_act", "silu", "silu")
    check_quantization(file)
    hidden_size, num_heads = file.need("hidden_size"), file.need("num_attention_heads")
    mla = mla_config(file) if model_type in MLA_TYPES else None
    if mla is not None:
        num_kv_heads = num_heads
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim  # the key head_dim means nothing in these families
        file.only("attention_bias", False, False)
        file.only("mlp_bias", False, False)
    else:
        num_kv_heads = file.get("num_key_value_heads", num_heads)
        head_dim = file.get("head_dim", hidden_size // num_heads)
        file.only("use_sliding_window", False, False)
    rope, max_positions = rope_config(file)
    return ModelConfig(
        source=source, model_type=model_type, architectures=tuple(file.get("architectures", ())), vocab_size=file.need("vocab_size"),
        hidden_size=hidden_size, intermediate_size=file.need("intermediate_size"), num_layers=file.need("num_hidden_layers"), num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim, rms_norm_eps=file.get("rms_norm_eps", 1e-6), rope=rope,
        tie_word_embeddings=file.get("tie_word_embeddings", False), attention_bias=file.get("attention_bias", False),
        mlp_bias=file.get("mlp_bias", False), max_position_embeddings=max_positions,
        context_length=served_length(context_length, max_positions), eos_token_ids=end_tokens(file, source), bos_token_id=file.get("bos_token_id"),
        dtype=checkpoint_dtype(file), num_draft_layers=file.get("num_nextn_predict_layers", 0), mla=mla,
        index=index_config(file, model_type), moe=None if mla is None else moe_config(file))


def served_length(asked: int | None, limit: int) -> int:
    """Tokens of the longest request. More than the model's limit is refused: positions beyond it were never trained."""
    if asked is not None and asked > limit:
        raise ModelConfigError(f"--context-length {asked} is more than the model's limit of {limit} tokens")
    return asked or limit


def checkpoint_dtype(file: HfFile) -> str:
    dtype = file.get("dtype", file.get("torch_dtype", "bfloat16"))
    if dtype not in DTYPES:
        raise ModelConfigError(f"{file.path}: dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    return str(dtype)


def end_tokens(file: HfFile, source: ModelSource) -> tuple[int, ...]:
    """End-of-text ids of config.json and generation_config.json together, in this order."""
    found = as_list(file.get("eos_token_id", ()))
    generation = Path(source.path, "generation_config.json")
    if generation.is_file():
        found += as_list(HfFile(generation).get("eos_token_id", ()))
    return tuple(dict.fromkeys(found))


def as_list(ids: int | list[int]) -> list[int]:
    return [ids] if isinstance(ids, int) else list(ids)


def check_quantization(file: HfFile) -> None:
    """FP8 with 128x128 blocks is the one supported form; which tensors have it, the tensors themselves say."""
    quantization = file.get("quantization_config")
    if quantization is None:
        return
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or tuple(block or ()) != FP8_BLOCK:
        raise ModelConfigError(f"{file.path}: quantization_config with quant_method {method!r} and weight_block_size {block} is not supported, "
                               f"only 'fp8' with {list(FP8_BLOCK)}")


def mla_config(file: HfFile) -> MlaConfig:
    return MlaConfig(file.get("q_lora_rank"), file.need("kv_lora_rank"), file.need("qk_nope_head_dim"), file.need("qk_rope_head_dim"),
                     file.need("v_head_dim"))


def moe_config(file: HfFile) -> MoeConfig:
    """Keys that transformers does not save have the values that these families share."""
    file.only("scoring_func", "sigmoid", "sigmoid")
    file.only("topk_method", "noaux_tc", "noaux_tc")
    num_layers, kinds = file.need("num_hidden_layers"), file.get("mlp_layer_types")
    if kinds is None:
        first, every = file.get("first_k_dense_replace", 0), file.get("moe_layer_freq", 1)
        layers = frozenset(i for i in range(num_layers) if i >= first and i % every == 0)
    else:
        layers = frozenset(i for i, kind in enumerate(kinds[:num_layers]) if kind == "sparse")
    num_experts, num_groups = file.need("n_routed_experts"), file.get("n_group", 1)
    if num_experts % num_groups:
        raise ModelConfigError(f"{file.path}: n_group {num_groups} does not divide n_routed_experts {num_experts}")
    return MoeConfig(num_experts, file.get("n_shared_experts", 0), file.need("num_experts_per_tok"), file.need("moe_intermediate_size"), num_groups,
                     file.get("topk_group", 1), file.get("norm_topk_prob", True), file.get("routed_scaling_factor", 1.0), layers)


def index_config(file: HfFile, model_type: str) -> IndexConfig | None:
    """The indexer of the sparse families; None for the others."""
    if model_type not in INDEXER_ROPE_INTERLEAVE:
        return None
    file.need("q_lora_rank")  # index queries are made of the same latent as the attention's
    interleave = file.get("indexer_rope_interleave", INDEXER_ROPE_INTERLEAVE[model_type])
    return IndexConfig(file.need("index_n_heads"), file.need("index_head_dim"), file.need("index_topk"), interleave, full_index_layers(file))


def full_index_layers(file: HfFile) -> tuple[int, ...]:
    """Layers that own an indexer: an explicit list, else a string of F and S, else every freq-th layer from the offset on."""
    num_layers = file.need("num_hidden_layers")
    types, pattern = file.get("indexer_types"), file.get("index_topk_pattern")
    if types is not None or pattern is not None:
        key, marks = ("indexer_types", types) if types is not None else ("index_topk_pattern", list(pattern))
        known = {"full": True, "shared": False, "F": True, "S": False}
        if len(marks) < num_layers or any(mark not in known for mark in marks):
            raise ModelConfigError(f"{file.path}: {key} must have one of {', '.join(known)} for each of {num_layers} layers, got {marks}")
        full = tuple(i for i in range(num_layers) if known[marks[i]])
    else:
        freq, offset = file.get("index_topk_freq", 1), file.get("index_skip_topk_offset", 2)
        full = tuple(i for i in range(num_layers) if max(i - offset + 1, 0) % freq == 0)
    if full[:1] != (0,):
        raise ModelConfigError(f"{file.path}: layer 0 shares an index selection, but no layer comes before it")
    return full
