"""One request as the planner sees it: a phase table and the verbs that fire it. Nobody else assigns to its fields.

Two counts run side by side, because a step is issued before the result of the one before is known:
    issued  what the plans sent so far will have written or sampled; of rows the most that it can be: how many of a window's are accepted is not known
    done    what retired steps have written or sampled
A request that leaves (finish, abort, retraction) keeps its residence until its last issued step has retired.
"""
import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglane.managers.speculation import SpecTally
from sglane.mem_cache.kv_ledger import Holding
from sglane.mem_cache.radix_key import TOKEN_KEYS, KeyKind, RadixKey
from sglane.plan.io_struct import FinishReason, GenerateRequest, LogprobChunk, RequestOutput, SamplingParams
from sglane.plan.step_plan import LogprobBlock


class Phase(enum.Enum):
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


#: (phase, verb) -> next phase. A pair that is not listed is a bug and raises.
TRANSITIONS = {
    (Phase.WAITING, "admit"): Phase.PREFILL,
    (Phase.PREFILL, "prompt_issued"): Phase.DECODE,
    (Phase.PREFILL, "retract"): Phase.WAITING,
    (Phase.DECODE, "retract"): Phase.WAITING,
    (Phase.WAITING, "finish"): Phase.FINISHED,
    (Phase.PREFILL, "finish"): Phase.FINISHED,
    (Phase.DECODE, "finish"): Phase.FINISHED,
}


class IllegalTransition(AssertionError):
    """A verb was fired in a phase that does not know it."""


@dataclass(slots=True)
class Residence:
    """What a request has while it holds a slot. Written by `Request` only."""

    slot: int
    holding: Holding
    order: int  # admission number; the largest is the youngest
    num_to_prefill: int  # known tokens at admission, all of them fed by extends
    num_rows_issued: int
    num_rows_done: int
    num_samples_in_flight: int = 0
    last_step: int = 0


