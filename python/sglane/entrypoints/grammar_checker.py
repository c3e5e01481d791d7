"""Tries grammars out before they are accepted: in a process of its own, which is killed when it takes too long, and may crash."""
import asyncio
import hashlib
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import orjson

from sglane.entrypoints.errors import ApiError
from sglane.entrypoints.tokenizer import TextTokenizer
from sglane.plan.io_struct import Grammar

logger = logging.getLogger(__name__)

#: Longest compile. The executors compile what was accepted once more, between two steps.
COMPILE_LIMIT_S = 3.0
#: Longest wait for other clients' grammars.
QUEUE_LIMIT_S = 6.0
START_LIMIT_S = 60.0
MAX_STARTS = 3
#: Verdicts that are remembered.
MAX_KNOWN = 4096
WORKER = "sglane.model_executor.grammar_worker"
#: Ways in which a worker fails to answer.
WORKER_ERRORS = (OSError, asyncio.IncompleteReadError, orjson.JSONDecodeError)


def write_vocabulary(path: Path, tokenizer: TextTokenizer, size: int, end_token_ids: tuple[int, ...], markers: Sequence[str] = ()) -> None:
    """The tokens' bytes for the worker and the executors; see Vocabulary in the executors' grammar module. size: of the model's logits.

    Special tokens have no bytes, so that they never stand in a constrained answer, unless they are part of a marker that parsers look for.
    """
    markup = tokenizer.pieces.in_markers(markers)
    known = tokenizer.pieces
    pieces = [known.piece(token_id) if token_id in markup else known.piece_without_special(token_id) for token_id in range(size)]
    path.write_bytes(msgspec.msgpack.encode({"pieces": pieces, "end_token_ids": list(end_token_ids), "size": size}))


class Worker:
    """One process that compiles."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process

    @classmethod
    async def start(cls, backend: str, vocabulary: Path) -> "Worker":
        """Returns when it can be asked. Raises TimeoutError or one of WORKER_ERRORS."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", WORKER, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment, start_new_session=True)
        worker = cls(process)
        await worker.ask(orjson.dumps([backend, str(vocabulary)]), START_LIMIT_S)
        return worker

    async def ask(self, line: bytes, limit_s: float) -> str:
        """One line out, one line in. Whatever goes wrong, the worker is killed: its next answer would belong to this question."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                self._process.stdin.write(line + b"\n")
                await self._process.stdin.drain()
                return str(orjson.loads(await self._process.stdout.readuntil(b"\n")))
        except BaseException:
            self.kill()
            raise

    def has_ended(self) -> bool:
        return self._process.returncode is not None

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def wait(self) -> None:
        await self._process.wait()


class GrammarChecker:
    """One worker, started when the first grammar arrives; verdicts are remembered."""

    def __init__(self, backend: str, vocabulary: Path, prepare: Callable[[Grammar], Awaitable[None]]):
        """backend: of --grammar-backend. prepare: called for each new grammar that is usable, before it is let through."""
        self._backend = backend
        self._vocabulary = vocabulary
        self._prepare = prepare
        self._lock = asyncio.Lock()
        self._worker: asyncio.Task[Worker] | None = None
        self._known: OrderedDict[bytes, str] = OrderedDict()

    async def check(self, grammar: Grammar) -> str:
        """What is wrong with it; empty if it is usable. Raises a 503 when too many grammars wait or no worker can be started."""
        key = hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
        is_new = key not in self._known
        if is_new:
            await self._running_worker()  # its start is no wait for others' grammars
            try:
                await asyncio.wait_for(self._lock.acquire(), QUEUE_LIMIT_S)
            except TimeoutError as error:
                raise ApiError(503, "too many grammars wait to be compiled") from error
            try:
                if key not in self._known:
                    self._remember(key, await self._try_out(grammar))
            finally:
                self._lock.release()
        verdict = self._known[key]
        self._known.move_to_end(key)
        if is_new and not verdict:
            await self._prepare(grammar)
        return verdict

    def _remember(self, key: bytes, verdict: str) -> None:
        self._known[key] = verdict
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    async def _try_out(self, grammar: Grammar) -> str:
        worker, task = await self._running_worker(), self._worker
        assert task is not None, "the worker that runs is known"
        try:
            return await worker.ask(msgspec.json.encode(grammar), COMPILE_LIMIT_S)
        except TimeoutError:
            verdict = f"it is too complex: it did not compile within {COMPILE_LIMIT_S:g} s"
        except WORKER_ERRORS as error:
            logger.warning("the grammar worker ended (%s) on a %s of %d characters", type(error).__name__, grammar.kind, len(grammar.text))
            verdict = "it is too complex: the compiler failed on it"
        except BaseException:
            self._forget(task)  # it was killed in the middle of an answer
            raise
        await worker.wait()
        self._forget(task)
        if self._worker is None:
            self._worker = asyncio.create_task(Worker.start(self._backend, self._vocabulary))  # the next one need not wait for it
        return verdict

    async def _running_worker(self) -> Worker:
        """Started if there is none. Several may wait here. Raises a 503."""
        for _ in range(MAX_STARTS):
            task = self._worker
            if task is None:
                task = self._worker = asyncio.create_task(Worker.start(self._backend, self._vocabulary))
            try:
                worker = await asyncio.shield(task)
            except (TimeoutError, *WORKER_ERRORS) as error:
                self._forget(task)
                logger.error("the grammar worker did not start: %s: %s", type(error).__name__, error)
                raise ApiError(503, "structured output is not available: the grammar compiler did not start") from error
            if not worker.has_ended():
                return worker
            self._forget(task)  # it ended between two questions: no grammar's fault
        raise ApiError(503, "structured output is not available: the grammar compiler does not keep running")

    def _forget(self, task: "asyncio.Task[Worker]") -> None:
        """Unless another one that waited has started a new worker already."""
        if self._worker is task:
            self._worker = None

    async def close(self) -> None:
        """Ends the worker. Idempotent."""
        task, self._worker = self._worker, None
        if task is None:
            return
        task.cancel()
        done, _ = await asyncio.wait([task])
        for ended in done:
            if not ended.cancelled() and ended.exception() is None:
                ended.result().kill()
                await ended.result().wait()
