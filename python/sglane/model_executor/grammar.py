"""Grammars by xgrammar: compiled from text for one vocabulary, matched token by token, applied to logits."""
import json
import logging
import threading
from pathlib import Path

import msgspec
import numpy as np
import torch
import xgrammar
from torch import Tensor

from sglane.plan.io_struct import Grammar

logger = logging.getLogger(__name__)

#: Whitespace characters in a row that JSON may have between its parts: a model that likes blank lines still comes to an end.
MAX_WHITESPACE = 8
#: White space that may stand on either side of the thoughts.
SPACE_AT_THOUGHTS = "[ \\n]{0,4}"
#: Compiled grammars that are kept for the next request with the same text.
CACHE_BYTES = 256 << 20
#: What the library raises for text that it can't compile.
GRAMMAR_ERRORS = (RuntimeError, ValueError)


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The model's tokens as text bytes."""

    pieces: list[bytes]  # by token id; empty: no text (special tokens, holes), never allowed inside an answer
    end_token_ids: list[int]
    size: int  # of the logits; may be larger than the number of pieces


class XGrammars:
    """Compiler and cache for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary):
        self._end_ids = torch.tensor(vocabulary.end_token_ids, dtype=torch.int64)
        info = xgrammar.TokenizerInfo(vocabulary.pieces[:vocabulary.size], xgrammar.VocabType.RAW, vocab_size=vocabulary.size,
                                      stop_token_ids=vocabulary.end_token_ids)
        # One thread: the others compute, or belong to other ranks.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocabulary.size)  # int32 [1, ceil(V / 32)]

    def mask(self, grammar: Grammar) -> "GrammarMask":
        """A grammar that does not compile ends the answer at once: the front refuses those, so this is not expected."""
        try:
            return GrammarMask(xgrammar.GrammarMatcher(self.compile(grammar)), self._bitmask, self._end_ids)
        except GRAMMAR_ERRORS as error:
            logger.error("a %s that was accepted does not compile: %s", grammar.kind, error)
            return GrammarMask(None, self._bitmask, self._end_ids)

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Raises one of GRAMMAR_ERRORS for text that can't be compiled."""
        if grammar.thoughts:
            return self._compiler.compile_grammar(xgrammar.Grammar.concat(thoughts_of(grammar.thoughts), parsed(grammar)))
        if grammar.kind == "json_schema":
            return self._compiler.compile_json_schema(grammar.text, strict_mode=grammar.strict, max_whitespace_cnt=MAX_WHITESPACE)
        if grammar.kind == "regex":
            return self._compiler.compile_regex(grammar.text)
        if grammar.kind == "ebnf":
            return self._compiler.compile_grammar(grammar.text)
        if grammar.kind == "structural_tag":
            return self._compiler.compile_structural_tag(grammar.text)
        raise ValueError(f"no such kind of grammar: {grammar.kind}")


def parsed(grammar: Grammar) -> xgrammar.Grammar:
    """The answer, as part of a larger grammar. Raises one of GRAMMAR_ERRORS."""
    if grammar.kind == "json_schema":
        return xgrammar.Grammar.from_json_schema(grammar.text, strict_mode=grammar.strict, max_whitespace_cnt=MAX_WHITESPACE)
    makers = {"regex": xgrammar.Grammar.from_regex, "ebnf": xgrammar.Grammar.from_ebnf, "structural_tag": xgrammar.Grammar.from_structural_tag}
    if grammar.kind not in makers:
        raise ValueError(f"no such kind of grammar: {grammar.kind}")
    return makers[grammar.kind](grammar.text)


def thoughts_of(thoughts: str) -> xgrammar.Grammar:
    """What stands before the answer; see Grammar.thoughts."""
    tag = {"type": "tag", "begin": "<think>" if thoughts == "maybe" else "", "content": {"type": "any_text"}, "end": "</think>"}
    space = {"type": "regex", "pattern": SPACE_AT_THOUGHTS}
    elements = [space, {"type": "optional", "content": tag}, space] if thoughts == "maybe" else [tag, space]
    return xgrammar.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}))


class LazyGrammars:
    """Reads the vocabulary's file when the first grammar arrives: the front has written it before it takes requests."""

    def __init__(self, path: str):
        self._path = Path(path)
        self._grammars: XGrammars | None = None
        self._lock = threading.Lock()

    def mask(self, grammar: Grammar) -> "GrammarMask":
        return self._read().mask(grammar)

    def prepare(self, grammar: Grammar) -> None:
        """Compile into the cache; safe beside `mask` in another thread."""
        try:
            self._read().compile(grammar)
        except GRAMMAR_ERRORS as error:
            logger.error("a %s that was accepted does not compile: %s", grammar.kind, error)

    def _read(self) -> XGrammars:
        with self._lock:
            if self._grammars is None:
                self._grammars = XGrammars(read_vocabulary(self._path))
            return self._grammars


def read_vocabulary(path: Path) -> Vocabulary:
    return msgspec.msgpack.decode(path.read_bytes(), type=Vocabulary)


class GrammarMask:
    """One request's place in its grammar."""

    def __init__(self, matcher: xgrammar.GrammarMatcher | None, bitmask: Tensor, end_ids: Tensor):
        """matcher None: nothing but an end token is allowed. bitmask int32 [1, ceil(V / 32)]: scratch, shared."""
        self._matcher = matcher
        self._bitmask = bitmask
        self._end_ids = end_ids
        self._num_read = 0  # output tokens that the matcher has seen

    def apply(self, logits: Tensor, outputs: np.ndarray) -> None:
        """See TokenMask. The matcher catches up with `outputs` first: tokens that other ranks sampled, or all of them after a retraction."""
        self._catch_up(outputs)
        if self._matcher is None:
            self._only_end(logits)
        elif not self._matcher.is_terminated():  # past its end, a token is sampled that nobody takes
            self._mask(self._matcher, logits)

    def _catch_up(self, outputs: np.ndarray) -> None:
        for token in outputs[self._num_read:].tolist():
            if self._matcher is not None and not self._matcher.is_terminated() and not self._matcher.accept_token(token):
                logger.error("token %d does not fit its grammar; the answer ends here", token)
                self._matcher = None
        self._num_read = len(outputs)

    def _mask(self, matcher: xgrammar.GrammarMatcher, logits: Tensor) -> None:
        if not matcher.fill_next_token_bitmask(self._bitmask):
            return  # everything is allowed
        if not self._bitmask.any():
            logger.error("no token of the vocabulary continues the grammar; the answer ends here")
            self._matcher = None
            self._only_end(logits)
            return
        row = logits.unsqueeze(0)
        xgrammar.apply_token_bitmask_inplace(row, self._bitmask.to(logits.device), vocab_size=logits.shape[0])
        if bool(logits.max() == float("-inf")):  # the model itself rules out all that is allowed: all of it is alike
            row.zero_()
            xgrammar.apply_token_bitmask_inplace(row, self._bitmask.to(logits.device), vocab_size=logits.shape[0])

    def _only_end(self, logits: Tensor) -> None:
        ends = self._end_ids.to(logits.device)
        values = logits[ends].clamp_min(torch.finfo(torch.float32).min)
        logits.fill_(float("-inf"))
        logits[ends] = values
