"""Messages between the planner and the executors: plans out, one result per rank back.

Arrays travel as raw little-endian bytes (`np.ndarray.tobytes`); the element type is in each field's comment. A plan is a
delta: the executors keep the slot table, so a decode step carries little more than slot ids and new pages.

An executor carries out a `StepPlan` in this order:
    releases > row updates > poison (debug) > starts > tail copies > loads and backups of earlier rows begin > drafting > extends and continues
    (one forward; the backup of a layer's new rows begins when the layer has been computed) > sampling and acceptance > draft extend (the draft
    layer's rows of the same tokens) > step exchange
and answers with exactly one `StepResult`. Loads and backups are tickets: they end when they end, and each lane that has pages of one says so
with a `TicketEnded`. Plans are numbered consecutively from 1; a gap is fatal.
"""
import msgspec

from sglane.plan.io_struct import PrepareGrammar, SamplingParams, SetLogLevel, StartProfile, StopProfile


class RowUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Rewrite part of a slot's page table row (publishing found canonical pages)."""

    slot: int
    first_page: int  # index inside the row, in pages
    pages: bytes  # int32 [num_pages]


class SlotStart(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a slot. `pages` are the row's first pages: prefix hit, then (with a tail copy) the private page."""

    slot: int
    pages: bytes  # int32 [num_pages]
    num_cached_tokens: int  # valid KV rows that already exist (after the tail copy); the first extend starts here
    num_prompt_tokens: int  # tokens before this position are prompt, the rest is output (also after a retraction)
    sampling: SamplingParams
    #: int32 [num_cached_tokens], only where the executors need all tokens (penalties, grammars, prompt lookup): those whose rows are not recomputed
    history: bytes = b""


class TailCopy(msgspec.Struct, frozen=True, array_like=True):
    """Copy the first `num_tokens` rows of every plane and layer from one page to another page of the same lane."""

    src_page: int
    dst_page: int
    num_tokens: int
    from_host: bool = False  # src_page is a host page: the rows come from its record


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Load-back: whole records of the host pool to pages of the same lanes, all planes, layer by layer. Loads are carried out in plan order."""

    ticket: int
    host_pages: bytes  # int32 [n]
    device_pages: bytes  # int32 [n]


class Backup(msgspec.Struct, frozen=True, array_like=True):
    """Whole pages to records of the host pool in the same lanes, all planes."""

    ticket: int
    device_pages: bytes  # int32 [n]
    host_pages: bytes  # int32 [n]
    is_written: bool  # True: their rows are of earlier steps, all layers are due at once; False: a layer is due when this step has computed it


class Extend(msgspec.Struct, frozen=True, array_like=True):
    """Feed known tokens of one slot at positions [start, start + n)."""

    slot: int
    start: int  # position of the first token = rows already valid in this slot
    tokens: bytes  # int32 [n]
    lookahead: int  # the token after the last one, -1 if it is to be sampled in this step
    pages: bytes  # int32, new pages appended to the slot's row before the forward
    sample: bool  # True for the final chunk: sample the token at position start + n
    logprob_start: int = -1  # report log probabilities of prompt tokens at positions >= this one; -1: none


class Continues(msgspec.Struct, frozen=True, array_like=True):
    """Decode rows: each slot feeds its own last token, which only the executors may know yet."""

    slots: bytes = b""  # int32 [n]
    windows: bytes = b""  # int32 [n], rows to feed at most (1 without speculation)
    num_new_pages: bytes = b""  # int32 [n]
    new_pages: bytes = b""  # int32 [sum(num_new_pages)], in slot order, appended to the rows before the forward


class StepPlan(msgspec.Struct, frozen=True, tag="plan"):
    """One step for every rank."""

    step: int
    releases: bytes = b""  # int32 [n] slots that are free again
    row_updates: list[RowUpdate] = []
    poison: bytes = b""  # int32 [n] pages that became reusable; filled only in poison mode
    poison_host: bytes = b""  # int32 [n] the same of host pages
    starts: list[SlotStart] = []
    tail_copies: list[TailCopy] = []
    loads: list[Load] = []
    backups: list[Backup] = []
    needs_load: int = 0  # ticket: extends read a layer only when this load and those before it have brought it; 0: nothing to wait for
    extends: list[Extend] = []
    continues: Continues = Continues()


class LogprobBlock(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of `n` tokens of one slot, taken from the unscaled logits."""

    slot: int
    positions: bytes  # int32 [n] position of the token that is scored
    token_ids: bytes  # int32 [n]
    logprobs: bytes  # float32 [n]
    num_top: int = 0  # k
    top_ids: bytes = b""  # int32 [n, k]
    top_logprobs: bytes = b""  # float32 [n, k], descending
    asked_logprobs: bytes = b""  # float32 [n, len(SamplingParams.logprob_token_ids)]


class StepResult(msgspec.Struct, frozen=True, tag="result"):
    """What one rank knows after a step. Each sampled slot appears in the result of exactly one rank (the token's owner)."""

    step: int
    rank: int
    slots: bytes = b""  # int32 [n] slots whose token(s) this rank sampled
    num_tokens: bytes = b""  # int32 [n] tokens accepted per slot; 0 = stalled
    tokens: bytes = b""  # int32 [sum(num_tokens)]
    logprobs: list[LogprobBlock] = []
    prefix_wait_s: float = 0.0  # time since the start that this rank's attention waited for prefix pages
    num_drafts: bytes = b""  # int32 [n] drafts that were verified per slot; empty: none anywhere


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Sign of life of a rank inside a long step, at most one a second."""

    rank: int
    step: int
    layer: int


class TicketEnded(msgspec.Struct, frozen=True, tag="ticket_ended"):
    """A rank has carried out its part of a load or backup."""

    rank: int
    ticket: int
    is_load: bool
    num_bytes: int  # copied by this rank
    duration_s: float  # from its begin to its end on this rank


class FallbackCounts(msgspec.Struct, frozen=True, tag="fallback_counts"):
    """Declared slower paths that a rank has taken since its start, by name; sent when a number has changed."""

    rank: int
    counts: dict[str, int]


class PlaneSpec(msgspec.Struct, frozen=True, array_like=True):
    """One kind of bytes of a page: `layers` layers of `width` elements a token."""

    name: str  # target.kv, target.index, draft.kv, draft.index
    num_layers: int
    width: int  # elements per token and layer
    num_bytes_per_element: int


class ExecutorReady(msgspec.Struct, frozen=True, tag="ready"):
    """A rank has loaded its weights and knows how many pages fit into its memory budget."""

    rank: int
    planes: list[PlaneSpec]
    num_bytes_per_page: int
    max_rows: int  # pages this rank can hold, the sink row included
    weight_bytes: int
    context_length: int  # tokens, after --context-length and the model's own limit
    vocab_size: int
    device_name: str
    address: str = ""  # where the rank takes plans
    max_host_rows: int = 0  # host records that this rank can hold, the sink row included; 0: no host tier


class PoolInit(msgspec.Struct, frozen=True, tag="pool_init"):
    """The planner's answer: the pool size that is the same on every rank."""

    num_rows: int  # per lane, sink row 0 included
    num_slots: int
    max_pages_per_slot: int
    num_host_rows: int = 0  # per lane, sink row 0 included; 0: no host tier


class PoolReady(msgspec.Struct, frozen=True, tag="pool_ready"):
    rank: int


class ExecutorError(msgspec.Struct, frozen=True, tag="error"):
    """A rank cannot go on; the server ends with this message."""

    rank: int
    message: str


class GrammarReady(msgspec.Struct, frozen=True, tag="grammar_ready"):
    """A rank has compiled the grammar of a PrepareGrammar."""

    rank: int
    request_id: int


class ProfileDone(msgspec.Struct, frozen=True, tag="profile_done"):
    """A rank has carried out a StartProfile or StopProfile; error: why not, empty if it has."""

    rank: int
    request_id: int
    error: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Executors end after the plans issued before this."""


ToExecutor = PoolInit | StepPlan | PrepareGrammar | StartProfile | StopProfile | SetLogLevel | Stop
FromExecutor = ExecutorReady | PoolReady | StepResult | Progress | TicketEnded | FallbackCounts | GrammarReady | ProfileDone | ExecutorError
