"""From logits to tokens. Noise is a function of (seed, position, purpose), so batch mates and slots never matter."""
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sglane.model_executor.slot_table import Slot, TokenHistory
from sglane.plan.io_struct import SamplingParams

#: Purposes of noise: one independent stream each.
PURPOSE_SAMPLE = 0
#: Candidates tried before a row's whole vocabulary is sorted for top-p / top-k.
NUM_CANDIDATES = 256

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SampleRow:
    """One token to sample: `slot` gets the token of `position`."""

    slot: int
    position: int
    data: Slot
    pending: Sequence[int] = ()  # tokens of this step in front of it, which the slot does not have yet

    @property
    def num_outputs(self) -> int:
        """Output tokens of the request before this one."""
        return self.position - self.data.num_prompt_tokens

    def history(self, history: TokenHistory) -> np.ndarray:
        """int32 [position]: all tokens before this one."""
        tokens = history.tokens()
        tokens = np.concatenate((tokens, np.array(self.pending, np.int32))) if len(self.pending) else tokens
        assert len(tokens) == self.position, f"slot {self.slot}: {len(tokens)} tokens of history at position {self.position}"
        return tokens


def uniform(seed: int, position: int, purpose: int) -> float:
    """A number in (0, 1), 52 bits, from two rounds of splitmix64."""
    state = _mix((seed & _MASK) ^ _mix((position << 8 | purpose) & _MASK))
    return ((state >> 12) + 0.5) * 2.0 ** -52


def _mix(x: int) -> int:
    """splitmix64: increment and finalise, on 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def sample(logits: Tensor, rows: list[SampleRow]) -> np.ndarray:
    """logits float32 [m, V], not changed; returns int64 [m], one token for each of the m `rows`."""
    adjusted = [i for i, row in enumerate(rows) if _is_adjusted(row)]
    if adjusted:
        logits = logits.clone()
        for i in adjusted:
            _adjust(logits[i], rows[i])
    tokens = logits.argmax(-1)
    random = [i for i, row in enumerate(rows) if not _is_greedy(row.data.sampling)]
    if random:
        index = torch.tensor(random, device=logits.device)
        tokens[index] = _sample_random(logits[index], [rows[i] for i in random])
    return tokens.cpu().numpy()


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0.0 or params.top_k == 1


def _is_adjusted(row: SampleRow) -> bool:
    params = row.data.sampling
    return params.needs_history() or bool(params.logit_bias) or row.num_outputs < params.min_new_tokens


def _adjust(logits: Tensor, row: SampleRow) -> None:
    """Penalties, bias, minimum length and grammar, in place on one row float32 [V]."""
    params, device = row.data.sampling, logits.device
    if row.data.history is not None:
        tokens = row.history(row.data.history)
        if params.repetition_penalty != 1.0:  # prompt and output
            seen = torch.from_numpy(np.unique(tokens).astype(np.int64)).to(device)
            values = logits[seen]
            logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
            ids, counts = np.unique(tokens[row.data.num_prompt_tokens:], return_counts=True)  # output only
            penalty = params.frequency_penalty * torch.from_numpy(counts).to(device, torch.float32) + params.presence_penalty
            logits[torch.from_numpy(ids.astype(np.int64)).to(device)] -= penalty
    vocab_size = len(logits)
    bias = {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab_size}
    if bias:
        logits[torch.tensor(list(bias), device=device)] += torch.tensor(list(bias.values()), device=device)
    if row.num_outputs < params.min_new_tokens:
        stops = [token for token in params.stop_token_ids if 0 <= token < vocab_size]  # others cannot be sampled
        logits[torch.tensor(stops, dtype=torch.int64, device=device)] = float("-inf")
    if row.data.mask is not None and row.data.history is not None:
        row.data.mask.apply(logits, row.history(row.data.history)[row.data.num_prompt_tokens:])


def _sample_random(logits: Tensor, rows: list[SampleRow]) -> Tensor:
    """logits float32 [r, V]; returns int64 [r]."""
    params = [row.data.sampling for row in rows]
    device, vocab_size = logits.device, logits.shape[1]
    noise = torch.tensor([uniform(p.seed, row.position, PURPOSE_SAMPLE) for p, row in zip(params, rows)], dtype=torch.float64, device=device)
    scaled = logits / torch.tensor([p.temperature for p in params], device=device).unsqueeze(1)
    filtered = [i for i, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < vocab_size]
    tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    plain = [i for i in range(len(rows)) if i not in set(filtered)]
    if plain:
        index = torch.tensor(plain, device=device)
        probs = scaled[index].softmax(-1)
        min_p = torch.tensor([params[i].min_p for i in plain], device=device).unsqueeze(1)
        if bool((min_p > 0).any()):
            probs = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0.0)
        tokens[index] = _inverse_cdf(probs, noise[index])
    if filtered:
        index = torch.tensor(filtered, device=device)
        tokens[index] = _sample_filtered(scaled[index], [params[i] for i in filtered], noise[index])
    return tokens


def _inverse_cdf(weights: Tensor, noise: Tensor) -> Tensor:
    """weights [r, V] >= 0 with a positive sum, noise float64 [r] in (0, 1); returns int64 [r], never a column of weight 0.

    A row of NaN, from a model that overflowed, gives the last column.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    found = torch.searchsorted(cdf, (noise * cdf[:, -1]).unsqueeze(1), right=True).squeeze(1)
    return found.clamp_max_(weights.shape[1] - 1)


def _sample_filtered(logits: Tensor, params: list[SamplingParams], noise: Tensor) -> Tensor:
    """Top-k, top-p and min-p over the same probabilities; all three must keep a token. logits float32 [r, V] (scaled)."""
    num_candidates = min(NUM_CANDIDATES, logits.shape[1])
    lse = logits.logsumexp(-1, keepdim=True)
    tokens, complete = _pick(*_ordered(logits, num_candidates), lse, params, noise)
    if num_candidates < logits.shape[1] and not bool(complete.all()):
        rest = (~complete).nonzero()[:, 0]
        tokens[rest] = _pick(*_ordered(logits[rest], logits.shape[1]), lse[rest], [params[i] for i in rest.tolist()], noise[rest])[0]
    return tokens


def _ordered(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row: values descending, ids int64; equal values by ascending id."""
    if count == logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids
    values, ids = logits.topk(count, dim=-1)
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, by_value)


def _pick(values: Tensor, ids: Tensor, lse: Tensor, params: list[SamplingParams], noise: Tensor) -> tuple[Tensor, Tensor]:
    """values, ids [r, k] ordered. Returns tokens int64 [r] and bool [r]: the filters ended before the last candidate's value."""
    k, device = values.shape[1], values.device
    probs = (values - lse).exp()
    top_p, min_p = (torch.tensor([getattr(p, name) for p in params], device=device).unsqueeze(1) for name in ("top_p", "min_p"))
    top_k = torch.tensor([p.top_k if p.top_k > 0 else 1 << 30 for p in params], device=device).unsqueeze(1)
    before = probs.cumsum(-1, dtype=torch.float64) - probs  # mass in front of each candidate
    kept = (before <= top_p) & (torch.arange(k, device=device) < top_k) & (probs >= min_p * probs[:, :1])
    kept[:, 0] = True
    last = values.gather(1, kept.sum(-1, keepdim=True) - 1)
    choice = _inverse_cdf(probs * kept, noise)
    return ids.gather(1, choice.unsqueeze(1)).squeeze(1), (last > values[:, -1:]).squeeze(1)
