"""Memory that ranks of one host share: files without a name (memfd), gone with the last process that holds them."""
import mmap
import os

import torch
from torch import Tensor


def create_file(name: str, num_bytes: int) -> int:
    """A file of zeros in memory; its memory is taken at the first write of each page. `name` shows in /proc only. Returns the descriptor."""
    fd = os.memfd_create(f"sglane-{name}", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


def map_file(fd: int, num_bytes: int) -> mmap.mmap:
    """The first `num_bytes` of the file, read and written by everyone who maps it. The map keeps the file alive without `fd`."""
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)


def bytes_of(memory: mmap.mmap) -> Tensor:
    """uint8 [num_bytes] over the map, which lives as long as the tensor."""
    return torch.frombuffer(memory, dtype=torch.uint8)
