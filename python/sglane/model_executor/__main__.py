"""Process of one rank: `python -m sglane.model_executor`, told what to do by a ProcessSpec (JSON) on standard input."""
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

import msgspec
import setproctitle
import torch
import zmq

from sglane.configs.model_config import load_model_config
from sglane.distributed.groups import close_groups, init_groups, use_interface
from sglane.layers.moe.shard import ExpertShard
from sglane.model_executor.executor import Executor, resolve_dtype
from sglane.model_executor.grammar import LazyGrammars
from sglane.model_executor.grammar_tickets import GrammarTickets
from sglane.model_executor.lifeline import hold_lifeline
from sglane.model_executor.loader import load_model
from sglane.model_executor.memory import available_bytes, check_host_size
from sglane.model_executor.profiler import StepProfiler
from sglane.plan.io_struct import PrepareGrammar, SetLogLevel, StartProfile, StopProfile
from sglane.plan.step_plan import ExecutorError, FallbackCounts, PoolInit, PoolReady, ProfileDone, Progress, StepPlan, Stop, ToExecutor
from sglane.server_args import ProcessSpec, ServerArgs
from sglane.utils import fallback
from sglane.utils import logging as log
from sglane.utils.ipc import Receiver, Sender
from sglane.utils.parent import die_with_parent

logger = logging.getLogger(__name__)

#: How often an idle rank looks whether a copy has failed.
CHECK_INTERVAL_MS = 1000


class ReportFailure:
    """Context: tells the planner why this rank ends, if an exception ends it. The exception goes on."""

    def __init__(self, sender: Sender, rank: int):
        self._sender = sender
        self._rank = rank

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._sender.send(ExecutorError(self._rank, f"{type(error).__name__}: {error}"))


def pick_device(args: ServerArgs, rank: int) -> torch.device:
    """The rank's device; ranks of one host take its GPUs in turn."""
    if args.device == "cpu" or (args.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("--device cuda, but torch sees no CUDA device")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def grammars_of(spec: ProcessSpec, context: zmq.Context, executor: Executor, stack: ExitStack) -> GrammarTickets | None:
    """Structured output, if this server offers it; its thread ends with `stack`."""
    if not spec.server_args.offers_grammars():
        return None
    grammars = LazyGrammars(spec.server_args.grammar_backend, spec.endpoints.vocabulary)
    executor.use_grammars(grammars)
    return stack.enter_context(GrammarTickets(grammars, context, spec.endpoints.from_executors, spec.rank))


def load(spec: ProcessSpec, device: torch.device, sender: Sender) -> tuple[Executor, int]:
    """Weights and communicators. Returns the executor and the device memory (bytes) that was free before."""
    args, rank = spec.server_args, spec.rank
    config = load_model_config(args.model_path, args.context_length, args.draft_path())
    available = available_bytes(device)
    check_host_size(args, available_bytes(torch.device("cpu")))
    logger.info("Load weight begin. avail mem=%.2f GB", available / (1 << 30))
    begin = time.perf_counter()
    model = load_model(config, device, resolve_dtype(args, config), show_progress=rank == 0, shard=ExpertShard(rank, args.cp_size))
    logger.info("Load weight end. elapsed=%.2f s, type=%s, dtype=%s, avail mem=%.2f GB, mem usage=%.2f GB.", time.perf_counter() - begin,
                type(model).__name__, resolve_dtype(args, config), available_bytes(device) / (1 << 30), model.weight_bytes / (1 << 30))
    if spec.endpoints.interface:
        use_interface(spec.endpoints.interface)
    timeout_s = max(args.dist_timeout_s, args.watchdog_timeout_s)  # in a step the planner's watchdog comes first
    groups = init_groups(rank, args.cp_size, spec.endpoints.rendezvous, device.type, args.cp_exchange, timeout_s)

    def report(step: int, layer: int) -> None:
        sender.send(Progress(rank, step, layer))

    return Executor(config, model, args, rank, groups, device, report), available


def serve(spec: ProcessSpec, context: zmq.Context, receiver: Receiver, sender: Sender, stack: ExitStack) -> None:
    """Start-up protocol, then plans until Stop. stack: what must end before the sockets do."""
    device = pick_device(spec.server_args, spec.rank)
    executor, available = load(spec, device, sender)
    executor.use_reporter(lambda: Sender(context, spec.endpoints.from_executors))
    stack.callback(executor.close, finish=False)
    tickets = grammars_of(spec, context, executor, stack)
    profiler = StepProfiler(spec.rank, device)
    sender.send(msgspec.structs.replace(executor.ready(available), address=receiver.address))
    counted = fallback.counts()
    work_ahead: Callable[[], bool] = bool  # before there is a pool: nothing to do
    while True:
        while not receiver.poll(0) and work_ahead():
            pass
        while not receiver.poll(CHECK_INTERVAL_MS):
            executor.check()
        message = receiver.recv()
        if isinstance(message, StepPlan):
            sender.send(executor.run(message))
            if counted != (counted := fallback.counts()):
                sender.send(FallbackCounts(spec.rank, counted))
            if profiler.is_on:
                profiler.step_ended()
        elif isinstance(message, PrepareGrammar):
            assert tickets is not None, "a grammar arrived, but this server offers no structured output"
            tickets.submit(message)
        elif isinstance(message, StartProfile):
            sender.send(ProfileDone(spec.rank, message.request_id, profiler.start(message)))
        elif isinstance(message, StopProfile):
            sender.send(ProfileDone(spec.rank, message.request_id, profiler.stop()))
        elif isinstance(message, SetLogLevel):
            logging.getLogger().setLevel(message.level.upper())
        elif isinstance(message, PoolInit):
            executor.init_pool(message)
            work_ahead = executor.work_ahead
            gc.freeze()  # libraries and model stay: walking them takes 100 ms, which would hit some step
            sender.send(PoolReady(spec.rank))
        elif isinstance(message, Stop):
            break
    executor.close()
    close_groups(executor.groups)


def main() -> None:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # they may reach every process of a server; the planner says when to stop
        signal.signal(number, signal.SIG_IGN)
    spec = ProcessSpec.from_json(sys.stdin.buffer.read())
    setproctitle.setproctitle(f"sglane::executor_CP{spec.rank}")
    log.setup(spec.server_args.log_level, f"CP{spec.rank}", spec.server_args.log_format)
    if spec.endpoints.lifeline:
        hold_lifeline(spec.endpoints.lifeline, spec.rank)
    context = zmq.Context()
    receiver = Receiver(context, spec.endpoints.to_executors[spec.rank], ToExecutor)
    sender = Sender(context, spec.endpoints.from_executors)
    try:
        with ReportFailure(sender, spec.rank), ExitStack() as stack:
            serve(spec, context, receiver, sender, stack)
    finally:
        receiver.close()
        sender.close()
        context.term()


if __name__ == "__main__":
    main()
