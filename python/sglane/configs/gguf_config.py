"""Sizes from the metadata of a GGUF file of the llama architecture."""
from typing import Any

from sglane.configs.gguf_file import ArrayLength, GGUFError, GGUFFile
from sglane.configs.hf_config import served_length
from sglane.configs.sizes import ModelConfig, ModelConfigError, ModelSource, RopeConfig

#: general.file_type -> type to compute in. Everything that is quantised is computed in float32: bfloat16 is faster (`--dtype bfloat16`), but adds
#: noise that changes the answers of small models.
_FILE_TYPES = {0: "float32", 1: "float16"}
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


def gguf_model_config(source: ModelSource, context_length: int | None) -> ModelConfig:
    """Raises ModelConfigError naming the metadata key."""
    try:
        file = GGUFFile(source.path)
    except GGUFError as error:
        raise ModelConfigError(str(error)) from error
    data = file.metadata
    architecture = data.get("general.architecture")
    if architecture != "llama":
        raise ModelConfigError(f"{source.path}: GGUF architecture '{architecture}' is not supported; supported is llama")

    def need(key: str) -> Any:
        value = data.get(f"llama.{key}")
        if value is None or isinstance(value, ArrayLength):
            raise ModelConfigError(f"{source.path}: the metadata key 'llama.{key}' must be one number, got {value}")
        return value

    scaling = data.get("llama.rope.scaling.type", "none")
    if data.get("llama.expert_count", 0) or scaling != "none":
        raise ModelConfigError(f"{source.path}: expert_count > 0 and rope scaling type '{scaling}' are not supported")
    hidden_size, num_heads, max_positions = need("embedding_length"), need("attention.head_count"), need("context_length")
    head_dim = data.get("llama.attention.key_length", hidden_size // num_heads)
    if data.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise ModelConfigError(f"{source.path}: llama.rope.dimension_count must be the head size {head_dim}")
    return ModelConfig(
        source=source, model_type="llama", architectures=("LlamaForCausalLM",), vocab_size=vocab_size(file), hidden_size=hidden_size,
        intermediate_size=need("feed_forward_length"), num_layers=need("block_count"), num_heads=num_heads,
        num_kv_heads=need("attention.head_count_kv") if "llama.attention.head_count_kv" in data else num_heads, head_dim=head_dim,
        rms_norm_eps=need("attention.layer_norm_rms_epsilon"), rope=rope_config(file), tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias=False, mlp_bias=False, max_position_embeddings=max_positions, context_length=served_length(context_length, max_positions),
        eos_token_ids=tuple(dict.fromkeys(data[key] for key in _END_KEYS if key in data)), bos_token_id=data.get("tokenizer.ggml.bos_token_id"),
        dtype=_FILE_TYPES.get(data.get("general.file_type"), "float32"))


def vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding; the metadata key is optional and may count less."""
    place = file.tensors.get("token_embd.weight")
    if place is None:
        raise ModelConfigError(f"{file.path}: the tensor 'token_embd.weight' is missing")
    return place.shape[0]


def rope_config(file: GGUFFile) -> RopeConfig:
    """Long-context conversions store the divisor of each frequency as a tensor."""
    theta = file.metadata.get("llama.rope.freq_base", 10000.0)
    if "rope_freqs.weight" not in file.tensors:
        return RopeConfig(theta)
    return RopeConfig(theta, "factors", factors=tuple(file.read("rope_freqs.weight").tolist()))
