import numpy as np
import pytest
import torch

from sglane.model_executor import memory
from sglane.model_executor.copy_jobs import CopyLayout
from sglane.model_executor.host_pool import HostPool
from sglane.model_executor.kv_pool import KVPool, num_bytes_per_page, plane_specs
from sglane.model_executor.slot_table import SlotError, SlotTable
from sglane.plan.io_struct import SamplingParams
from sglane.plan.step_plan import RowUpdate, SlotStart, TailCopy
from sglane.server_args import ServerArgs

CPU = torch.device("cpu")
PLANES = (("target.kv", 3, 6), ("target.index", 2, 4), ("draft.kv", 0, 6))


def pool(rank: int = 0, cp_size: int = 1, page_size: int = 4) -> KVPool:
    return KVPool(plane_specs(PLANES, torch.float32), 5, page_size, cp_size, rank, torch.float32, CPU)


def ints(values: list[int]) -> bytes:
    return np.array(values, np.int32).tobytes()


def test_scratch_memory_is_that_of_one_layer_of_every_plane() -> None:
    specs = plane_specs(PLANES, torch.bfloat16)
    assert memory.scratch_bytes(specs, 100) == 2 * 100 * (6 + 4) * 2


def test_planes_and_sizes() -> None:
    specs = plane_specs(PLANES, torch.bfloat16)
    assert [spec.name for spec in specs] == ["target.kv", "target.index"]
    assert num_bytes_per_page(specs, 4) == (3 * 6 + 2 * 4) * 4 * 2
    plane = pool().plane("target.kv")
    rows, offsets = torch.tensor([3, 1]), torch.tensor([2, 0])
    plane.write(1, plane.places(rows, offsets), torch.arange(12.0).view(2, 6))
    assert plane.buffer[3, 1, 2].tolist() == list(range(6)) and plane.buffer[1, 1, 0].tolist() == list(range(6, 12))
    assert plane.buffer.sum() == 66
    assert torch.equal(plane.tokens(1, rows, offsets), torch.arange(12.0).view(2, 6))
    assert torch.equal(plane.pages(1, torch.tensor([3, 0])), plane.buffer[[3, 0], 1])


@pytest.mark.parametrize("rank", [0, 1])
def test_tail_copy_moves_the_first_tokens_of_all_planes_in_the_owner_only(rank: int) -> None:
    own = pool(rank, 2)
    for plane in own.planes.values():
        plane.buffer.copy_(torch.randn(plane.buffer.shape))
    before = {name: plane.buffer.clone() for name, plane in own.planes.items()}
    own.copy_tail(TailCopy(5, 9, 3))  # lane 1: row 2 to row 4
    for name, plane in own.planes.items():
        want = before[name]
        if rank == 1:
            want[4, :, :3] = want[2, :, :3]
        assert torch.equal(plane.buffer, want)
    with pytest.raises(AssertionError, match="between lanes"):
        own.copy_tail(TailCopy(5, 8, 3))


def test_poison_fills_own_rows_and_never_the_sink() -> None:
    own = pool(1, 2)
    own.poison(np.array([3, 4, 7], np.int32))
    bad = own.plane("target.index").buffer.isnan().flatten(1)
    assert bad.all(1).tolist() == [False, True, False, True, False] and bad.any(1).tolist() == bad.all(1).tolist()
    with pytest.raises(AssertionError, match="sink"):
        own.poison(np.array([1], np.int32))


