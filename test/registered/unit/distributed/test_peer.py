"""What only the peer transport has: files handed over, pools that every rank maps, ranks that die, nothing that stays behind."""
import os
import platform
import signal
import time
from pathlib import Path

import pytest

from kits.exchange_work import different_sizes, lose_a_rank, open_and_close, read_pools, tail_copies
from kits.process_ranks import answer, process_ranks
from sglane.distributed.groups import TransportRefused, init_groups, pick_transport
from sglane.distributed.peers import PeerLost, meet


@pytest.mark.parametrize(("transport", "size", "mapped"), [
    ("peer", 2, ["target.index", "target.kv"]), ("peer", 3, ["target.index", "target.kv"]), ("collective", 2, [])])
def test_every_rank_reads_the_pools_that_it_maps(transport: str, size: int, mapped: list[str]) -> None:
    with process_ranks(size, read_pools, transport=transport) as pipes:
        assert [answer(pipe) for pipe in pipes] == [mapped] * size


def test_rows_of_tail_copies_are_there_for_all_after_one_barrier() -> None:
    with process_ranks(2, tail_copies) as pipes:
        assert [answer(pipe) for pipe in pipes] == [[True], [True]], "steps with tail copies, and only these, have one barrier, after the copies"


def test_a_killed_rank_is_named_at_once() -> None:
    with process_ranks(3, lose_a_rank, 1, timeout_s=30.0, exits=[0, -signal.SIGKILL, 0]) as pipes:
        pid = answer(pipes[1])
        for rank in (0, 2):
            pipes[rank].send("go")
        time.sleep(0.3)  # they sleep in the kernel by then
        os.kill(pid, signal.SIGKILL)
        for rank in (0, 2):
            lost, message, waited_s = answer(pipes[rank])
            assert lost == 1 and "rank 1" in message and waited_s < 5.0
            assert answer(pipes[rank]) == 1, "later calls fail too"
        for rank in (0, 2):
            pipes[rank].send("end")


def test_a_stopped_rank_is_named_when_time_is_over() -> None:
    with process_ranks(3, lose_a_rank, 1, timeout_s=2.0, exits=[0, -signal.SIGKILL, 0]) as pipes:
        pid = answer(pipes[1])
        os.kill(pid, signal.SIGSTOP)
        try:
            for rank in (0, 2):  # rank 2 comes when rank 0 has given up
                pipes[rank].send("go")
                lost, message, waited_s = answer(pipes[rank])
                assert (lost, answer(pipes[rank])) == (1, 1), "later calls fail too"
                assert ("within 2 s" in message and 1.5 < waited_s < 10.0) if rank == 0 else ("given up" in message and waited_s < 1.0)
            for rank in (0, 2):
                pipes[rank].send("end")
        finally:
            os.kill(pid, signal.SIGKILL)


def test_ranks_that_give_different_sizes_are_told() -> None:
    with process_ranks(2, different_sizes) as pipes:
        assert "rank 1 says 16, rank 0 says 12 bytes" in answer(pipes[0])
        assert "rank 0 says 12, rank 1 says 16 bytes" in answer(pipes[1])


def test_nothing_stays_behind(tmp_path: Path) -> None:
    named = set(os.listdir("/dev/shm"))
    with process_ranks(2, open_and_close) as pipes:
        for pipe in pipes:
            pipe.send(f"file://{tmp_path}/again")
        for before, during, after in (answer(pipe) for pipe in pipes):
            assert before == after < during
    assert set(os.listdir("/dev/shm")) == named
    assert not list(tmp_path.iterdir()), "the sockets' files are removed when all have met"


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match=r"ranks \[1, 2\] did not come") as caught:
        meet(0, 3, f"{tmp_path}/meet", 2, 0.1)
    assert caught.value.rank == 1
    with pytest.raises(PeerLost, match="rank 0 did not come"):
        meet(1, 2, f"{tmp_path}/meet", 2, 0.1)
    assert not list(tmp_path.iterdir())


def test_the_transport_follows_from_place_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_transport("auto", "file:///x/meet", "cpu") == pick_transport("peer", "file:///x/meet", "cpu") == "peer"
    assert pick_transport("collective", "file:///x/meet", "cpu") == "collective"
    assert pick_transport("auto", "tcp://10.0.0.1:5000", "cpu") == pick_transport("auto", "file:///x/meet", "cuda") == "collective"
    with pytest.raises(TransportRefused, match="several hosts"):
        init_groups(0, 2, "tcp://10.0.0.1:5000", "cpu", "peer")
    with pytest.raises(TransportRefused, match="GPU"):
        init_groups(0, 2, "file:///x/meet", "cuda", "peer")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert pick_transport("auto", "file:///x/meet", "cpu") == "collective"
    with pytest.raises(TransportRefused, match="riscv64"):
        pick_transport("peer", "file:///x/meet", "cpu")
