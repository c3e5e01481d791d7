"""Grammars by xgrammar."""
import json

import xgrammar
from torch import Tensor

from sglane.model_executor.grammar import MAX_WHITESPACE, SPACE_AT_THOUGHTS, Vocabulary
from sglane.plan.io_struct import Grammar

#: Compiled grammars that are kept for the next request with the same text.
CACHE_BYTES = 256 << 20


class XGrammars:
    """Compiler and cache for one vocabulary."""

    def __init__(self, vocabulary: Vocabulary):
        info = xgrammar.TokenizerInfo(vocabulary.pieces[:vocabulary.size], xgrammar.VocabType.RAW, vocab_size=vocabulary.size,
                                      stop_token_ids=vocabulary.end_token_ids)
        # One thread: the others compute, or belong to other ranks.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)

    def prepare(self, grammar: Grammar) -> int:
        return int(self._compile(grammar).memory_size_bytes)

    def matcher(self, grammar: Grammar) -> "XMatcher":
        return XMatcher(xgrammar.GrammarMatcher(self._compile(grammar)))

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
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
    shape: dict[str, object] = {"type": "sequence", "elements": [tag, space]}
    if thoughts == "maybe":  # without thoughts there is no space either: it would be part of the answer
        shape = {"type": "optional", "content": {"type": "sequence", "elements": [space, tag, space]}}
    return xgrammar.Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": shape}))


class XMatcher:
    def __init__(self, matcher: xgrammar.GrammarMatcher):
        self._matcher = matcher

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def has_ended(self) -> bool:
        return bool(self._matcher.is_terminated())

    def fill(self, bitmask: Tensor) -> bool:
        return bool(self._matcher.fill_next_token_bitmask(bitmask))
