"""What the nodes of a server must agree on, and how a difference is put into words."""
import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path

import sglane
from sglane.configs.model_config import ModelConfig
from sglane.server_args import NODE_FLAGS, ServerArgs, flag_of

WEIGHT_SUFFIXES = (".safetensors", ".gguf")


def facts_of(args: ServerArgs, config: ModelConfig) -> dict[str, str]:
    """Name as messages use it -> value: the version, every flag outside NODE_FLAGS, the model's sizes, and names and sizes of its weight files."""
    facts = {"the version": sglane.__version__}
    facts |= {flag_of(item.name): str(getattr(args, item.name)) for item in dataclasses.fields(args) if item.name not in NODE_FLAGS}
    for item in dataclasses.fields(config):
        if item.name != "source":
            value = getattr(config, item.name)
            facts[f"--model-path, {item.name}"] = str(sorted(value) if isinstance(value, frozenset) else value)
    facts["--model-path, digest of the weight files' names and sizes"] = weights_digest(Path(config.source.path))
    return facts


def weights_digest(path: Path) -> str:
    """Of names and sizes, not of contents: those are hundreds of gigabytes. path: a folder or a file, whose own name may differ."""
    if path.is_file():
        files = [("", path.stat().st_size)]
    else:
        files = sorted((file.name, file.stat().st_size) for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES)
    return hashlib.sha256(repr(files).encode()).hexdigest()[:16]


def differences(ours: Mapping[str, str], theirs: Mapping[str, str], node_rank: int) -> list[str]:
    """`--page-size is 64 on node 0 and 16 on node 1`, one for each fact; ours: node 0's. Of another version only that is said."""
    missing = "unknown"
    found = [f"{name} is {ours.get(name, missing)} on node 0 and {theirs.get(name, missing)} on node {node_rank}"
             for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
    return found[:1] if found and found[0].startswith("the version") else found
