"""Ranks as spawned processes that meet as those of a server do; orders such as plans come through pipes."""
import multiprocessing as mp
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from kits.plan_driver import MAX_PAGES, NUM_SLOTS, Run
from sglane import environ
from sglane.distributed.groups import Groups, Transport, close_groups, init_groups
from sglane.model_executor.executor import Executor
from sglane.plan.step_plan import PoolInit
from sglane.server_args import ServerArgs


def toy_worker(rank: int, groups: Groups, pipe: Connection, kind: str, page_size: int, num_rows: int) -> None:
    """A toy model's executor: a plan in, a result out, None ends it."""
    from kits.toy_model import ToyConfig, ToyModel

    serve_plans(ToyConfig(kind), ToyModel(ToyConfig(kind)), rank, groups, pipe, page_size, num_rows)


def serve_plans(config: Any, model: Any, rank: int, groups: Groups, pipe: Connection, page_size: int, num_rows: int,
                prepare: Callable[[Executor], None] | None = None, **flags: Any) -> None:
    """prepare: called before the first plan. flags: further ServerArgs."""
    environ.SGLANE_POISON, environ.SGLANE_NUM_THREADS = True, 1
    args = ServerArgs(page_size=page_size, cp_size=groups.step.size, enable_cp_shared_kv=True, **flags)
    executor = Executor(config, model, args, rank, groups)
    executor.init_pool(PoolInit(num_rows, NUM_SLOTS, MAX_PAGES))
    if prepare is not None:
        prepare(executor)
    while (plan := pipe.recv()) is not None:
        pipe.send(executor.run(plan))


def _main(rank: int, size: int, rendezvous: str, transport: Transport, timeout_s: float, pipe: Connection, work: Callable[..., None],
          arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    groups = init_groups(rank, size, rendezvous, "cpu", transport, timeout_s)
    work(rank, groups, pipe, *arguments)
    close_groups(groups)


@contextmanager
def process_ranks(size: int, work: Callable[..., None], *arguments: Any, transport: Transport = "peer", timeout_s: float = 60.0,
                  exits: list[int] | None = None) -> Iterator[list[Connection]]:
    """Spawn work(rank, groups, pipe, *arguments) on `size` processes; yields the other ends of the pipes.

    timeout_s: how long ranks wait for each other. exits: the exit codes to expect, all 0 by default.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in range(size)]
        processes = [context.Process(target=_main, args=(rank, size, f"file://{folder}/meet", transport, timeout_s, pipes[rank][1], work, arguments))
                     for rank in range(size)]
        for process, (_, end) in zip(processes, pipes):
            process.start()
            end.close()  # so that a rank's death is seen as the end of its pipe
        try:
            yield [pipe[0] for pipe in pipes]
            for process in processes:
                process.join(60)
            assert [process.exitcode for process in processes] == (exits or [0] * size)
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
