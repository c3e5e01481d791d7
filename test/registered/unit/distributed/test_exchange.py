import datetime
import socket

import numpy as np
import pytest
import torch

from kits.exchange_work import many_calls, two_threads, types_and_shapes
from kits.plan_driver import PlanDriver, greedy
from kits.process_ranks import answer, process_ranks, run_on, toy_worker
from kits.toy_model import ToyConfig, ToyModel
from sglane.distributed.groups import init_groups, local_groups, open_store
from sglane.utils.addresses import HostPort

TRANSPORTS = ("peer", "collective")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_types_and_shapes(size: int, transport: str) -> None:
    with process_ranks(size, types_and_shapes, transport=transport) as pipes:
        assert [answer(pipe) for pipe in pipes] == ["done"] * size


@pytest.mark.parametrize(("transport", "size", "num_calls"), [("peer", 2, 4000), ("peer", 4, 3000), ("collective", 3, 200)])
def test_many_calls_with_a_late_rank(transport: str, size: int, num_calls: int) -> None:
    with process_ranks(size, many_calls, num_calls, transport=transport) as pipes:
        assert [answer(pipe) for pipe in pipes] == ["done"] * size


@pytest.mark.parametrize(("transport", "num_calls"), [("peer", 1000), ("collective", 100)])
def test_two_communicators_from_two_threads(transport: str, num_calls: int) -> None:
    with process_ranks(3, two_threads, num_calls, transport=transport) as pipes:
        assert [answer(pipe) for pipe in pipes] == ["done"] * 3


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["gqa", "dsa"])
def test_two_processes_give_the_tokens_of_the_reference(kind: str, transport: str) -> None:
    model = ToyModel(ToyConfig(kind))
    prompts = [np.random.default_rng(seed).integers(0, 61, n).tolist() for seed, n in enumerate((37, 1, 18))]
    with process_ranks(2, toy_worker, kind, 4, 60, transport=transport) as pipes:
        drive = PlanDriver(run_on(pipes), 4, 2, 60)
        for slot, prompt in enumerate(prompts):
            drive.start(slot, prompt, greedy())
            drive.step({slot: 16}, list(range(slot)))
            while drive.slots[slot].fed < len(prompt):
                drive.step({slot: 16}, list(range(slot)))
        for _ in range(4):
            drive.step({}, [2, 0, 1])
        for pipe in pipes:
            pipe.send(None)
    for slot, prompt in enumerate(prompts):
        outputs = drive.slots[slot].outputs
        assert len(outputs) >= 5
        assert outputs == model.greedy(prompt, len(outputs))


def test_one_rank_needs_no_set_up() -> None:
    groups = init_groups(0, 1, "unused", "cpu")
    assert groups.attention.size == groups.step.size == 1
    x = torch.ones(2, 3)
    assert groups.attention.all_gather(x).shape == (1, 2, 3)
    assert local_groups().attention.gather_rows(x, 2, torch.arange(2)) is x


def test_the_store_listens_on_the_given_address_only() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    timeout = datetime.timedelta(seconds=10)
    first = open_store(HostPort("127.0.0.2", port), 0, 2, timeout)
    second = open_store(HostPort("127.0.0.2", port), 1, 2, timeout)
    first.set("a", "b")
    assert second.get("a") == b"b"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


def test_ranks_that_do_not_come_are_not_waited_for_longer(tmp_path) -> None:
    with pytest.raises(RuntimeError, match="(?i)time"):
        init_groups(0, 2, f"file://{tmp_path}/meet", "cpu", "collective", 0.5)
