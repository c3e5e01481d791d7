import errno

import psutil
import pytest
import torch

from sglane.distributed.peers import Peers
from sglane.model_executor import pool_memory
from sglane.model_executor.pool_memory import HostMemory
from sglane.utils import fallback

MIB = 1 << 20
SHAPES = {"target.kv": (64, 4, 16, 4096), "target.index": (64, 2, 16, 64)}  # 1 MiB + 8 KiB a row in float32


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def take_all(memory: HostMemory) -> int:
    count = 0
    while memory.take_ahead():
        count += 1
    return count


@pytest.mark.parametrize("peers", [None, Peers(0, {})], ids=["private", "shared"])
def test_some_rows_beyond_those_in_use_get_their_memory(monkeypatch, peers):
    monkeypatch.setattr(pool_memory, "KEPT_READY", 8 * MIB)
    before = resident()
    memory = HostMemory(SHAPES, torch.float32, peers)
    assert resident() - before < 2 * MIB
    assert take_all(memory) == 3  # rows 0 to 7, three at once
    assert 7 * MIB < resident() - before < 14 * MIB
    memory.buffers["target.kv"][5] = 3.0
    memory.use(30)
    memory.use(2)  # going back changes nothing
    assert take_all(memory) > 0
    assert 36 * MIB < resident() - before < 44 * MIB
    assert bool((memory.buffers["target.kv"][5] == 3.0).all()) and not memory.buffers["target.kv"][6:].any()
    memory.use(63)
    take_all(memory)
    assert take_all(memory) == 0


def test_an_old_kernel_leaves_it_to_the_first_write(monkeypatch):
    monkeypatch.setattr(pool_memory, "MADV_POPULATE_WRITE", 999)
    memory = HostMemory(SHAPES, torch.float32)
    before = fallback.counts()["pool_memory_late"]
    assert take_all(memory) == 0
    assert fallback.counts()["pool_memory_late"] == before + 1
    memory.use(40)
    assert take_all(memory) == 0
    memory.buffers["target.kv"][40] = 1.0
    with pytest.raises(OSError, match=str(errno.EINVAL)):
        memory._memory.madvise(999, 0, 4096)
