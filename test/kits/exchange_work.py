"""What ranks do in tests of the exchange. Every rank knows what all ranks give, so each of them checks all that it gets."""
import dataclasses
import gc
import os
import random
import threading
import time
import unittest.mock
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import Tensor

from kits.plan_driver import MAX_PAGES, NUM_SLOTS
from kits.toy_model import ToyConfig, ToyModel
from sglane.distributed.exchange.local import Exchange
from sglane.distributed.groups import Groups, close_groups, init_groups
from sglane.distributed.peers import PeerLost
from sglane.model_executor.executor import Executor
from sglane.model_executor.kv_pool import KVPool
from sglane.plan.step_plan import PlaneSpec, PoolInit, StepPlan, TailCopy
from sglane.server_args import ServerArgs

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)


def types_and_shapes(rank: int, groups: Groups, pipe: Connection) -> None:
    """Several types and sizes; empty tensors and ranks without rows included."""
    exchange = groups.attention
    size = exchange.size
    for dtype in DTYPES:
        x = torch.full((2, 3), rank + 1).to(dtype)
        assert torch.equal(exchange.all_gather(x), torch.stack([torch.full((2, 3), r + 1).to(dtype) for r in range(size)]))
        assert torch.equal(exchange.all_gather(x.t()), torch.stack([torch.full((3, 2), r + 1).to(dtype) for r in range(size)]))
        assert exchange.all_gather(x[0, 0]).tolist() == torch.arange(1, size + 1).to(dtype).tolist()
    assert exchange.all_gather(torch.zeros(0, 4)).shape == (size, 0, 4)
    assert exchange.reduce_scatter(torch.zeros(size, 0, 4)).shape == (0, 4)
    assert exchange.gather_rows(torch.zeros(0, 4), 0, torch.zeros(0, dtype=torch.int64)).shape == (0, 4)
    assert exchange.gather_rows(torch.zeros(1, 0), 1, torch.arange(size)).shape == (size, 0)
    counts, order = [3, 0, 2, 3][:size], [2, 0, 1, 4, 3, 7, 6, 5]
    total = sum(counts)
    place = [r * 3 + i for r in range(size) for i in range(counts[r])]
    inverse = torch.tensor([place[i] for i in order if i < total])
    values = torch.arange(total * 2.0).view(total, 2)
    own = values[sum(counts[:rank]):sum(counts[:rank + 1])]
    assert torch.equal(exchange.gather_rows(own, 3, inverse), values[[i for i in order if i < total]])
    parts = torch.arange(size * 3.0).view(size, 3) * 10 ** rank
    expected = sum(torch.arange(size * 3.0).view(size, 3)[rank] * 10 ** r for r in range(size))
    assert torch.equal(groups.experts.reduce_scatter(parts), expected)
    groups.prefetch.barrier()
    assert groups.step.all_gather(torch.tensor([rank])).flatten().tolist() == list(range(size))
    pipe.send("done")


