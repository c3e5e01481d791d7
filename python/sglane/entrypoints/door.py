"""Node 0's side of the connections between launchers: who has joined, who is missing, who failed."""
import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from sglane.entrypoints.node_facts import differences
from sglane.plan.io_struct import Endpoints
from sglane.plan.nodes import Alive, Farewell, FromNode, Hello, Lifeline, Refusal, StopWish, ToNode, Trouble, Vocabulary, VocabularyKept, Welcome
from sglane.server_args import NUM_DIST_PORTS, ConfigError, ServerArgs
from sglane.utils.addresses import HostPort, interface_of, is_loopback
from sglane.utils.frames import BadFrame, frame, read_frame

logger = logging.getLogger(__name__)

#: Offsets from the port of --dist-init-addr. The ranks' store takes the port itself.
DOOR_OFFSET = 1
RESULTS_OFFSET = 2
#: Seconds between two signs of life.
BEAT_S = 1.0
#: Seconds between two lines that say who is missing.
NEWS_S = 10.0
#: Seconds that somebody who connects gets to say who he is.
HELLO_S = 10.0
#: Seconds that a node gets to write the vocabulary down.
VOCABULARY_S = 60.0


class NodeFailure(RuntimeError):
    """Another node is missing, failed or lost; the message says which and how."""


@dataclass
class Member:
    """A node that has joined."""

    name: str  # for messages: node 1 (10.0.0.2)
    writer: asyncio.StreamWriter
    last_sign_s: float
    has_vocabulary: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, message: ToNode) -> None:
        self.writer.write(frame(message))


