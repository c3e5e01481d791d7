"""Flags from a YAML file: a flat mapping of names to plain values. Knows nothing of the flags themselves."""
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml


class ConfigFileError(ValueError):
    """The file cannot be read or does not hold what it should; the message names file and key."""


def read_config_file(path: str) -> dict[str, Any]:
    """Keys with `-` as `_`, in the order of the file. Nulls are left out: the default counts."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = yaml.load(text, Loader=StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{path}: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigFileError(f"{path} is not valid YAML: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigFileError(f"{path} must hold `flag: value` lines, not a {type(values).__name__}")
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_") if isinstance(key, str) else key
        if name in found:
            raise ConfigFileError(f"{path}: {key} is given twice")
        if value is not None:
            found[name] = value
    return found


class StrictLoader(yaml.SafeLoader):
    """Safe, and a key may not be there twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [child.value for child, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise yaml.YAMLError(f"the key {name!r} is there twice")
        return super().construct_mapping(node, deep)