def given(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank gives in one operation."""
    values = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed * 16 + rank))
    return values.to(dtype)


def mixed_calls(exchange: Exchange, num_calls: int, seed: int) -> None:
    """Operations of random kind and size, now and then a large one; some rank is late now and then. Results are kept and checked later."""
    choose = random.Random(seed)
    late = random.Random(seed * 100 + exchange.rank)
    kept: list[tuple[Tensor, Tensor]] = []
    for call in range(num_calls):
        kind = choose.choice(("all_gather", "gather_rows", "reduce_scatter", "barrier"))
        width, dtype = choose.choice((1, 7, 64)), choose.choice((torch.float32, torch.bfloat16, torch.int64))
        num_rows = choose.randrange(40) if choose.random() < 0.995 else choose.randrange(4000, 9000)
        counts = [choose.randrange(num_rows + 1) for _ in range(exchange.size)]
        if late.random() < 0.02:
            time.sleep(late.random() * 0.003)
        kept.append(one_call(exchange, kind, (num_rows, width), counts, dtype, seed + call))
        if len(kept) > 4:
            found, expected = kept.pop(0)
            assert torch.equal(found, expected), f"rank {exchange.rank}, call {call - 4}"
    for found, expected in kept:
        assert torch.equal(found, expected)


def one_call(exchange: Exchange, kind: str, shape: tuple[int, int], counts: list[int], dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """What the operation gave, and what it should have given."""
    ranks = range(exchange.size)
    if kind == "all_gather":
        return exchange.all_gather(given(seed, exchange.rank, shape, dtype)), torch.stack([given(seed, r, shape, dtype) for r in ranks])
    if kind == "reduce_scatter":
        parts = torch.stack([given(seed, r, (exchange.size, *shape), dtype) for r in ranks])
        return exchange.reduce_scatter(parts[exchange.rank].clone()), parts[:, exchange.rank].contiguous().sum(0)
    if kind == "gather_rows":
        rows = [given(seed, r, (counts[r], shape[1]), dtype) for r in ranks]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed))
        place = torch.tensor([r * max(counts) + i for r in ranks for i in range(counts[r])], dtype=torch.int64)
        return exchange.gather_rows(rows[exchange.rank], max(counts), place[order]), torch.cat(rows)[order]
    exchange.barrier()
    return torch.zeros(0), torch.zeros(0)


def many_calls(rank: int, groups: Groups, pipe: Connection, num_calls: int) -> None:
    mixed_calls(groups.attention, num_calls, 11)
    pipe.send("done")


def two_threads(rank: int, groups: Groups, pipe: Connection, num_calls: int) -> None:
    """Two communicators of a rank at once; the other thread has calls of its own."""
    failures: list[str] = []

    def prefetch() -> None:
        try:
            mixed_calls(groups.prefetch, num_calls, 23)
        except AssertionError as error:
            failures.append(str(error))
            raise

    thread = threading.Thread(target=prefetch)
    thread.start()
    mixed_calls(groups.attention, num_calls, 37)
    thread.join(60)
    assert not thread.is_alive()
    pipe.send(failures or "done")


def lose_a_rank(rank: int, groups: Groups, pipe: Connection, lost: int) -> None:
    """After some calls, rank `lost` sends its process id and comes to no call any more; the others come when told to, and say what they see, and
    how late."""
    mixed_calls(groups.attention, 20, 5)
    if rank == lost:
        pipe.send(os.getpid())
        time.sleep(600)
    pipe.recv()
    begin_s = time.monotonic()
    try:
        groups.attention.barrier()
    except PeerLost as error:
        pipe.send((error.rank, str(error), time.monotonic() - begin_s))
    try:
        groups.attention.all_gather(torch.zeros(3))
    except PeerLost as error:
        pipe.send(error.rank)
    pipe.recv()


def different_sizes(rank: int, groups: Groups, pipe: Connection) -> None:
    try:
        groups.attention.all_gather(torch.zeros(3 + rank))
    except AssertionError as error:
        pipe.send(str(error))


def open_and_close(rank: int, groups: Groups, pipe: Connection) -> None:
    """Open files of this process, of all kinds, before and after another group was made, used and closed."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    second = init_groups(rank, groups.step.size, pipe.recv(), "cpu", "peer", 60.0)
    mixed_calls(second.attention, 100, 3)
    pool = KVPool([PlaneSpec("target.kv", 2, 8, 4)], 5, 4, second.step.size, rank, torch.float32, torch.device("cpu"), second.pools)
    during = len(os.listdir("/proc/self/fd"))
    del pool
    second.step.barrier()
    close_groups(second)
    del second
    gc.collect()
    pipe.send((before, during, len(os.listdir("/proc/self/fd"))))


def read_pools(rank: int, groups: Groups, pipe: Connection) -> None:
    """Every rank writes its own pool, ahead of which memory was taken, and reads all that it maps. Sends the planes that it maps."""
    specs = [PlaneSpec("target.kv", 2, 8, 4), PlaneSpec("target.index", 1, 3, 4)]
    size = groups.step.size
    pool = KVPool(specs, 5, 4, size, rank, torch.float32, torch.device("cpu"), groups.pools)
    assert all(planes[rank] is pool.plane(name) and len(planes) == size for name, planes in pool.lanes.items())
    assert not any(plane.buffer.any() for planes in pool.lanes.values() for plane in planes)
    while pool.work_ahead():
        pass
    groups.step.barrier()
    for name, plane in pool.planes.items():
        plane.buffer[1:] = 10 * rank + len(name)
    pool.poison(np.array([3 * size + lane for lane in range(size)], np.int32))  # row 3 of every lane
    groups.step.barrier()
    for name, planes in pool.lanes.items():
        for lane, plane in enumerate(planes):
            assert not plane.buffer[0].any() and plane.buffer[3].isnan().all(), f"rank {rank} reads {name} of lane {lane}"
            assert bool((plane.buffer[[1, 2, 4]] == 10 * lane + len(name)).all()), f"rank {rank} reads {name} of lane {lane}"
    groups.step.barrier()
    pipe.send(sorted(pool.lanes))


class SeenAfterBarrier:
    """The attention communicator; notes what the other lane's row has in it after each barrier."""

    def __init__(self, inner: Exchange, look: Callable[[], Tensor]):
        self.rank, self.size = inner.rank, inner.size
        self._inner = inner
        self._look = look
        self.seen: list[Tensor] = []

    def all_gather(self, x: Tensor) -> Tensor:
        return self._inner.all_gather(x)

    def gather_rows(self, x: Tensor, max_length: int, inverse: Tensor) -> Tensor:
        return self._inner.gather_rows(x, max_length, inverse)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self._inner.reduce_scatter(x)

    def barrier(self) -> None:
        self._inner.barrier()
        self.seen.append(self._look())


def tail_copies(rank: int, groups: Groups, pipe: Connection) -> None:
    """Plans of a toy executor whose tail copies are late; sends what other ranks saw in the new row at each barrier of the attention."""
    config, spied = ToyConfig("gqa"), SeenAfterBarrier(groups.attention, lambda: pool.lanes["target.kv"][0].buffer[2, :, :3].clone())
    args = ServerArgs(page_size=4, cp_size=groups.step.size, enable_cp_shared_kv=True)
    executor = Executor(config, ToyModel(config), args, rank, dataclasses.replace(groups, attention=spied))
    executor.init_pool(PoolInit(8, NUM_SLOTS, MAX_PAGES))
    pool = executor._pool
    pool.plane("target.kv").buffer[1] = float(rank + 1)
    copy_tail = pool.copy_tail

    def late(copy: TailCopy) -> None:
        time.sleep(0.05)
        copy_tail(copy)

    with unittest.mock.patch.object(pool, "copy_tail", late if rank == 0 else copy_tail):
        executor.run(StepPlan(1))
        executor.run(StepPlan(2, tail_copies=[TailCopy(groups.step.size, 2 * groups.step.size, 3)]))  # row 1 to row 2 of lane 0
        executor.run(StepPlan(3))
    pipe.send([bool((row == 1.0).all()) for row in spied.seen])
