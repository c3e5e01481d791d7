"""Grammars by llguidance (optional: the extra `llguidance`). Structural tags are not supported; the front refuses them."""
import json
import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper, grammar_from
from torch import Tensor

from sglane.model_executor.grammar import MAX_WHITESPACE, SPACE_AT_THOUGHTS, Vocabulary
from sglane.plan.io_struct import Grammar

#: Compiled grammars that are kept for the next request with the same text.
MAX_CACHED = 256
#: The library's name for each of our kinds.
FORMATS = {"json_schema": "json_schema", "regex": "regex", "ebnf": "ebnf"}
#: A rule for text up to the end of the thoughts, and the answer as a grammar of its own; by Grammar.thoughts.
STARTS = {"": "start: @answer", "inside": "start: thoughts SPACE @answer", "maybe": 'start: (SPACE "<think>" thoughts SPACE)? @answer'}
#: no_forcing: where only one text can follow, any way to spell it by tokens is allowed, not just the longest tokens.
OPTIONS = '%llguidance {"no_forcing": true}\n'
AFTER_THOUGHTS = f"\nthoughts[lazy]: /(.|\\n)*<\\/think>/\nSPACE: /{SPACE_AT_THOUGHTS}/"


class Tokens:
    """The vocabulary as the library wants it."""

    bos_token_id = None
    special_token_ids: list[int] = []

    def __init__(self, vocabulary: Vocabulary):
        self.eos_token_id = vocabulary.end_token_ids[0]
        pieces = vocabulary.pieces[:vocabulary.size]
        self.tokens = [*pieces, *[b""] * (vocabulary.size - len(pieces))]

        self._known = {piece: token for token, piece in enumerate(pieces) if piece}
        self._longest = max(map(len, self._known))

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of forced text: the longest one that fits, again and again; none for the rest where nothing fits."""
        tokens: list[int] = []
        place = 0
        while place < len(text):
            length = next((size for size in range(min(self._longest, len(text) - place), 0, -1) if text[place : place + size] in self._known), 0)
            if not length:
                break
            tokens.append(self._known[text[place : place + length]])
            place += length
        return tokens


class LLGuidance:
    """Compiler and cache for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary):
        self._ends = frozenset(vocabulary.end_token_ids)
        self._tokenizer = LLTokenizer(TokenizerWrapper(Tokens(vocabulary)), n_vocab=vocabulary.size, eos_token=vocabulary.end_token_ids)
        self._cache: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()  # one thread prepares, another one asks for matchers

    def prepare(self, grammar: Grammar) -> int:
        self._compiled(grammar)
        return 0

    def matcher(self, grammar: Grammar) -> "LLMatch":
        return LLMatch(self._compiled(grammar).deep_copy(), self._ends)

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
                return self._cache[grammar]
        matcher = LLMatcher(self._tokenizer, with_thoughts(grammar.thoughts, text_of(grammar)), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().partition("\n<state>")[0])
        matcher.compute_bitmask()  # some errors show when it begins; what is learned here serves all copies
        if matcher.is_error():
            raise ValueError(f"no answer can match it: {matcher.get_error().partition(chr(10))[0]}")
        with self._lock:
            self._cache[grammar] = matcher
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return matcher


class LLMatch:
    def __init__(self, matcher: LLMatcher, ends: frozenset[int]):
        self._matcher = matcher
        self._ends = ends
        self._has_ended = False

    def accept(self, token: int) -> bool:
        if token in self._ends:
            self._has_ended = self._matcher.is_accepting()
            return self._has_ended
        return bool(self._matcher.consume_token(token))

    def has_ended(self) -> bool:
        return self._has_ended

    def fill(self, bitmask: Tensor) -> bool:
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():  # the library gave up on it: nothing can follow
            bitmask.zero_()
        else:
            bitmask[0] = torch.from_numpy(allowed[: bitmask.shape[1]].copy())  # the library has a word more when V is a multiple of 32
        return True


def text_of(grammar: Grammar) -> str:
    """The grammar in the library's own form. Raises ValueError."""
    if grammar.kind not in FORMATS:
        raise ValueError(f"llguidance knows no {grammar.kind}")
    if grammar.kind != "json_schema":
        return str(grammar_from(FORMATS[grammar.kind], grammar.text))
    schema = json.loads(grammar.text)
    space = {"whitespace_pattern": f"[ \\t\\r\\n]{{0,{MAX_WHITESPACE}}}"}
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return str(LLMatcher.grammar_from_json_schema(closed(schema) if grammar.strict else schema, overrides=space))


def with_thoughts(thoughts: str, text: str) -> str:
    """The grammar with what may stand before the answer."""
    parts = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    start = {"name": "whole", "lark_grammar": OPTIONS + STARTS[thoughts] + (AFTER_THOUGHTS if thoughts else "")}
    return json.dumps({"grammars": [start, {**parts[0], "name": "answer"}, *parts[1:]]})


def closed(schema: Any) -> Any:
    """Objects have no properties but those that the schema names, unless it says otherwise. Objects made of several schemas stay as they are."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: value if key in ("enum", "const", "default", "examples") else by_name(value) if key in ("properties", "$defs", "definitions")
             else closed(value) for key, value in schema.items()}
    is_open = "properties" in schema and not {"additionalProperties", "unevaluatedProperties", "anyOf", "oneOf", "allOf", "$ref"} & schema.keys()
    return {**plain, "additionalProperties": False} if is_open else plain


def by_name(schemas: Any) -> Any:
    return {name: closed(schema) for name, schema in schemas.items()} if isinstance(schemas, dict) else schemas
