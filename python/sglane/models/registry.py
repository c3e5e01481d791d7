"""model_type -> model class. Every model module is imported here, so that a broken one fails at start and says why."""
from sglane.configs.sizes import ModelConfig
from sglane.models.causal_lm import CausalLM
from sglane.models.deepseek import DeepseekForCausalLM
from sglane.models.llama import LlamaForCausalLM, Qwen3ForCausalLM

MODELS: dict[str, type[CausalLM]] = {
    "deepseek_v3": DeepseekForCausalLM,
    "deepseek_v32": DeepseekForCausalLM,
    "glm_moe_dsa": DeepseekForCausalLM,
    "llama": LlamaForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}


def model_class(config: ModelConfig) -> type[CausalLM]:
    return MODELS[config.model_type]
