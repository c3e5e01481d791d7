"""Where a model's draft layer lies, and whether it fits. Imports no torch."""
import dataclasses
from pathlib import Path

from sglane.configs.hf_config import HfFile, hf_model_config
from sglane.configs.sizes import DraftSource, ModelConfig, ModelConfigError, ModelSource

#: Sizes that the draft layer of a separate folder must share with the model.
SHARED_SIZES = ("model_type", "hidden_size", "vocab_size", "num_heads", "head_dim", "rms_norm_eps", "rope", "mla")


def with_draft(config: ModelConfig, path: str | None) -> ModelConfig:
    """The model with its draft layer. path: a folder with that layer; None: the model's own. Raises ModelConfigError."""
    where = config.source.path
    if config.mla is None or config.moe is None:
        raise ModelConfigError(f"{where}: models of type '{config.model_type}' have no NextN layer to draft with; --speculative-algorithm NGRAM "
                               "needs none")
    if path is None:
        if config.num_draft_layers == 0:
            raise ModelConfigError(f"{where}: num_nextn_predict_layers is 0: the checkpoint has no NextN layer to draft with; give "
                                   "--speculative-draft-model-path, or use --speculative-algorithm NGRAM")
        return dataclasses.replace(config, draft=DraftSource(where, (config.num_layers,)))
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ModelConfigError(f"--speculative-draft-model-path {path}: the folder has no config.json")
    own = hf_model_config(ModelSource(path, "hf"), None)
    for name in SHARED_SIZES:
        _expect_equal(path, name, getattr(config, name), getattr(own, name))
    for name in ("num_experts", "num_shared_experts", "topk", "intermediate_size", "num_groups", "topk_groups", "norm_topk_prob", "scaling_factor"):
        _expect_equal(path, f"moe.{name}", getattr(config.moe, name), getattr(own.moe, name, None))
    for name in ("num_heads", "head_dim", "topk", "rope_interleave"):
        _expect_equal(path, f"index.{name}", getattr(config.index, name, None), getattr(own.index, name, None))
    # Folders of one layer either keep its number, or number it themselves: behind their own layers, or from 0.
    numbers = (config.num_layers, HfFile(folder / "config.json").need("num_hidden_layers"), 0)
    return dataclasses.replace(config, draft=DraftSource(path, tuple(dict.fromkeys(numbers))))


def _expect_equal(path: str, name: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise ModelConfigError(f"--speculative-draft-model-path {path}: {name} is {theirs}, but the model has {ours}")
