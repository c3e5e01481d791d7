"""A node with rank > 0: starts its executors when node 0 lets it in, watches them, and ends with the server. It restarts nothing."""
import asyncio
import logging
import signal
import time
from pathlib import Path

import msgspec
import uvloop

from sglane.configs.model_config import ModelConfig
from sglane.entrypoints.door import BEAT_S, DOOR_OFFSET, NEWS_S
from sglane.entrypoints.node_facts import facts_of
from sglane.entrypoints.processes import Family, WorkFolder
from sglane.entrypoints.signals import Signals, StopRequested
from sglane.plan.io_struct import Endpoints
from sglane.plan.nodes import Alive, Farewell, FromNode, Hello, Refusal, StopWish, ToNode, Trouble, Vocabulary, VocabularyKept, Welcome
from sglane.server_args import ServerArgs
from sglane.utils.addresses import HostPort, interface_of
from sglane.utils.frames import BadFrame, frame, read_frame

logger = logging.getLogger(__name__)

TICK_S = 0.1
#: Seconds between two attempts to reach node 0.
RETRY_S = 0.5
#: Seconds that node 0 gets to say why, when ranks of this node end with it.
LAST_WORDS_S = 1.0
#: Seconds that ranks get to end after the planner has told them to.
RANKS_EXIT_S = 15.0
#: Exit codes. 0: the server was told to end. 128 + n: this launcher got a second signal n.
EXIT_HERE = 1  # a rank of this node failed, or node 0 refused the node
EXIT_ELSEWHERE = 3  # node 0 ended the server because of an error, or is gone, or never came


class NodeEnds(Exception):
    """Why this node ends, and its exit code."""

    def __init__(self, code: int, why: str):
        super().__init__(why)
        self.code = code


class Link:
    """The connection to node 0."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self.last_sign_s = time.monotonic()

    @property
    def own_host(self) -> str:
        """Numeric address of this host, as node 0 sees it."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def peer(self) -> HostPort:
        host, port = self._writer.get_extra_info("peername")[:2]
        return HostPort(str(host), int(port))

    def send(self, message: FromNode) -> None:
        self._writer.write(frame(message))

    async def receive(self) -> ToNode:
        """Raises NodeEnds when node 0 is gone."""
        try:
            message: ToNode = await read_frame(self._reader, ToNode)
        except (OSError, asyncio.IncompleteReadError):
            raise NodeEnds(EXIT_ELSEWHERE, "node 0 is lost: its launcher has ended or its host cannot be reached") from None
        except BadFrame as error:
            raise NodeEnds(EXIT_ELSEWHERE, f"node 0 sent something unknown: {error}") from error
        self.last_sign_s = time.monotonic()
        return message

    async def flush(self) -> None:
        """What was sent is under way, or node 0 is gone."""
        try:
            await asyncio.wait_for(self._writer.drain(), LAST_WORDS_S)
        except (OSError, TimeoutError) as error:
            logger.warning("node 0 could not be told: %s", error)

    def close(self) -> None:
        self._writer.close()


