"""Sampling parameters of the native and the OpenAI routes -> what the planner needs and what stays in the front."""
import dataclasses
import random
from dataclasses import dataclass

import msgspec

from sglane.entrypoints.errors import bad_field
from sglane.entrypoints.grammar_fields import parse_grammar
from sglane.entrypoints.validation import Fields, check_integer, shown
from sglane.plan.io_struct import Grammar, SamplingParams

GREEDY_BELOW = 1e-5  # smaller temperatures are taken as 0
MAX_TEMPERATURE = 100.0
MAX_CHOICES = 128
MAX_TOKENS = (1 << 31) - 1
MAX_BIAS = 100.0
MAX_ID_DIGITS = 10
INT64 = 1 << 63
#: Kinds of grammars that a library does not have.
UNSUPPORTED = {"llguidance": ("structural_tag",)}
#: Per-request programs.
REFUSED = ("custom_logit_processor",)


@dataclass(frozen=True)
class ModelFacts:
    """What validation must know of the model and the engine. Tokens."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    context_length: int
    max_request_tokens: int  # prompt and output together
    no_grammars: str = ""  # why there is no structured output; empty: there is
    grammar_backend: str = "xgrammar"
    markers: tuple[str, ...] = ()  # texts that the server's parsers look for; they may stand in constrained answers


@dataclass(frozen=True)
class FieldNames:
    """Where two routes spell a parameter differently."""

    max_new_tokens: tuple[str, ...]  # the first one that is set counts
    min_new_tokens: str
    seed: str
    with_response_format: bool


NATIVE = FieldNames(("max_new_tokens",), "min_new_tokens", "sampling_seed", with_response_format=False)
OPENAI = FieldNames(("max_completion_tokens", "max_tokens"), "min_tokens", "seed", with_response_format=True)


@dataclass(frozen=True)
class NeededGrammar:
    """What a route wants an answer to match. asked_by, made_of: fields, for messages. is_exclusive: no other field may ask for something else."""

    grammar: Grammar
    asked_by: str
    made_of: str
    is_exclusive: bool


@dataclass(frozen=True)
class TextParams:
    """What the front does with the tokens."""

    stops: tuple[str, ...] = ()
    stop_patterns: tuple[str, ...] = ()  # regular expressions
    keep_stop: bool = False  # the text includes what ended it
    skip_special_tokens: bool = True
    markers: tuple[str, ...] = ()  # texts that parsers look for: special tokens that are part of one are not skipped
    stream_interval: int = 1  # tokens per streamed chunk


@dataclass(frozen=True)
class Sampling:
    """One request's parameters, before the prompt's length is known."""

    params: SamplingParams  # max_new_tokens and seed are set by `for_choice`
    text: TextParams
    max_new_tokens: int | None  # None: as many as fit
    num_choices: int
    seed: int
    grammar_field: str = ""  # where params.grammar came from, for messages

    def after_thoughts(self, thoughts: str) -> "Sampling":
        """The same, but a grammar begins where thoughts end. thoughts: see Grammar."""
        grammar = self.params.grammar
        if grammar is None or not thoughts:
            return self
        params = msgspec.structs.replace(self.params, grammar=msgspec.structs.replace(grammar, thoughts=thoughts))
        return dataclasses.replace(self, params=params)

    def for_choice(self, index: int, room: int) -> SamplingParams:
        """Parameters of choice `index` when `room` more tokens fit after the prompt."""
        wanted = room if self.max_new_tokens is None else min(self.max_new_tokens, room)
        limit = max(wanted, 1)  # the engine samples at least one token; with max_new_tokens 0 the front drops it
        min_new_tokens = min(self.params.min_new_tokens, limit)
        return msgspec.structs.replace(self.params, max_new_tokens=limit, min_new_tokens=min_new_tokens, seed=(self.seed + index) % INT64)


def parse_sampling(fields: Fields, names: FieldNames, facts: ModelFacts, default_max_new_tokens: int | None, stream_interval: int,
                   needed: NeededGrammar | None = None) -> Sampling:
    """Raises a 400 for everything that is malformed, out of range or not supported."""
    fields.refuse(REFUSED)
    max_name = next((name for name in names.max_new_tokens if fields.get(name) is not None), names.max_new_tokens[-1])
    max_new_tokens = default_max_new_tokens
    if fields.get(max_name) is not None:
        max_new_tokens = fields.integer(max_name, 0, 0, MAX_TOKENS)
    min_new_tokens = fields.integer(names.min_new_tokens, 0, 0, MAX_TOKENS)
    if max_new_tokens is not None and min_new_tokens > max_new_tokens:
        raise bad_field(names.min_new_tokens, f"is {min_new_tokens}, more than {max_name} ({max_new_tokens})")
    grammar_field, grammar = read_grammar(fields, names, facts, needed)
    if grammar is not None and min_new_tokens:
        raise bad_field(names.min_new_tokens, f"and {grammar_field} exclude each other: the grammar decides where the answer ends")
    stop_token_ids = fields.token_list("stop_token_ids", facts.vocab_size)
    if not fields.flag("ignore_eos") or grammar is not None:  # the end of a grammar is always the end of the answer
        stop_token_ids += facts.eos_token_ids
    temperature = fields.number("temperature", 1.0, 0.0, MAX_TEMPERATURE)
    top_k = fields.integer("top_k", -1, -1, MAX_TOKENS)
    params = SamplingParams(
        max_new_tokens=1,
        min_new_tokens=min_new_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=fields.number("top_p", 1.0, 0.0, 1.0, above=True),
        top_k=-1 if top_k == 0 or top_k >= facts.vocab_size else top_k,
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.0, 2.0, above=True),
        stop_token_ids=list(dict.fromkeys(stop_token_ids)),
        logit_bias=parse_logit_bias(fields, facts.vocab_size),
        grammar=grammar,
        max_drafts=fields.integer("speculative_num_steps", -1, 0, MAX_TOKENS),
    )
    text = TextParams(
        stops=fields.stops("stop"),
        stop_patterns=fields.patterns("stop_regex"),
        keep_stop=fields.flag("no_stop_trim"),
        skip_special_tokens=fields.flag("skip_special_tokens", True),
        markers=facts.markers if grammar is not None else (),
        stream_interval=fields.integer("stream_interval", stream_interval, 1, MAX_TOKENS),
    )
    fields.flag("spaces_between_special_tokens", True)  # has no effect on the tokenizers that are supported
    num_choices = fields.integer("n", 1, 1, MAX_CHOICES)
    if fields.integer("best_of", num_choices, 1, MAX_CHOICES) != num_choices:
        raise bad_field("best_of", "is not supported; ask for n choices")
    seed = check_integer(names.seed, fields.get(names.seed), random.getrandbits(62), -INT64, INT64 - 1)
    return Sampling(params, text, max_new_tokens, num_choices, seed % INT64, grammar_field)


def read_grammar(fields: Fields, names: FieldNames, facts: ModelFacts, needed: NeededGrammar | None) -> tuple[str, Grammar | None]:
    """(field, what the answer must match): what the fields ask for, or what the route needs."""
    name, grammar = parse_grammar(fields, names.with_response_format)
    if needed is not None and (grammar is None or needed.is_exclusive):
        if grammar is not None:
            raise bad_field(name, f"and {needed.asked_by} exclude each other: an answer can follow one of them")
        name, grammar = needed.asked_by, needed.grammar
    if grammar is not None and facts.no_grammars:
        raise bad_field(name, facts.no_grammars)
    if grammar is not None and grammar.kind in UNSUPPORTED.get(facts.grammar_backend, ()):
        raise bad_field(name, f"needs a {grammar.kind}, which --grammar-backend {facts.grammar_backend} does not support; xgrammar does")
    return (name if needed is None or grammar is not needed.grammar else needed.made_of), grammar


def parse_logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    """{"token id": bias}: keys are integer strings inside the vocabulary."""
    biases = Fields(fields.object("logit_bias"))
    parsed: dict[int, float] = {}
    if len(fields.object("logit_bias")) > vocab_size:
        raise bad_field("logit_bias", f"has more entries than the vocabulary ({vocab_size})")
    for key in fields.object("logit_bias"):
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS) or int(key) >= vocab_size:
            raise bad_field("logit_bias", f"has the key {key[:40]!r}, which is no token id in [0, {vocab_size - 1}]")
        value = biases.get(key)
        if type(value) not in (int, float) or not -MAX_BIAS <= value <= MAX_BIAS:
            raise bad_field("logit_bias", f"must have values in [-{MAX_BIAS:g}, {MAX_BIAS:g}], got {shown(value)} for token {key}")
        parsed[int(key)] = float(value)
    return parsed
