"""The front's side of sessions: what each turn saw and answered, and which turn a new request continues.

The planner only knows that a session is open, and keeps the KV rows of its last turn; tokens are kept here.
"""
import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglane.entrypoints.errors import ApiError, bad_field
from sglane.entrypoints.validation import Fields, check_rid, shown
from sglane.plan.io_struct import CloseSession, OpenSession

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int32]

MAX_SESSIONS = 1024
MAX_ID_CHARACTERS = 256
#: Turns of one session that can be named; a streaming session keeps one.
MAX_TURNS = 1024
#: Tokens of all turns of all sessions. int32 each.
MAX_TOKENS = 1 << 26
MAX_TIMEOUT_S = 7 * 24 * 3600.0
MAX_CAPACITY = 1 << 40
FIELD = "session_params"


class Turn:
    """One request of a session: the first `num_kept` tokens of an earlier turn (its history), what it adds, what it answers."""

    def __init__(self, session: "Session", name: str, parent: "Turn | None", num_kept: int, added: Tokens, replaces: bool = False):
        """replaces: what continues `parent` ends when this turn starts, everything if there is no parent."""
        self.session = session
        self.name = name
        self.parent = parent
        self.num_kept = num_kept
        self.replaces = replaces
        self.is_running = False
        self.was_replaced = False
        self._added = added
        self._output: Sequence[int] | Tokens = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of its own."""
        return len(self._added) + len(self._output)

    def prompt(self) -> Tokens:
        return self._join(len(self._added))

    def tokens(self) -> Tokens:
        """What it saw and has answered so far."""
        return self._join(self.num_tokens)

    def _join(self, num_own: int) -> Tokens:
        parts = []
        turn: Turn | None = self
        limit = self.num_kept + num_own
        while turn is not None:
            own = np.concatenate((turn._added, np.array(turn._output, np.int32)))
            parts.append(own[: max(limit - turn.num_kept, 0)])
            limit = min(limit, turn.num_kept)
            turn = turn.parent
        return np.concatenate(parts[::-1])

    def comes_after(self, other: "Turn") -> bool:
        """It continues `other`, directly or not."""
        turn = self.parent
        while turn is not None and turn is not other:
            turn = turn.parent
        return turn is not None

    def started(self, output: Sequence[int]) -> None:
        """It is on its way to the engine. output: grows while it runs."""
        self._output = output
        self.is_running = True
        self.session.turn_started(self)

    def ended(self, *, is_kept: bool) -> None:
        """is_kept: it ended normally. A turn that was aborted, refused or failed, or whose client left, is none, unless it was replaced."""
        self._output = np.array(self._output, np.int32)
        self.is_running = False
        self.session.turn_ended(self, is_kept or self.was_replaced)

    def replaced(self) -> None:
        """Something else goes on from here: it stays what it is now."""
        self.was_replaced = True

    def flatten(self) -> None:
        """Forget the turns before it, keep their tokens."""
        history = self._join(0)
        self._added = np.concatenate((history, self._added))
        self.parent, self.num_kept = None, 0


@dataclass(frozen=True)
class Wish:
    """`session_params` of a request: which turn it continues, and how much of it."""

    session: "Session"
    rid: str | None  # None: no earlier turn; in a streaming session always the last
    offset: int  # 0: all of it; else as the end of a Python slice
    replace: bool
    drops_output: bool


class Session:
    """Turns by name. A plain session is a tree of them, a streaming one has its last."""

    def __init__(self, client_id: str, key: str, is_streaming: bool, timeout_s: float, abort: Callable[[str], None],
                 used: "Callable[[Session], None]"):
        """key: the planner's name. timeout_s: 0 is none. abort: ends a request by its rid. used: called when a request has ended."""
        self.client_id = client_id
        self.key = key
        self.is_streaming = is_streaming
        self.timeout_s = timeout_s
        self.num_running = 0
        self.num_tokens = 0  # of all turns, each with its own
        self.turns: dict[str, Turn] = {}
        self._abort = abort
        self._used = used

    def make_turn(self, wish: Wish, name: str, added: Tokens, begin_token: int | None) -> Turn:
        """Changes nothing yet; see `turn_started`. begin_token: left out where it begins what is appended. Raises a 400 that names the field."""
        parent = self._parent(wish)
        if not self.is_streaming:
            gone = self._turns_after(parent) if wish.replace else []
            if name in self.turns and self.turns[name] not in gone:
                raise bad_field("rid", f"{shown(name)!r} names an earlier request of this session")
            if len(self.turns) - len(gone) >= MAX_TURNS:
                raise bad_field(f"{FIELD}.id", f"names a session that has {MAX_TURNS} requests already: replace some, or open another")
        if parent is None:
            return Turn(self, name, None, 0, added, wish.replace)
        if begin_token is not None and len(added) and added[0] == begin_token:
            added = added[1:]
        history = parent.num_kept + parent.num_tokens if not wish.drops_output else len(parent.prompt())
        return Turn(self, name, parent, num_kept(wish.offset, history), added, wish.replace)

    def _parent(self, wish: Wish) -> Turn | None:
        if self.is_streaming:
            if self.num_running:
                raise bad_field(f"{FIELD}.id", "names a streaming session whose last request has not ended")
            return next(iter(self.turns.values()), None)
        if wish.rid is None:
            return None
        parent = self.turns.get(wish.rid)
        if parent is None:
            raise bad_field(f"{FIELD}.rid", f"{shown(wish.rid)!r} is no request of this session that has ended normally")
        if parent.is_running and not wish.replace:
            raise bad_field(f"{FIELD}.rid", f"{shown(wish.rid)!r} names a request that has not ended: wait for it, or replace it")
        return parent

    def _turns_after(self, parent: Turn | None) -> list[Turn]:
        """None: every turn."""
        return [turn for turn in self.turns.values() if parent is None or turn.comes_after(parent)]

    def _replace(self, parent: Turn | None) -> None:
        """End and forget what continues `parent`, and end it if it runs."""
        gone = self._turns_after(parent)
        for turn in gone:
            del self.turns[turn.name]
        if parent is not None and parent.is_running:
            parent.replaced()
            gone.append(parent)
        for turn in gone:
            if turn.is_running:
                self._abort(turn.name)

    def turn_started(self, turn: Turn) -> None:
        if turn.replaces:
            self._replace(turn.parent)
        self.num_running += 1
        if not self.is_streaming:
            self.turns[turn.name] = turn
        self._count()

    def turn_ended(self, turn: Turn, is_kept: bool) -> None:
        self.num_running -= 1
        if self.is_streaming:
            if is_kept:
                turn.flatten()
                self.turns = {turn.name: turn}
        elif not is_kept and self.turns.get(turn.name) is turn:
            del self.turns[turn.name]
        self._count()
        self._used(self)

    def _count(self) -> None:
        self.num_tokens = sum(turn.num_tokens for turn in self.turns.values())


