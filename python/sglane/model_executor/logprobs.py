"""Log probabilities of tokens, from the raw logits: no temperature, no penalties, no bias."""
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sglane.plan.io_struct import SamplingParams
from sglane.plan.step_plan import LogprobBlock

#: Rows of logits that exist at once for prompt log probabilities.
TILE_ROWS = 256


class Head(Protocol):
    """A model's output head."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [m, hidden] -> float32 [m, V]."""
        ...


@dataclass(frozen=True)
class Scored:
    """Arrays of LogprobBlock for n tokens."""

    logprobs: np.ndarray  # float32 [n]
    top_ids: np.ndarray  # int32 [n, k]
    top_logprobs: np.ndarray  # float32 [n, k]
    asked: np.ndarray  # float32 [n, m]


@dataclass(frozen=True)
class ScoredPrompt:
    """Prompt tokens of one slot that are scored in this step."""

    slot: int
    rows: np.ndarray  # int64 [n]: tokens of the step, in global order, in front of the scored ones
    positions: np.ndarray  # int64 [n] of the scored tokens
    tokens: np.ndarray  # int32 [n]

    def only(self, chosen: np.ndarray) -> "ScoredPrompt":
        """chosen bool [n]: these tokens alone."""
        return ScoredPrompt(self.slot, self.rows[chosen], self.positions[chosen], self.tokens[chosen])


def score(logits: Tensor, token_ids: np.ndarray, params: SamplingParams) -> Scored:
    """logits float32 [n, V], token_ids [n]: each row's token."""
    lse = logits.logsumexp(-1, keepdim=True)  # [n, 1]
    targets = torch.from_numpy(token_ids.astype(np.int64)).to(logits.device).unsqueeze(1)
    chosen = logits.gather(1, targets) - lse
    top, ids = logits.topk(min(params.num_top_logprobs, logits.shape[1]), dim=-1)
    asked_ids = torch.tensor(params.logprob_token_ids, dtype=torch.int64, device=logits.device)  # [m]
    outside = (asked_ids < 0) | (asked_ids >= logits.shape[1])  # no such token: it cannot occur
    asked = (logits[:, asked_ids.masked_fill(outside, 0)] - lse).masked_fill(outside, float("-inf"))
    return Scored(chosen.squeeze(1).cpu().numpy(), ids.to(torch.int32).cpu().numpy(), (top - lse).cpu().numpy(), asked.cpu().numpy())


def block(slot: int, positions: np.ndarray, token_ids: np.ndarray, parts: list[Scored]) -> LogprobBlock:
    """Join the parts of one slot, in order of position."""
    top_ids = np.concatenate([part.top_ids for part in parts])
    return LogprobBlock(
        slot, positions.astype(np.int32).tobytes(), token_ids.astype(np.int32).tobytes(),
        np.concatenate([part.logprobs for part in parts]).tobytes(), top_ids.shape[1], top_ids.tobytes(),
        np.concatenate([part.top_logprobs for part in parts]).tobytes(), np.concatenate([part.asked for part in parts]).tobytes())


def score_prompt(head: Head, hidden: Tensor, prompt: ScoredPrompt, params: SamplingParams) -> LogprobBlock:
    """hidden [n, hidden]: the prompt's `rows`; logits exist in tiles only."""
    parts = [score(head.logits(hidden[begin:begin + TILE_ROWS]), prompt.tokens[begin:begin + TILE_ROWS], params)
             for begin in range(0, len(prompt.tokens), TILE_ROWS)]
    return block(prompt.slot, prompt.positions, prompt.tokens, parts)
