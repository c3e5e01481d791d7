"""Grammars: compiled from text for one vocabulary by a library, matched token by token, applied to logits."""
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from sglane.plan.io_struct import Grammar

logger = logging.getLogger(__name__)

#: Whitespace characters in a row that JSON may have between its parts: a model that likes blank lines still comes to an end.
MAX_WHITESPACE = 8
#: White space that may stand on either side of the thoughts.
SPACE_AT_THOUGHTS = "[ \\n]{0,4}"
#: What the libraries raise for text that they can't compile.
GRAMMAR_ERRORS = (RuntimeError, ValueError)


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The model's tokens as text bytes."""

    pieces: list[bytes]  # by token id; empty: no text (special tokens, holes), never allowed inside an answer
    end_token_ids: list[int]
    size: int  # of the logits; may be larger than the number of pieces


class Matcher(Protocol):
    """A place in a grammar."""

    def accept(self, token: int) -> bool:
        """Go on by one token; False: it does not fit."""
        ...

    def has_ended(self) -> bool:
        """An end token was accepted."""
        ...

    def fill(self, bitmask: Tensor) -> bool:
        """Write what may come next, int32 [1, ceil(V / 32)], a bit for each token; False: everything, and nothing was written."""
        ...


class Backend(Protocol):
    """One library's compiler and cache for one vocabulary. Both raise one of GRAMMAR_ERRORS for text that can't be compiled."""

    def prepare(self, grammar: Grammar) -> int:
        """Compile into the cache; bytes that it takes there (0: the library does not say)."""
        ...

    def matcher(self, grammar: Grammar) -> Matcher:
        """At the beginning of the grammar."""
        ...


def make_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """name: of --grammar-backend."""
    if name == "xgrammar":
        from sglane.model_executor.grammar_xgrammar import XGrammars

        return XGrammars(vocabulary)
    assert name == "llguidance", f"no such grammar backend: {name}"
    from sglane.model_executor.grammar_llguidance import LLGuidance

    return LLGuidance(vocabulary)


class Grammars:
    """Makes the masks of requests."""

    def __init__(self, backend: str, vocabulary: Vocabulary):
        from xgrammar import apply_token_bitmask_inplace  # both libraries write the same bits; most of a second to import

        self._apply_bits = apply_token_bitmask_inplace
        self.backend = make_backend(backend, vocabulary)
        self._end_ids = torch.tensor(vocabulary.end_token_ids, dtype=torch.int64)
        self._bitmask = torch.zeros((1, (vocabulary.size + 31) // 32), dtype=torch.int32)

    def mask(self, grammar: Grammar) -> "GrammarMask":
        """A grammar that does not compile ends the answer at once: the front refuses those, so this is not expected."""
        try:
            return GrammarMask(self.backend.matcher(grammar), self._bitmask, self._end_ids, self._apply_bits)
        except GRAMMAR_ERRORS as error:
            logger.error("a %s that was accepted does not compile: %s", grammar.kind, error)
            return GrammarMask(None, self._bitmask, self._end_ids, self._apply_bits)


class LazyGrammars:
    """Reads the vocabulary's file when the first grammar arrives: the front has written it before it takes requests."""

    def __init__(self, backend: str, path: str):
        self._backend = backend
        self._path = Path(path)
        self._grammars: Grammars | None = None
        self._lock = threading.Lock()

    def mask(self, grammar: Grammar) -> "GrammarMask":
        return self._read().mask(grammar)

    def prepare(self, grammar: Grammar) -> None:
        """Compile into the cache; safe beside `mask` in another thread."""
        try:
            self._read().backend.prepare(grammar)
        except GRAMMAR_ERRORS as error:
            logger.error("a %s that was accepted does not compile: %s", grammar.kind, error)

    def _read(self) -> Grammars:
        with self._lock:
            if self._grammars is None:
                self._grammars = Grammars(self._backend, read_vocabulary(self._path))
            return self._grammars


def read_vocabulary(path: Path) -> Vocabulary:
    return msgspec.msgpack.decode(path.read_bytes(), type=Vocabulary)


class GrammarMask:
    """One request's place in its grammar."""

    def __init__(self, matcher: Matcher | None, bitmask: Tensor, end_ids: Tensor, apply_bits: Callable[..., None]):
        """matcher None: nothing but an end token is allowed. bitmask int32 [1, ceil(V / 32)]: scratch, shared.

        apply_bits(logits, bitmask, vocab_size=): rules out what has no bit, in place.
        """
        self._apply_bits = apply_bits
        self._matcher = matcher
        self._bitmask = bitmask
        self._end_ids = end_ids
        self._num_read = 0  # output tokens that the matcher has seen

    def apply(self, logits: Tensor, outputs: np.ndarray) -> None:
        """See TokenMask. The matcher catches up with `outputs` first: tokens that other ranks sampled, or all of them after a retraction."""
        self._catch_up(outputs)
        if self._matcher is None:
            self._only_end(logits)
        elif not self._matcher.has_ended():  # past its end, a token is sampled that nobody takes
            self._mask(self._matcher, logits)

    def _catch_up(self, outputs: np.ndarray) -> None:
        for token in outputs[self._num_read:].tolist():
            if self._matcher is not None and not self._matcher.has_ended() and not self._matcher.accept(token):
                logger.error("token %d does not fit its grammar; the answer ends here", token)
                self._matcher = None
        self._num_read = len(outputs)

    def _mask(self, matcher: Matcher, logits: Tensor) -> None:
        if not matcher.fill(self._bitmask):
            return  # everything is allowed
        if not self._bitmask.any():
            logger.error("no token of the vocabulary continues the grammar; the answer ends here")
            self._matcher = None
            self._only_end(logits)
            return
        row, bitmask = logits.unsqueeze(0), self._bitmask.to(logits.device)
        self._apply_bits(row, bitmask, vocab_size=logits.shape[0])
        if bool(logits.max() == float("-inf")):  # the model itself rules out all that is allowed: all of it is alike
            row.zero_()
            self._apply_bits(row, bitmask, vocab_size=logits.shape[0])

    def _only_end(self, logits: Tensor) -> None:
        ends = self._end_ids.to(logits.device)
        values = logits[ends].clamp_min(torch.finfo(torch.float32).min)
        logits.fill_(float("-inf"))
        logits[ends] = values
