"""Compiling as a ticket: in a thread of its own, so that steps go on meanwhile; the planner is told when it has ended."""
import queue
import threading
from types import TracebackType
from typing import Protocol

import zmq

from sglane.plan.io_struct import Grammar, PrepareGrammar
from sglane.plan.step_plan import GrammarReady
from sglane.utils.ipc import Sender


class Prepares(Protocol):
    def prepare(self, grammar: Grammar) -> None:
        """Compile, and keep for the request that follows. Any thread."""
        ...


class GrammarTickets:
    """Context: the thread ends with it, after what it is compiling."""

    def __init__(self, grammars: Prepares, context: zmq.Context, address: str, rank: int):
        """address: where results go."""
        self._queue: queue.SimpleQueue[PrepareGrammar | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, args=(grammars, context, address, rank), name="grammar", daemon=True)

    def submit(self, message: PrepareGrammar) -> None:
        self._queue.put(message)

    def _work(self, grammars: Prepares, context: zmq.Context, address: str, rank: int) -> None:
        sender = Sender(context, address)  # a socket belongs to one thread
        try:
            while (message := self._queue.get()) is not None:
                grammars.prepare(message.grammar)
                sender.send(GrammarReady(rank, message.request_id))
        finally:
            sender.close()

    def __enter__(self) -> "GrammarTickets":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._queue.put(None)
        self._thread.join()
