"""What the loader needs of a file format."""
from collections.abc import Collection
from typing import Protocol

import torch


class CheckpointError(ValueError):
    """A checkpoint does not fit its configuration; the message names the path and the tensor."""


class TensorStore(Protocol):
    """Named tensors on disk, under their Hugging Face names."""

    path: str
    label: str  # what a progress bar says

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def shard(self, name: str) -> str:
        """The unit of progress that the tensor belongs to."""
        ...

    def is_fp8(self, name: str) -> bool:
        """Whether the tensor is stored in FP8, which comes with block scales."""
        ...

    def read(self, name: str, part: int | None = None) -> torch.Tensor:
        """The tensor on CPU in its stored type; part: only that index of the first dimension."""
        ...
