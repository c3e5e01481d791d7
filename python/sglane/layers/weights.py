"""Weights as layers see them: named tensors of a checkpoint, and matrices in one of two stored forms."""
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

#: FP8 matrices have one scale per BLOCK x BLOCK values; the last block of a row or column is cut short.
BLOCK = 128
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Matrix:
    """A weight [out, in] in the run type, or in FP8 with its block scales."""

    data: Tensor  # [out, in]
    scales: Tensor | None = None  # float32 [ceil(out / 128), ceil(in / 128)]; value = data * scale


class WeightSource(Protocol):
    """The tensors of one checkpoint under their Hugging Face names, each checked, converted and moved to the device when asked for.

    A missing tensor or a wrong shape raises an error that names the tensor.
    """

    device: torch.device
    dtype: torch.dtype  # run type
    resident_bytes: int  # device memory of everything handed out so far

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """dtype: the run type unless given. FP8 is dequantised."""
        ...

    def matrix(self, name: str, shape: tuple[int, int], part: int | None = None) -> Matrix:
        """A weight [out, in]; FP8 stays FP8 on devices that compute with it. part: index into a tensor [parts, out, in]."""
        ...

    def has(self, name: str) -> bool: ...

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """The tensor, its block scales included, must be there with this shape; some or all of its data is another rank's to read."""
        ...

    def note_copy(self, num_bytes: int) -> None:
        """A layer keeps a second copy of a tensor: count it as weight memory."""
        ...


def dequantise(data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """data FP8 [out, in], scales float32 [ceil(out / 128), ceil(in / 128)]; computed in float32, returned in `dtype`."""
    rows, columns = data.shape
    padded = F.pad(data.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(scales.shape[0], BLOCK, scales.shape[1], BLOCK)
    return (blocks * scales[:, None, :, None]).view(padded.shape)[:rows, :columns].to(dtype)


def dense(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The weight [out, in] in `dtype`."""
    if matrix.scales is None:
        return matrix.data.to(dtype)
    return dequantise(matrix.data, matrix.scales, dtype)


def concat_rows(parts: list[Matrix], dtype: torch.dtype) -> Matrix:
    """Matrices with equal `in`, one below the other, so that one product serves them all.

    FP8 parts keep their scales if the parts before the last end at a block border; otherwise no common grid exists and all become `dtype`.
    """
    if len(parts) == 1:
        return parts[0]
    scales = [part.scales for part in parts if part.scales is not None]
    if len(scales) == len(parts) and all(part.data.shape[0] % BLOCK == 0 for part in parts[:-1]):
        return Matrix(torch.cat([part.data for part in parts]), torch.cat(scales))
    return Matrix(torch.cat([dense(part, dtype) for part in parts]))