def test_slot_rows_and_histories() -> None:
    table = SlotTable(4, 5, 8, range(1, 20))
    params = SamplingParams(max_new_tokens=5, presence_penalty=1.0)
    table.start(SlotStart(2, ints([7, 8]), 3, 10, params, ints([1, 2, 3])))
    table.append_pages(2, np.array([9], np.int32))
    table.update_row(RowUpdate(2, 1, ints([4])))
    assert table.pages(2).tolist() == [7, 4, 9] and table.length(2) == 3
    table.fed(2, np.array([5, 6]))
    table.sampled(2, np.array([11]), 0)
    table.sampled(2, np.array([12, 13]), 2)
    assert table.length(2) == 7 and table.last_token(2) == 13
    assert table.get(2).history.tokens().tolist() == [1, 2, 3, 5, 6, 11, 12, 13]
    for bad in (lambda: table.append_pages(2, np.ones(3, np.int32)), lambda: table.append_pages(2, np.array([0], np.int32)),
                lambda: table.append_pages(2, np.array([20], np.int32)), lambda: table.update_row(RowUpdate(2, 2, ints([1, 1]))),
                lambda: table.start(SlotStart(2, b"", 0, 1, params)), lambda: table.release(0), lambda: table.update_row(RowUpdate(1, 0, b"")),
                lambda: table.start(SlotStart(3, ints([1]), 2, 4, params))):
        with pytest.raises(SlotError):
            bad()
    table.release(2)
    table.start(SlotStart(2, b"", 0, 1, SamplingParams(max_new_tokens=5)))
    assert table.get(2).history is None and len(table.pages(2)) == 0
    with pytest.raises(SlotError, match="no token was sampled"):
        table.last_token(2)


def test_a_long_history_grows() -> None:
    table = SlotTable(1, 5, 8, range(1, 20))
    table.start(SlotStart(0, b"", 0, 10, SamplingParams(max_new_tokens=5, frequency_penalty=1.0)))
    for i in range(1000):
        table.fed(0, np.array([i]))
    assert table.get(0).history.tokens().tolist() == list(range(1000))


GIB = 1 << 30


@pytest.mark.parametrize(("flags", "rows"), [
    ({}, 4 * 1024),                                       # the default cap of 4 GiB on CPU
    ({"mem_fraction_static": 0.5}, 10 * 1024 - 1024),     # half of 20 GiB less the weights
    ({"max_total_tokens": 640}, 11),                      # 10 pages of 64 and the sink row
    ({"max_total_tokens": 641}, 12),
    ({"max_total_tokens": 640, "cp_size": 2, "enable_cp_shared_kv": True}, 6),
    ({"cp_size": 2, "enable_cp_shared_kv": True}, 2 * 1024),
    ({"max_total_tokens": 15 * 1024 * 64 - 64}, 15 * 1024),  # more than the default share, but there is room
])
def test_memory_budget_on_cpu(flags: dict, rows: int) -> None:
    assert memory.pool_rows(ServerArgs(**flags), CPU, 20 * GIB, GIB, 1 << 20) == rows


def test_no_room_is_an_error_that_names_the_flag() -> None:
    with pytest.raises(MemoryError, match="--max-total-tokens"):
        memory.pool_rows(ServerArgs(max_total_tokens=1 << 30), CPU, 20 * GIB, GIB, 1 << 20)
    with pytest.raises(MemoryError, match="--mem-fraction-static"):
        memory.pool_rows(ServerArgs(), CPU, 2 * GIB, GIB, 1 << 20)
    assert 0 < memory.available_bytes(CPU) < 1 << 50


def host_flags(**flags: object) -> ServerArgs:
    return ServerArgs(enable_hierarchical_cache=True, **flags)


