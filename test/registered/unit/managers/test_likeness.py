"""Ranks of different hosts must hold the same kind of pages."""
import msgspec
import pytest

from sglane.managers.planner import EngineFailure, check_likeness
from sglane.plan.step_plan import ExecutorReady, PlaneSpec

READY = ExecutorReady(0, [PlaneSpec("target.kv", 2, 64, 4)], 8192, 100, 1 << 20, 4096, 512, "cpu", "tcp://127.0.0.1:1")


def test_ranks_that_are_alike():
    check_likeness([READY, msgspec.structs.replace(READY, rank=1, max_rows=50, device_name="other", address="tcp://127.0.0.1:2")])


@pytest.mark.parametrize(("changes", "what"), [
    ({"planes": [PlaneSpec("target.kv", 2, 64, 2)]}, "planes"), ({"num_bytes_per_page": 4096}, "bytes per page: 8192 and 4096"),
    ({"vocab_size": 513}, "vocabulary size: 512 and 513"),
])
def test_a_rank_that_differs(changes, what):
    with pytest.raises(EngineFailure, match=f"ranks 0 and 2 differ in {what}"):
        check_likeness([READY, msgspec.structs.replace(READY, rank=1), msgspec.structs.replace(READY, rank=2, **changes)])