class SessionBook:
    """All open sessions. Lives on the event loop's thread."""

    def __init__(self, send: Callable[[OpenSession | CloseSession], None], abort: Callable[[str], None], begin_token: int | None):
        """send: to the planner. abort: a request, by its rid. begin_token: the tokenizer's, if it has one."""
        self._send = send
        self._abort = abort
        self._begin_token = begin_token
        self._open: dict[str, Session] = {}  # by the client's name
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._num_opened = 0

    def open(self, client_id: str | None, is_streaming: bool, timeout_s: float) -> str:
        """Returns the session's name. timeout_s: 0 is none."""
        client_id = uuid.uuid4().hex if client_id is None else client_id
        if client_id in self._open:
            raise bad_field("session_id", f"{shown(client_id)!r} is open already")
        if len(self._open) >= MAX_SESSIONS:
            raise ApiError(503, f"{MAX_SESSIONS} sessions are open: close some")
        self._num_opened += 1  # a new key, so that a late request of a closed session never meets a new one of the same name
        session = Session(client_id, f"{self._num_opened}:{client_id}", is_streaming, timeout_s, self._abort, self._wind_up)
        self._open[client_id] = session
        self._send(OpenSession(session.key))
        self._wind_up(session)
        return client_id

    def close(self, client_id: str) -> None:
        """Requests of it that run go on. Raises a 400 for a session that is not open."""
        session = self._open.pop(client_id, None)
        if session is None:
            raise bad_field("session_id", f"{shown(client_id)!r} is not open")
        if client_id in self._timers:
            self._timers.pop(client_id).cancel()
        self._send(CloseSession(session.key))

    def wish_of(self, fields: Fields) -> Wish | None:
        """`session_params` of a body; None: the request belongs to no session. Raises a 400 that names the field."""
        values = Fields(fields.object(FIELD))
        if fields.get(FIELD) is None:
            return None
        try:
            client_id, rid = values.string("id"), values.get("rid")
            session = self._open.get(client_id) if client_id is not None else None
            if session is None:
                raise bad_field("id", "is needed" if client_id is None else f"{shown(client_id)!r} names no open session")
            wish = Wish(
                session, None if rid is None else check_rid(rid), values.integer("offset", 0, -(1 << 31), 1 << 31), values.flag("replace"),
                values.flag("drop_previous_output"),
            )
            if session.is_streaming:
                values.refuse(("offset", "replace", "drop_previous_output"), "is not for a streaming session, whose requests are only appended")
        except ApiError as error:
            raise ApiError(error.status, f"{FIELD}.{error.message}", f"{FIELD}.{error.param}") from error
        return wish

    def begin(self, wish: Wish, name: str, added: Tokens) -> Turn:
        """The turn of a request that is about to be sent; what it replaces ends when it has been. added: its own tokens, int32 [n]."""
        if self._open.get(wish.session.client_id) is not wish.session:
            raise bad_field(f"{FIELD}.id", f"{shown(wish.session.client_id)!r} names a session that was closed meanwhile")
        if len(added) + sum(session.num_tokens for session in self._open.values()) > MAX_TOKENS:
            raise ApiError(503, f"the open sessions have {MAX_TOKENS} tokens: close some")
        turn = wish.session.make_turn(wish, name, added, self._begin_token)
        self._wind_up(wish.session)
        return turn

    def _wind_up(self, session: Session) -> None:
        """The time without use begins anew."""
        if not session.timeout_s or self._open.get(session.client_id) is not session:
            return
        if session.client_id in self._timers:
            self._timers[session.client_id].cancel()
        loop = asyncio.get_running_loop()
        self._timers[session.client_id] = loop.call_later(session.timeout_s, self._on_timeout, session)

    def _on_timeout(self, session: Session) -> None:
        if session.num_running:
            self._wind_up(session)
            return
        logger.info("session %s was not used for %g s: closed", session.client_id, session.timeout_s)
        self.close(session.client_id)


def num_kept(offset: int, num_tokens: int) -> int:
    """Tokens of a history of `num_tokens` that stay."""
    if not -num_tokens <= offset <= num_tokens:
        raise bad_field(f"{FIELD}.offset", f"is {offset}, but the request that is continued has {num_tokens} tokens")
    return offset if offset > 0 else num_tokens + offset