@pytest.mark.parametrize(("args", "rows"), [
    (ServerArgs(), 0),
    (host_flags(hicache_size=3.0), 3 * 10**9 // (1 << 20)),  # a total, sink row included
    (host_flags(hicache_size=3.0, cp_size=2, enable_cp_shared_kv=True), 3 * 10**9 // (1 << 20)),  # of each rank
    (host_flags(), 14 * 1024),  # 95 % of 20 GiB less 5: the planner takes what --hicache-ratio asks for
    (host_flags(cp_size=2, enable_cp_shared_kv=True), int(9.5 * 1024) - 5 * 1024),
    (host_flags(hicache_size=15.0), 15 * 10**9 // (1 << 20)),
])
def test_host_rows(args: ServerArgs, rows: int) -> None:
    assert memory.host_rows(args, 20 * GIB, 5 * GIB, 1 << 20) == rows


@pytest.mark.parametrize(("args", "message"), [
    (host_flags(hicache_size=15.5), r"--hicache-size 15.5 needs 14.44 GiB of RAM per rank, but 14.00 GiB are left"),
    (host_flags(hicache_size=8.0, cp_size=2, enable_cp_shared_kv=True), "needs 7.45 GiB of RAM per rank, but 4.50 GiB are left"),
    (host_flags(hicache_size=0.002), "less than two records of 1048576 bytes"),
    (host_flags(cp_size=4, enable_cp_shared_kv=True), "--enable-hierarchical-cache: no room for a host tier: 0.00 GiB"),
])
def test_a_host_tier_that_does_not_fit_is_refused(args: ServerArgs, message: str) -> None:
    with pytest.raises(MemoryError, match=message):
        memory.host_rows(args, 20 * GIB, 5 * GIB, 1 << 20)


def test_a_host_tier_larger_than_the_ram_is_refused_before_the_weights_are_read() -> None:
    memory.check_host_size(host_flags(hicache_size=15.5), 20 * GIB)
    memory.check_host_size(ServerArgs(), 0)
    with pytest.raises(MemoryError, match="--hicache-size 21"):
        memory.check_host_size(host_flags(hicache_size=21.0), 20 * GIB)


def host_pool(rank: int = 0, cp_size: int = 1) -> HostPool:
    return HostPool(plane_specs(PLANES, torch.float32), 5, 4, cp_size, rank, torch.float32, CPU)


def test_a_record_is_all_planes_one_after_another(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    pool = host_pool()
    assert pool.buffer.shape == (5, (3 * 6 + 2 * 4) * 4 * 4) and pool.record_bytes == pool.buffer.shape[1]
    assert "target.kv 0.00 GB, target.index 0.00 GB" in caplog.text
    pool.planes["target.kv"].fill_(1.0)
    pool.planes["target.index"][:, 1] = 2.0
    row = pool.buffer[3].view(torch.float32).tolist()
    assert row == [1.0] * (3 * 4 * 6) + [0.0] * (4 * 4) + [2.0] * (4 * 4)


def test_records_are_poisoned_in_their_lane_and_never_the_sink() -> None:
    own = host_pool(1, 2)
    own.poison(np.array([3, 4, 7], np.int32))
    assert own.buffer.view(torch.float32).isnan().all(1).tolist() == [False, True, False, True, False]
    with pytest.raises(AssertionError, match="sink"):
        own.poison(np.array([1], np.int32))


def test_pieces_are_neighbouring_layers() -> None:
    """Large layers alone, small ones together, never more than a sixth of a plane; a shared selection's layers have no index keys."""
    specs = plane_specs((("target.kv", 12, 4096), ("target.index", 4, 8)), torch.float32)
    layout = CopyLayout(specs, 16, {"target.kv": tuple(range(12)), "target.index": (0, 3, 6, 9)})
    assert layout.sizes == {"target.kv": [1] * 12, "target.index": [1] * 4}
    assert layout.num_layers == 12
    assert [(piece.plane, piece.first) for piece in layout.load_order][:5] == [
        ("target.index", 0), ("target.kv", 0), ("target.kv", 1), ("target.kv", 2), ("target.index", 3)]
    small = CopyLayout(plane_specs((("target.kv", 14, 64),), torch.float32), 16, {"target.kv": tuple(range(14))})
    assert small.sizes == {"target.kv": [3, 3, 3, 3, 2]}
    assert [(piece.first, piece.last) for piece in small.backup_order] == [(0, 2), (3, 5), (6, 8), (9, 11), (12, 13)]
    assert [small.place("target.kv", layer) for layer in (0, 2, 3, 13)] == [0, 0, 1, 4]
