"""Rope parameters of a config.json, in both styles: rope_theta + rope_scaling, and rope_parameters."""
import math
from typing import Any, Protocol

from sglane.configs.sizes import ModelConfigError, RopeConfig


class KeyedFile(Protocol):
    path: Any

    def get(self, key: str, default: Any = None) -> Any: ...

    def need(self, key: str) -> Any: ...


def rope_config(file: KeyedFile) -> tuple[RopeConfig, int]:
    """The frequencies and the longest context in tokens."""
    parameters = file.get("rope_parameters", {})
    scaling = file.get("rope_scaling", {}) or parameters
    theta = parameters.get("rope_theta", file.get("rope_theta"))
    if theta is None and file.need("model_type") == "llama":
        theta = 10000.0  # the first llama configs do not have the key
    if theta is None:
        raise ModelConfigError(f"{file.path}: neither rope_theta nor rope_parameters.rope_theta is given")
    limit = file.need("max_position_embeddings")
    if parameters.get("partial_rotary_factor", file.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelConfigError(f"{file.path}: partial_rotary_factor is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta), limit
    if kind == "yarn":
        rope = yarn(theta, scaling, limit)
        return rope, max(limit, int(rope.factor * rope.original_positions)) if "original_max_position_embeddings" in scaling else limit
    if kind == "llama3":
        return RopeConfig(theta, "llama3", scaling["factor"], scaling["original_max_position_embeddings"],
                          low_freq_factor=scaling["low_freq_factor"], high_freq_factor=scaling["high_freq_factor"]), limit
    raise ModelConfigError(f"{file.path}: rope type '{kind}' is not supported; supported are default, yarn, llama3")


def yarn(theta: float, scaling: dict[str, Any], limit: int) -> RopeConfig:
    factor = scaling["factor"]
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    amplitude = scaling.get("attention_factor")
    if amplitude is None:
        amplitude = magnitude(factor, mscale) / magnitude(factor, all_dim) if mscale and all_dim else magnitude(factor, 1.0)
    return RopeConfig(theta, "yarn", factor, scaling.get("original_max_position_embeddings") or limit, scaling.get("beta_fast") or 32.0,
                      scaling.get("beta_slow") or 1.0, scaling.get("truncate", True), amplitude, all_dim or 0.0)


def magnitude(factor: float, mscale: float) -> float:
    """How much YaRN scales attention for a context that is `factor` times longer."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