class WorkerNode:
    """One node with rank > 0. `run` returns the exit code."""

    def __init__(self, args: ServerArgs, config: ModelConfig, folder: WorkFolder):
        self._args = args
        self._config = config
        self._folder = folder
        self._signals = Signals()
        self._family = Family([])
        self._last_beat_s = 0.0
        self._has_wished = False

    async def run(self) -> int:
        try:
            link = await self._join()
        except (StopRequested, NodeEnds) as end:
            return self._last_word(end)
        try:
            endpoints = await self._enter(link)
            logger.info("node 0 at %s has let this node in; ranks %s start", link.peer, list(self._args.ranks_of_node()))
            self._family = Family.start(self._args, endpoints)
            await self._follow(link, Path(endpoints.vocabulary))
        except (StopRequested, NodeEnds) as end:
            return self._last_word(end)
        finally:
            self._family.kill()
            link.close()
        return 0

    def _last_word(self, end: StopRequested | NodeEnds) -> int:
        """Log why this node ends; its exit code."""
        if isinstance(end, NodeEnds):
            (logger.error if end.code else logger.info)("node %d ends: %s", self._args.node_rank, end)
            return end.code
        return 0 if self._signals.count == 1 else 128 + self._signals.last

    # --- start -------------------------------------------------------------------------------------------------------

    async def _join(self) -> Link:
        """Connect to node 0, which may start later than this node."""
        target = self._args.dist_address().at(DOOR_OFFSET)
        began_s = time.monotonic()
        news_s = began_s - NEWS_S
        while True:
            try:
                return Link(*await asyncio.wait_for(asyncio.open_connection(target.host, target.port), RETRY_S * 10))
            except (OSError, TimeoutError) as error:
                now_s = time.monotonic()
                waited_s = now_s - began_s
                if waited_s > self._args.dist_timeout_s:
                    raise NodeEnds(EXIT_ELSEWHERE, f"node 0 does not answer at {target} within {self._args.dist_timeout_s:g} s (--dist-timeout): "
                                                   f"{error}") from error
                if now_s - news_s >= NEWS_S:
                    news_s = now_s
                    logger.info("waiting for node 0 at %s (%.0f of %g s)", target, waited_s, self._args.dist_timeout_s)
            if self._signals.count:
                raise StopRequested
            await asyncio.sleep(RETRY_S)

    async def _enter(self, link: Link) -> Endpoints:
        """Say hello. Returns the endpoints of this node's ranks; raises NodeEnds with node 0's reason if it does not want this node."""
        link.send(Hello(self._args.node_rank, facts_of(self._args, self._config)))
        try:
            answer = await asyncio.wait_for(link.receive(), self._args.dist_timeout_s)
        except TimeoutError:
            raise NodeEnds(EXIT_ELSEWHERE, f"node 0 at {link.peer} does not answer") from None
        if isinstance(answer, Refusal):
            raise NodeEnds(EXIT_HERE, f"node 0 refuses this node: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise NodeEnds(EXIT_ELSEWHERE, f"node 0 answers a hello with a {type(answer).__name__}")
        return msgspec.structs.replace(
            self._folder.endpoints(self._args.cp_size), from_executors=answer.from_executors, rendezvous=answer.rendezvous,
            to_executors=[f"tcp://{str(HostPort(link.own_host, 0)).removesuffix('0')}*"] * self._args.cp_size,
            interface=interface_of(link.own_host), lifeline=str(link.peer),
        )

    # --- service -----------------------------------------------------------------------------------------------------

    async def _follow(self, link: Link, vocabulary: Path) -> None:
        """Until the server ends in good order; raises NodeEnds or StopRequested otherwise."""
        listening = asyncio.create_task(self._listen(link, vocabulary))
        try:
            while True:
                await asyncio.wait([listening], timeout=TICK_S)
                if listening.done():
                    break
                await self._tick(link, listening)
        finally:
            listening.cancel()
        farewell = listening.result()
        if farewell.code != 0:
            raise NodeEnds(EXIT_ELSEWHERE, f"node 0 has ended the server: {farewell.why}")
        logger.info("node 0 has ended the server: %s", farewell.why)
        deadline_s = time.monotonic() + RANKS_EXIT_S
        while farewell.ranks_told and not self._family.all_ended() and time.monotonic() < deadline_s and self._signals.count < 2:
            await asyncio.sleep(TICK_S)
        if farewell.ranks_told and not self._family.all_ended():
            logger.warning("not all ranks ended when told to; they are killed")

    async def _listen(self, link: Link, vocabulary: Path) -> Farewell:
        """Messages of node 0, up to the last one."""
        while True:
            message = await link.receive()
            if isinstance(message, Farewell):
                return message
            if isinstance(message, Vocabulary):
                vocabulary.write_bytes(message.data)
                link.send(VocabularyKept())

    async def _tick(self, link: Link, listening: "asyncio.Task[Farewell]") -> None:
        """Signs of life, both ways, dead ranks, signals."""
        now_s = time.monotonic()
        if now_s - self._last_beat_s >= BEAT_S:
            self._last_beat_s = now_s
            link.send(Alive())
        if self._signals.count > 1:
            link.send(Trouble(f"its launcher received {signal.Signals(self._signals.last).name} twice"))
            await link.flush()
            raise StopRequested
        if self._signals.count and not self._has_wished:
            self._has_wished = True
            logger.info("node 0 is asked to drain and to end the server; a second signal ends this node now")
            link.send(StopWish(signal.Signals(self._signals.last).name))
        silence_s = now_s - link.last_sign_s
        if silence_s > self._args.watchdog_timeout_s:
            raise NodeEnds(EXIT_ELSEWHERE, f"node 0 gave no sign of life for {silence_s:.0f} s")
        failures = self._family.failures()
        if failures:
            link.send(Trouble("; ".join(failures)))
            await link.flush()
            if not self._family.any_killed():  # they may have ended because others did: node 0 will say
                await asyncio.wait([listening], timeout=LAST_WORDS_S)
            if not listening.done():
                raise NodeEnds(EXIT_HERE, "; ".join(failures))


def serve_worker(args: ServerArgs, config: ModelConfig) -> int:
    """Run this node until the server ends. Returns the process's exit code."""
    folder = WorkFolder()

    async def run() -> int:
        return await WorkerNode(args, config, folder).run()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run())
    finally:
        folder.remove()