class Request:
    """Prompt, output so far, phase, and (while admitted) its residence."""

    def __init__(self, message: GenerateRequest, arrival: int, max_request_tokens: int, key_kind: KeyKind = TOKEN_KEYS, max_drafts: int = 0):
        """max_drafts: of the server, for one step; 0: it does not speculate."""
        prompt = np.frombuffer(message.input_ids, dtype=np.int32)
        self.rid = message.rid
        self.namespace = message.namespace
        self.session = message.session
        self.priority = message.priority
        self.arrival = arrival
        self.sampling: SamplingParams = message.sampling
        self.num_prompt_tokens = len(prompt)
        self.num_output_limit = min(message.sampling.max_new_tokens, max_request_tokens - len(prompt))
        self.phase = Phase.WAITING
        self.residence: Residence | None = None
        self.finish: FinishReason | None = None
        self.num_retractions = 0
        self.cached: tuple[int, int, int] | None = None  # (tokens, device, host) at the first admission
        self.tally = SpecTally(max_drafts) if max_drafts else None
        self._key_kind = key_kind
        self._num_kept_outputs: int | None = None  # a stop string's cut
        self._tokens = np.empty(len(prompt) + min(self.num_output_limit, 256), dtype=np.int32)
        self._tokens[: len(prompt)] = prompt
        self._num_known = len(prompt)
        self._stop_ids = frozenset(message.sampling.stop_token_ids)
        self._logprob_start = message.logprob_start
        self._prompt_blocks: list[LogprobBlock] = []

    # --- what is known ---------------------------------------------------------------------------------------------

    @property
    def num_known_tokens(self) -> int:
        return self._num_known

    @property
    def num_output_tokens(self) -> int:
        return self._num_known - self.num_prompt_tokens

    def tokens(self, start: int = 0, end: int | None = None) -> npt.NDArray[np.int32]:
        """Known token ids [start, end) as int32; a view."""
        return self._tokens[start : self._num_known if end is None else min(end, self._num_known)]

    def key(self) -> RadixKey:
        """Radix key of all known tokens."""
        return self._key_kind.make(self.tokens())

    def publishable_key(self) -> RadixKey:
        """Key of the rows that are done and whose tokens are all known, up to a stop string's cut."""
        return self._key_kind.make(self.tokens(0, self._cut(self.admitted().num_rows_done + self._key_kind.num_ahead)))

    def num_rows_to_publish(self) -> int:
        """Rows that will be in the tree when a leaving request has left; every step counts that was issued."""
        num_ahead = self._key_kind.num_ahead
        return max(self._cut(min(self.admitted().num_rows_issued + num_ahead, self._num_known)) - num_ahead, 0)

    def _cut(self, num_tokens: int) -> int:
        if self._num_kept_outputs is None:
            return num_tokens
        return min(num_tokens, self.num_prompt_tokens + self._num_kept_outputs)

    def admitted(self) -> Residence:
        assert self.residence is not None, f"request {self.rid} ({self.phase.value}) holds no slot"
        return self.residence

    def max_hit_tokens(self) -> int:
        """Longest usable prefix hit: one token must be computed, and prompt log probabilities need their rows."""
        if self._logprob_start >= 0:
            return max(self._logprob_start - 1, 0)
        return self._num_known - 1

    def leaves_a_turn(self) -> bool:
        """It belongs to a session and ended normally: what it leaves in the tree is what the session's next request begins with."""
        return bool(self.session) and self.finish is not None and self.finish.kind != "abort"

    @property
    def logprob_start(self) -> int:
        """First prompt position to report in an extend; -1 once reported."""
        return self._logprob_start

    def num_rows_to_prefill(self) -> int:
        """Rows of known tokens that no issued step writes yet."""
        residence = self.admitted()
        return residence.num_to_prefill - residence.num_rows_issued

    def can_continue(self) -> bool:
        """True when one more output token may be issued."""
        in_flight = self.admitted().num_samples_in_flight
        return self.phase is Phase.DECODE and self.num_output_tokens + in_flight < self.num_output_limit

    def window(self, max_drafts: int) -> int:
        """Rows that the next continue may feed: its last token, and up to `max_drafts` drafts, if that many tokens may still come."""
        asked = self.sampling.max_drafts
        return 1 + min(max_drafts if asked < 0 else min(max_drafts, asked), self.num_tokens_to_come() - 1)

    def num_rows_ever(self) -> int:
        """Rows that the request can have: the last token is never fed."""
        return self.num_prompt_tokens + self.num_output_limit - 1

    def num_tokens_to_come(self) -> int:
        """Output tokens that may still be issued; every step under way counts one."""
        in_flight = self.residence.num_samples_in_flight if self.residence else 0
        return max(self.num_output_limit - self.num_output_tokens - in_flight, 0)

    def has_unpublished_prompt(self) -> bool:
        """Admitted, and part of its prompt is not in the tree yet."""
        return self.residence is not None and self.residence.num_rows_done < self.residence.num_to_prefill

    # --- verbs -----------------------------------------------------------------------------------------------------

    def _fire(self, verb: str) -> None:
        key = (self.phase, verb)
        if key not in TRANSITIONS:
            raise IllegalTransition(f"request {self.rid}: '{verb}' in phase {self.phase.value}")
        self.phase = TRANSITIONS[key]

    def _expect(self, phase: Phase, verb: str) -> None:
        if self.phase is not phase:
            raise IllegalTransition(f"request {self.rid}: '{verb}' in phase {self.phase.value}")

    def admit(self, slot: int, holding: Holding, order: int, num_cached_tokens: int) -> None:
        self._fire("admit")
        self.residence = Residence(slot, holding, order, self._num_known, num_cached_tokens, num_cached_tokens)
        if self.cached is None:
            self.cached = (num_cached_tokens, holding.num_cached_device, holding.num_cached_host)

    def issue_extend(self, step: int, num_rows: int) -> bool:
        """A chunk goes out with `step`. True: it is the last one and samples a token."""
        self._expect(Phase.PREFILL, "issue_extend")
        residence = self.admitted()
        residence.num_rows_issued += num_rows
        residence.last_step = step
        is_last = residence.num_rows_issued == residence.num_to_prefill
        if is_last:
            residence.num_samples_in_flight += 1
            self._fire("prompt_issued")
        return is_last

    def issue_continue(self, step: int, window: int) -> None:
        """Up to `window` rows go out with `step`."""
        self._expect(Phase.DECODE, "issue_continue")
        residence = self.admitted()
        residence.num_rows_issued += window
        residence.num_samples_in_flight += 1
        residence.last_step = step

    def retire_rows(self, num_rows: int) -> None:
        self.admitted().num_rows_done += num_rows

    def retire_window(self, window: int, num_rows: int, num_drafts: int) -> bool:
        """A continue that might feed `window` rows has `num_rows` valid ones; `num_drafts` were verified. 0 rows: it was stalled, nothing was
        sampled, and it can be issued again. True: it brought tokens that count."""
        residence = self.admitted()
        residence.num_rows_issued -= window - num_rows
        residence.num_rows_done += num_rows
        counts = num_rows > 0 and self.finish is None
        if not num_rows:
            residence.num_samples_in_flight -= 1
        elif self.tally is not None and counts:
            self.tally.add(num_drafts, num_rows - 1)
        return counts

    def retire_tokens(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Take sampled tokens; returns those that count (none after the finish). Sets `finish` on a stop id or the limit."""
        self.admitted().num_samples_in_flight -= 1
        taken = 0
        for token in tokens.tolist():
            if self.finish is not None:
                break
            self._append(token)
            taken += 1
            if token in self._stop_ids and self.num_output_tokens > self.sampling.min_new_tokens:
                self.finish_with(FinishReason(kind="stop", matched=token))
            elif self.num_output_tokens >= self.num_output_limit:
                self.finish_with(FinishReason(kind="length"))
        return tokens[:taken]

    def _append(self, token: int) -> None:
        if self._num_known == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(len(self._tokens), dtype=np.int32)])
        self._tokens[self._num_known] = token
        self._num_known += 1

    def finish_with(self, reason: FinishReason, num_kept_outputs: int | None = None) -> None:
        """The request ends; its residence, if any, is left when its last issued step has retired."""
        self._fire("finish")
        self.finish = reason
        self._num_kept_outputs = num_kept_outputs

    def retract(self) -> None:
        """Give the slot back later and wait again; tokens that arrive in between are kept."""
        self._fire("retract")
        self.num_retractions += 1

    def leave(self) -> None:
        """The slot and pages were given back."""
        assert self.phase in (Phase.WAITING, Phase.FINISHED), f"request {self.rid} leaves in phase {self.phase.value}"
        self.residence = None

    def output(self, tokens: npt.NDArray[np.int32], logprobs: list[LogprobChunk]) -> RequestOutput:
        """What the front hears of new tokens, or of the end."""
        cached, device, host = self.cached or (0, 0, 0)
        return RequestOutput(
            self.rid, tokens.tobytes(), self.num_prompt_tokens, self.num_output_tokens, cached, device, host, self.num_retractions,
            finish=self.finish, input_logprobs=self.take_prompt_logprobs(), output_logprobs=logprobs,
            spec=None if self.tally is None else self.tally.counts(),
        )

    # --- prompt log probabilities ------------------------------------------------------------------------------------

    def sort_logprobs(self, blocks: list[LogprobBlock], of_extend: bool) -> list[LogprobBlock]:
        """Keeps what is the prompt's, if it is still wanted; returns what is the output's."""
        outputs = []
        for block in blocks:
            if not of_extend or np.frombuffer(block.positions, np.int32, 1)[0] >= self.num_prompt_tokens:
                outputs.append(block)
            elif self.finish is None and self._logprob_start >= 0:
                self._prompt_blocks.append(block)
        return outputs

    def take_prompt_logprobs(self) -> list[LogprobChunk]:
        """All prompt log probabilities in order of position, once, when the prompt is done."""
        if self._logprob_start < 0 or self.num_output_tokens == 0:
            return []
        self._logprob_start = -1
        blocks, self._prompt_blocks = self._prompt_blocks, []
        return merge_blocks(blocks)


def merge_blocks(blocks: list[LogprobBlock]) -> list[LogprobChunk]:
    """Blocks of several chunks and ranks -> one chunk in order of position. A position computed twice counts once."""
    blocks = [block for block in blocks if block.positions]
    if not blocks:
        return []
    positions = np.concatenate([np.frombuffer(block.positions, np.int32) for block in blocks])
    unique, order = np.unique(positions, return_index=True)
    assert len(unique) == unique[-1] - unique[0] + 1, f"prompt log probabilities have gaps: {unique.tolist()}"

    def gather(parts: list[bytes], dtype: type) -> bytes:
        rows: list[npt.NDArray[Any]] = [
            np.frombuffer(part, dtype).reshape(len(block.positions) // 4, -1) for part, block in zip(parts, blocks)
        ]  # [n, k] each
        return np.ascontiguousarray(np.concatenate(rows)[order]).tobytes()

    return [
        LogprobChunk(
            first_position=int(unique[0]),
            token_ids=gather([block.token_ids for block in blocks], np.int32),
            logprobs=gather([block.logprobs for block in blocks], np.float32),
            num_top=blocks[0].num_top,
            top_ids=gather([block.top_ids for block in blocks], np.int32),
            top_logprobs=gather([block.top_logprobs for block in blocks], np.float32),
            asked_logprobs=gather([block.asked_logprobs for block in blocks], np.float32),
        )
    ]
