"""What the scheduler keeps to, and what the log says of a step."""
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes the scheduler keeps to, all fixed at start-up."""

    max_running_requests: int
    max_request_tokens: int
    chunk_tokens: int  # most prompt tokens in one step
    max_unretired_steps: int  # 2 with overlap, 1 without
    max_queued_requests: int | None = None
    policy: str = "fcfs"
    conservativeness: float = 1.0
    reuse_prefixes: bool = True
    max_drafts: int = 0  # that one request verifies in a step; 0: no speculation
    max_verify_rows: int | None = None  # of all requests that decode in a step: with many, windows get shorter; None: no limit
    keeps_history: bool = False  # the executors need all tokens of every request


@dataclass
class StepSummary:
    """What the log says of the last planned step."""

    num_starts: int = 0
    num_extend_tokens: int = 0
    num_cached_tokens: int = 0
    num_continues: int = 0
    started_rids: tuple[str, ...] = ()
