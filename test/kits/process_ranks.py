"""Executors of several ranks as spawned processes that meet over gloo; plans come through pipes."""
import multiprocessing as mp
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from kits.plan_driver import MAX_PAGES, NUM_SLOTS, Run
from sglane import environ
from sglane.distributed.groups import Groups, close_groups, init_groups
from sglane.model_executor.executor import Executor
from sglane.plan.step_plan import PoolInit
from sglane.server_args import ServerArgs


def gather_worker(rank: int, groups: Groups, pipe: Connection) -> None:
    """Gathers of several types and sizes, ranks without rows included."""
    exchange = groups.attention
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        x = torch.full((2, 3), rank + 1).to(dtype)
        assert torch.equal(exchange.all_gather(x), torch.stack([torch.full((2, 3), r + 1).to(dtype) for r in range(exchange.size)]))
        assert torch.equal(exchange.all_gather(x.t()), torch.stack([torch.full((3, 2), r + 1).to(dtype) for r in range(exchange.size)]))
    assert exchange.all_gather(torch.zeros(0, 4)).shape == (exchange.size, 0, 4)
    counts, order = [3, 0, 2][:exchange.size], [2, 0, 1, 4, 3]
    total = sum(counts)
    place = [r * 3 + i for r in range(exchange.size) for i in range(counts[r])]
    inverse = torch.tensor([place[i] for i in order if i < total])
    values = torch.arange(total * 2.0).view(total, 2)
    own = values[sum(counts[:rank]):sum(counts[:rank + 1])]
    assert torch.equal(exchange.gather_rows(own, 3, inverse), values[[i for i in order if i < total]])
    parts = torch.arange(exchange.size * 3.0).view(exchange.size, 3) * 10 ** rank
    expected = sum(torch.arange(exchange.size * 3.0).view(exchange.size, 3)[rank] * 10 ** r for r in range(exchange.size))
    assert torch.equal(groups.experts.reduce_scatter(parts), expected)
    groups.prefetch.barrier()
    assert groups.step.all_gather(torch.tensor([rank])).flatten().tolist() == list(range(exchange.size))
    pipe.send("done")


def toy_worker(rank: int, groups: Groups, pipe: Connection, kind: str, page_size: int, num_rows: int) -> None:
    """A toy model's executor: a plan in, a result out, None ends it."""
    from kits.toy_model import ToyConfig, ToyModel

    serve_plans(ToyConfig(kind), ToyModel(ToyConfig(kind)), rank, groups, pipe, page_size, num_rows)


def serve_plans(config: Any, model: Any, rank: int, groups: Groups, pipe: Connection, page_size: int, num_rows: int) -> None:
    environ.SGLANE_POISON, environ.SGLANE_NUM_THREADS = True, 1
    args = ServerArgs(page_size=page_size, cp_size=groups.step.size, enable_cp_shared_kv=True)
    executor = Executor(config, model, args, rank, groups)
    executor.init_pool(PoolInit(num_rows, NUM_SLOTS, MAX_PAGES))
    while (plan := pipe.recv()) is not None:
        pipe.send(executor.run(plan))


def _main(rank: int, size: int, rendezvous: str, pipe: Connection, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    groups = init_groups(rank, size, rendezvous, "cpu")
    work(rank, groups, pipe, *arguments)
    close_groups(groups)


@contextmanager
def process_ranks(size: int, work: Callable[..., None], *arguments: Any) -> Iterator[list[Connection]]:
    """Spawn work(rank, groups, pipe, *arguments) on `size` processes; yields the other ends of the pipes. All must end well."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(size)]
        processes = [context.Process(target=_main, args=(rank, size, f"file://{folder}/meet", pipes[rank][1], work, arguments))
                     for rank in range(size)]
        for process, (_, end) in zip(processes, pipes):
            process.start()
            end.close()  # so that a rank's death is seen as the end of its pipe
        try:
            yield [pipe[0] for pipe in pipes]
            for process in processes:
                process.join(60)
            assert [process.exitcode for process in processes] == [0] * size
        finally:
            for process in processes:
                process.kill()


def answer(pipe: Connection) -> Any:
    """What a rank sent; fails after a minute of silence, or at once if the rank ended."""
    assert pipe.poll(60), "a rank does not answer"
    return pipe.recv()


def run_on(pipes: list[Connection]) -> Run:
    """A plan to all ranks, their results."""
    def run(plan: Any) -> list[Any]:
        for pipe in pipes:
            pipe.send(plan)
        return [answer(pipe) for pipe in pipes]
    return run
