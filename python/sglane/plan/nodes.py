"""Messages between the launchers of a server's nodes, over one TCP connection a node (`utils.frames`). Node 0 listens."""
import msgspec


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a node with rank > 0. facts: what all nodes must agree on, by the name that messages use (`--page-size`)."""

    node_rank: int
    facts: dict[str, str]


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The node may start its executors; addresses for them, all numeric and on node 0."""

    from_executors: str  # ZeroMQ address of the planner
    rendezvous: str  # tcp://HOST:PORT of the ranks' torch.distributed store


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """The node is not taken; it must end."""

    reason: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Sent once a second, both ways."""


class Trouble(msgspec.Struct, frozen=True, tag="trouble"):
    """Something of the node has failed; the server must end."""

    message: str


class StopWish(msgspec.Struct, frozen=True, tag="stop_wish"):
    """The node got a signal: the server should drain and end."""

    signal: str


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary"):
    """The tokens' bytes for structured output, as in the file Endpoints.vocabulary. Answered by VocabularyKept."""

    data: bytes


class VocabularyKept(msgspec.Struct, frozen=True, tag="vocabulary_kept"):
    """The node's executors can read it."""


class Farewell(msgspec.Struct, frozen=True, tag="farewell"):
    """The server ends. code: exit code of node 0."""

    code: int
    why: str
    ranks_told: bool  # the planner has told the ranks to stop; otherwise they must be killed


class Lifeline(msgspec.Struct, frozen=True, tag="lifeline"):
    """First and only message of an executor's own connection, whose end tells it that node 0 is gone."""

    rank: int


FromNode = Hello | Lifeline | Alive | Trouble | StopWish | VocabularyKept
ToNode = Welcome | Refusal | Alive | Vocabulary | Farewell
