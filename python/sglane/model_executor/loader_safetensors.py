"""Safetensors checkpoints: one file, or shards listed in an index."""
import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sglane.model_executor.loader_store import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
#: Files with a draft layer that need not be listed.
DRAFT_FILES = "*mtp*.safetensors"


class SafetensorsStore:
    """Files are mapped, so ranks on one host share the pages they read. The headers say what there is; the index only lists files."""

    label = "Loading safetensors checkpoint shards"

    def __init__(self, path: str, of_draft: bool = False):
        """of_draft: the draft layer is wanted, which may lie in a file that no index lists."""
        self.path = path
        self._files = {}
        self._shard_of: dict[str, str] = {}
        for file in draft_files(Path(path)) if of_draft else shard_files(Path(path)):
            try:
                opened = safe_open(file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file}: {error}") from error
            self._files[file.name] = opened
            self._shard_of.update(dict.fromkeys(opened.keys(), file.name))

    def names(self) -> Collection[str]:
        return self._shard_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._shard_of[name]].get_slice(name).get_shape())

    def shard(self, name: str) -> str:
        return self._shard_of[name]

    def is_fp8(self, name: str) -> bool:
        return self._files[self._shard_of[name]].get_slice(name).get_dtype() == "F8_E4M3"

    def read(self, name: str, part: int | None = None) -> torch.Tensor:
        file = self._files[self._shard_of[name]]
        return file.get_tensor(name) if part is None else file.get_slice(name)[part]


def shard_files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint; consolidated or other copies in the folder are left alone."""
    index = folder / INDEX_FILE
    if index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        files = [folder / SINGLE_FILE]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} does not exist" + (f", but {index} lists it" if index.is_file() else f", and neither does {index}"))
    return files


def draft_files(folder: Path) -> list[Path]:
    """Files that may have the draft layer: those of its own, and the checkpoint's, if there is one in the folder."""
    own = sorted(folder.glob(DRAFT_FILES))
    has_checkpoint = not own or (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file()
    return own + [file for file in (shard_files(folder) if has_checkpoint else []) if file not in own]
