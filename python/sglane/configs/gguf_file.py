"""Header of a GGUF file: metadata and the place of each tensor.

The gguf library builds an array per vocabulary entry when it opens a file, which takes seconds; this reader walks over the
vocabulary and keeps nothing of it. Types, sizes and dequantisation come from the library.
"""
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

_SCALARS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h", GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i", GGUFValueType.FLOAT32: "f", GGUFValueType.BOOL: "?", GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_VERSIONS = (2, 3)


class GGUFError(ValueError):
    """The file is not a GGUF file that can be read; the message names it."""


@dataclass(frozen=True)
class ArrayLength:
    """Stands for an array in the metadata."""

    num_elements: int


@dataclass(frozen=True)
class TensorPlace:
    """shape: row-major, so the reverse of the file's order. offset: bytes from the start of the file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int

    @property
    def num_bytes(self) -> int:
        block, block_bytes = GGML_QUANT_SIZES[self.kind]
        return int(np.prod(self.shape)) // block * block_bytes


class GGUFFile:
    """metadata: key -> value, arrays by their length only. tensors: name -> place."""

    def __init__(self, path: str):
        self.path = path
        with Path(path).open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._map[:4] != b"GGUF":
            raise GGUFError(f"{path}: not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise GGUFError(f"{path}: GGUF version {version} is not supported, only {_VERSIONS}")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(GGUFValueType(self._scalar("I")))
        self.tensors = self._tensor_table(num_tensors)

    def read(self, name: str) -> np.ndarray:
        """The tensor in float32, dequantised."""
        place = self.tensors[name]
        data = np.frombuffer(self._map, np.uint8, place.num_bytes, place.offset)
        if place.kind == GGMLQuantizationType.F32:
            return data.view(np.float32).reshape(place.shape)
        if place.kind == GGMLQuantizationType.F16:
            return data.view(np.float16).astype(np.float32).reshape(place.shape)
        return dequantize(data.reshape(*place.shape[:-1], -1), place.kind).reshape(place.shape)

    def _tensor_table(self, num_tensors: int) -> dict[str, TensorPlace]:
        found = {}
        for _ in range(num_tensors):
            name = self._string()
            shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))
            found[name] = (tuple(reversed(shape)), GGMLQuantizationType(self._scalar("I")), self._scalar("Q"))
        align = self.metadata.get("general.alignment", 32)
        start = -(-self._at // align) * align
        return {name: TensorPlace(shape, kind, start + offset) for name, (shape, kind, offset) in found.items()}

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._scalar(_SCALARS[kind])
        element, length = GGUFValueType(self._scalar("I")), self._scalar("Q")
        if element in _SCALARS:
            self._at += length * struct.calcsize("<" + _SCALARS[element])
        elif element == GGUFValueType.STRING:
            self._skip_strings(length)
        else:
            for _ in range(length):
                self._value(element)
        return ArrayLength(length)

    def _skip_strings(self, count: int) -> None:
        at, unpack, data = self._at, struct.Struct("<Q").unpack_from, self._map
        for _ in range(count):
            at += 8 + unpack(data, at)[0]
        self._at = at

    def _string(self) -> str:
        length = self._scalar("Q")
        self._at += length
        return self._map[self._at - length:self._at].decode("utf-8", errors="replace")

    def _scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self._map, self._at)[0]
        self._at += struct.calcsize("<" + code)
        return value
