"""Where a model's draft layer lies, and whether it fits. Imports no torch."""
import dataclasses
from pathlib import Path

from sglane.configs.hf_config import HfFile, hf_model_config
from sglane.configs.sizes import DraftSource, ModelConfig, ModelConfigError, ModelSource


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
    ours, theirs = _sizes(config), _sizes(own)
    for name in ours:
        if ours[name] != theirs.get(name):
            raise ModelConfigError(f"--speculative-draft-model-path {path}: {name} is {theirs.get(name)}, but the model has {ours[name]}")
    # Folders of one layer either keep its number, or number it themselves: behind their own layers, or from 0.
    numbers = (config.num_layers, HfFile(folder / "config.json").need("num_hidden_layers"), 0)
    return dataclasses.replace(config, draft=DraftSource(path, tuple(dict.fromkeys(numbers))))


def _sizes(config: ModelConfig) -> dict[str, object]:
    """What the draft layer of a separate folder must share with the model."""
    found: dict[str, object] = {
        "model_type": config.model_type, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "num_heads": config.num_heads,
        "head_dim": config.head_dim, "rms_norm_eps": config.rms_norm_eps, "rope": config.rope,
    }
    for name, part, own in (("mla", config.mla, ()), ("moe", config.moe, ("layers",)), ("index", config.index, ("full_layers",))):
        if part is not None:  # which layers have it is each model's own
            found.update({f"{name}.{key}": value for key, value in dataclasses.asdict(part).items() if key not in own})
    return found