class Door:
    """The other nodes of this server; without any, everything here is at once done."""

    def __init__(self, args: ServerArgs, facts: Mapping[str, str]):
        """facts: what the others must agree on."""
        self._args = args
        self._facts = facts
        self._members: dict[int, Member] = {}
        self._refusals: dict[int, str] = {}  # last reason by the node rank that was given
        self._trouble = ""
        self._is_closing = False
        self._began_s = self._last_news_s = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._address: HostPort | None = None  # numeric; the store's port
        self.stop_wish = ""  # why a node wants the server to drain and end

    async def open(self, endpoints: Endpoints) -> Endpoints:
        """Listen. Returns the endpoints of this node's processes. Raises ConfigError when the address is not usable."""
        if self._args.nnodes == 1:
            return endpoints
        try:
            address = self._args.dist_address().resolve()
            for offset in range(NUM_DIST_PORTS):
                if offset != DOOR_OFFSET:
                    address.at(offset).listen().close()  # executor and planner take these ports later; better to know now
            self._server = await asyncio.start_server(self._serve, sock=address.at(DOOR_OFFSET).listen())
        except OSError as error:
            raise ConfigError(f"--dist-init-addr {self._args.dist_init_addr}: node 0 must be able to listen there, on {NUM_DIST_PORTS} ports: "
                              f"{error}") from error
        if is_loopback(address.host):
            logger.warning("--dist-init-addr %s is %s: only nodes on this machine can join", self._args.dist_init_addr, address.host)
        self._address = address
        self._tasks.append(asyncio.create_task(self._beat()))
        self._tell_missing()
        return msgspec.structs.replace(endpoints, rendezvous=f"tcp://{address}", from_other_nodes=f"tcp://{address.at(RESULTS_OFFSET)}",
                                       interface=interface_of(address.host))

    # --- for the launcher --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises NodeFailure when a node is missing for too long, has failed, or is silent."""
        if self._trouble:
            raise NodeFailure(self._trouble)
        now_s = time.monotonic()
        for member in self._members.values():
            if now_s - member.last_sign_s > self._args.watchdog_timeout_s:
                raise NodeFailure(f"{member.name} gave no sign of life for {now_s - member.last_sign_s:.0f} s")
        if not self._missing():
            return
        if now_s - self._began_s > self._args.dist_timeout_s:
            refused = [f"node {rank} was refused: {reason}" for rank, reason in sorted(self._refusals.items())]
            raise NodeFailure("; ".join([f"{self._missing_text()} did not join within {self._args.dist_timeout_s:g} s (--dist-timeout)", *refused]))
        if now_s - self._last_news_s > NEWS_S:
            self._tell_missing()

    async def share_vocabulary(self, data: bytes) -> None:
        """Give every node the tokens' bytes; returns when all have them. Raises NodeFailure."""
        for member in self._members.values():
            member.send(Vocabulary(data))
        for member in list(self._members.values()):
            try:
                await asyncio.wait_for(member.has_vocabulary.wait(), VOCABULARY_S)
            except TimeoutError:
                raise NodeFailure(f"{member.name} did not take the vocabulary within {VOCABULARY_S:.0f} s") from None

    def say_farewell(self, farewell: Farewell) -> None:
        """Tell every node that the server ends."""
        self._is_closing = True
        for member in self._members.values():
            member.send(farewell)

    async def close(self, timeout_s: float) -> None:
        """Wait until all nodes have left, but not longer than `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while self._members and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        for member in self._members.values():
            logger.warning("%s did not end within %.0f s", member.name, timeout_s)
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()

    # --- connections -------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str(writer.get_extra_info("peername")[0])
        try:
            first = await asyncio.wait_for(read_frame(reader, FromNode), HELLO_S)
            if isinstance(first, Hello):
                await self._take(first, peer, reader, writer)
            elif isinstance(first, Lifeline):
                await reader.read()  # nothing more comes; it ends with the rank or with this process
            else:
                raise BadFrame(f"the first message is a {type(first).__name__}")
        except (BadFrame, TimeoutError) as error:
            logger.warning("--dist-init-addr: a connection from %s is no node of this server: %s", peer, error)
        except (OSError, asyncio.IncompleteReadError) as error:
            logger.debug("a connection from %s ended: %s", peer, error)
        finally:
            writer.close()

    async def _take(self, hello: Hello, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the node leaves; at once if it is refused."""
        reason = self._why_not(hello)
        if reason:
            logger.error("node %d (%s) is refused: %s", hello.node_rank, peer, reason)
            if hello.node_rank not in self._members:
                self._refusals[hello.node_rank] = reason
            writer.write(frame(Refusal(reason)))
            await writer.drain()
            return
        member = self._members[hello.node_rank] = Member(f"node {hello.node_rank} ({peer})", writer, time.monotonic())
        assert self._address is not None, "a node was taken before the door was open"
        member.send(Welcome(f"tcp://{self._address.at(RESULTS_OFFSET)}", f"tcp://{self._address}"))
        logger.info("%s has joined, %d of %d nodes are there", member.name, len(self._members) + 1, self._args.nnodes)
        try:
            await self._follow(member, reader)
        except (OSError, asyncio.IncompleteReadError):
            self._fail(f"{member.name} is lost: its launcher has ended or its host cannot be reached")
        except BadFrame as error:
            self._fail(f"{member.name} sent something unknown: {error}")
        finally:
            del self._members[hello.node_rank]

    async def _follow(self, member: Member, reader: asyncio.StreamReader) -> None:
        while True:
            message = await read_frame(reader, FromNode)
            member.last_sign_s = time.monotonic()
            if isinstance(message, Trouble):
                self._fail(f"{member.name}: {message.message}")
            elif isinstance(message, StopWish):
                self.stop_wish = f"{member.name} received {message.signal}"
                logger.info("%s: the server ends", self.stop_wish)
            elif isinstance(message, VocabularyKept):
                member.has_vocabulary.set()

    def _fail(self, message: str) -> None:
        """The first trouble counts; at the end nodes leave, which is none."""
        if not self._trouble and not self._is_closing:
            self._trouble = message

    def _why_not(self, hello: Hello) -> str:
        """Why a node is not taken; empty if it is."""
        if self._is_closing:
            return "the server ends"
        if not 1 <= hello.node_rank < self._args.nnodes:
            return f"--node-rank {hello.node_rank} is not between 1 and {self._args.nnodes - 1}"
        if hello.node_rank in self._members:
            return f"--node-rank {hello.node_rank} is taken by {self._members[hello.node_rank].name}"
        return "; ".join(differences(self._facts, hello.facts, hello.node_rank))

    async def _beat(self) -> None:
        while True:
            for member in self._members.values():
                member.send(Alive())
            await asyncio.sleep(BEAT_S)

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._args.nnodes) if rank not in self._members]

    def _missing_text(self) -> str:
        missing = self._missing()
        return ("node rank " if len(missing) == 1 else "node ranks ") + ", ".join(map(str, missing))

    def _tell_missing(self) -> None:
        self._last_news_s = time.monotonic()
        logger.info("waiting for %s at %s (%.0f of %g s)", self._missing_text(), self._args.dist_init_addr, self._last_news_s - self._began_s,
                    self._args.dist_timeout_s)
