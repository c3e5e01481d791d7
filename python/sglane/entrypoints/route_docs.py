"""What /openapi.json says of the routes: bodies, query parameters, every status a route can answer. Requests are validated by hand, not from here."""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
PROMPT_TEXT: Schema = {"type": "string", "minLength": 1}
PROMPT_IDS: Schema = {**IDS, "minItems": 1}
PROMPT_TEXTS: Schema = {"anyOf": [PROMPT_TEXT, {"type": "array", "items": PROMPT_TEXT, "minItems": 1}]}
PROMPT_ID_LISTS: Schema = {"anyOf": [PROMPT_IDS, {"type": "array", "items": PROMPT_IDS, "minItems": 1}]}
PROMPTS: Schema = {"anyOf": [
    PROMPT_TEXT, PROMPT_IDS, {"type": "array", "items": PROMPT_TEXT, "minItems": 1}, {"type": "array", "items": PROMPT_IDS, "minItems": 1},
]}
TEXTS: Schema = {"anyOf": [STRING, {"type": "array", "items": STRING, "minItems": 1}]}
ID_LISTS: Schema = {"anyOf": [IDS, {"type": "array", "items": IDS, "minItems": 1}]}

ERROR: Schema = {
    "type": "object",
    "required": ["object", "message", "type", "param", "code", "error"],
    "properties": {
        "object": {"const": "error"}, "message": STRING, "type": STRING, "param": {"type": ["string", "null"]}, "code": INTEGER, "error": OBJECT,
    },
}
WHY = {
    400: "A field is wrong; the message names it",
    401: "The key is missing or wrong",
    404: "There is no such thing",
    413: "The body is too large",
    415: "The body is not JSON",
    503: "Starting, shutting down, not answering, or the queue is full",
}
Content = Sequence[tuple[str, Schema]]
JSON: Content = (("application/json", {}),)
TEXT: Content = (("text/plain", STRING),)
JSON_OR_TEXT: Content = (*JSON, *TEXT)
JSON_OR_EVENTS: Content = (*JSON, ("text/event-stream", {}))


@dataclass(frozen=True)
class Parameter:
    """In the query, or (for `{name}` in the path) in the path."""

    name: str
    schema: Schema
    about: str
    place: str = "query"

    def declaration(self) -> dict[str, Any]:
        return {"name": self.name, "in": self.place, "required": self.place == "path", "schema": self.schema, "description": self.about}


@dataclass(frozen=True)
class Declaration:
    """One route. content: media type -> schema of a 200. body: fields of the JSON body, None: it has none. one_of: exactly one of these."""

    content: Content = ()
    body: Mapping[str, Schema] | None = None
    required: Sequence[str] = ()
    one_of: Sequence[str] = ()
    is_body_optional: bool = False
    parameters: Sequence[Parameter] = ()
    statuses: Sequence[int] = (503,)  # beside 200

    def responses(self, needs_key: bool) -> dict[int | str, dict[str, Any]]:
        answer: dict[str, Any] = {"description": "Success"}
        if self.content:
            answer["content"] = {media: {"schema": schema} for media, schema in self.content}
        statuses = {*self.statuses, *((400, 413) if self.body is not None else ()), *((401,) if needs_key else ())}
        return {200: answer, **{status: error_answer(status) for status in sorted(statuses)}}

    def extra(self) -> dict[str, Any]:
        """Fields of the operation that FastAPI cannot know."""
        operation: dict[str, Any] = {}
        if self.parameters:
            operation["parameters"] = [parameter.declaration() for parameter in self.parameters]
        if self.body is not None:
            schema = {"type": "object", "properties": dict(self.body), "required": list(self.required), "additionalProperties": True}
            if self.one_of:
                schema["oneOf"] = [{"required": [name]} for name in self.one_of]
            operation["requestBody"] = {"required": not self.is_body_optional, "content": {"application/json": {"schema": schema}}}
        return operation


def error_answer(status: int) -> dict[str, Any]:
    return {"description": WHY[status], "content": {"application/json": {"schema": ERROR}}}


STOP: Schema = {"type": "string", "minLength": 1}
SAMPLING: dict[str, Schema] = {
    "stream": BOOLEAN, "rid": STRING, "cache_salt": STRING, "priority": INTEGER, "temperature": {"type": "number", "minimum": 0, "maximum": 100},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "max_tokens": {"type": "integer", "minimum": 1}, "stop": {"anyOf": [STOP, {"type": "array", "items": STOP}]}, "seed": INTEGER,
}
MESSAGE = {
    "type": "object", "required": ["role", "content"], "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": PROMPT_TEXT},
}
POST_STATUSES = (400, 413, 415, 503)

PROBE = Declaration()
QUESTION = Declaration(JSON)
GENERATE = Declaration(
    JSON_OR_EVENTS,
    {"text": PROMPT_TEXTS, "input_ids": PROMPT_ID_LISTS, "sampling_params": OBJECT, "stream": BOOLEAN, "return_logprob": BOOLEAN},
    one_of=("text", "input_ids"), statuses=POST_STATUSES,
)
EXTRAS: dict[str, Schema] = dict.fromkeys(("return_token_ids", "return_prompt_token_ids", "return_meta_info"), BOOLEAN)
COMPLETIONS = Declaration(JSON_OR_EVENTS, {"model": STRING, "prompt": PROMPTS, **SAMPLING, **EXTRAS}, ("prompt",), statuses=POST_STATUSES)
CHAT = Declaration(  # messages or input_ids
    JSON_OR_EVENTS, {"model": STRING, "messages": {"type": "array", "items": MESSAGE, "minItems": 1}, "input_ids": PROMPT_IDS, **SAMPLING, **EXTRAS},
    statuses=POST_STATUSES,
)
TOKENIZE = Declaration(JSON, {"model": STRING, "prompt": TEXTS, "add_special_tokens": BOOLEAN}, ("prompt",), statuses=POST_STATUSES)
DETOKENIZE = Declaration(JSON, {"model": STRING, "tokens": ID_LISTS, "skip_special_tokens": BOOLEAN}, ("tokens",), statuses=POST_STATUSES)
FLUSH = Declaration(
    TEXT, parameters=(Parameter("timeout", {"type": "number", "minimum": 0, "maximum": 3600}, "seconds to wait for an idle engine"),),
    statuses=(400, 503),
)
ABORT = Declaration(
    body={"rid": {"anyOf": [STRING, {"type": "array", "items": STRING}]}, "abort_all": BOOLEAN}, is_body_optional=True, statuses=(400, 503),
)
OPEN_SESSION = Declaration(
    JSON,
    {"capacity_of_str_len": {"type": "integer", "minimum": 0}, "session_id": {"type": "string", "minLength": 1}, "streaming": BOOLEAN,
     "timeout": {"type": "number", "exclusiveMinimum": 0}},
    ("capacity_of_str_len",), statuses=POST_STATUSES,
)
CLOSE_SESSION = Declaration(body={"session_id": {"type": "string", "minLength": 1}}, required=("session_id",), statuses=POST_STATUSES)
PAUSE = Declaration(JSON, {"mode": {"enum": ["abort", "retract", "in_place"]}}, is_body_optional=True, statuses=(400, 503))
CONTINUE = Declaration(JSON, {}, is_body_optional=True, statuses=(400, 503))
CONFIGURE_LOGGING = Declaration(
    body={"log_requests": BOOLEAN, "log_requests_level": {"type": "integer", "minimum": 0, "maximum": 3},
          "log_level": {"enum": ["debug", "info", "warning", "error"]}},
    is_body_optional=True, statuses=(400, 503),
)
_PROFILE: dict[str, Schema] = {
    "output_dir": STRING, "num_steps": {"type": "integer", "minimum": 1}, "activities": {"type": "array", "items": {"enum": ["CPU", "GPU"]}},
    "with_stack": BOOLEAN, "record_shapes": BOOLEAN, "profile_prefix": STRING,
}
START_PROFILE = {"POST": Declaration(TEXT, _PROFILE, is_body_optional=True, statuses=(400, 503)), "GET": Declaration(TEXT, statuses=(400, 413, 503))}
STOP_PROFILE = Declaration(TEXT, statuses=(400, 503))
MODEL = Declaration(JSON, parameters=(Parameter("model", STRING, "name of a model", "path"),), statuses=(404, 503))
LOADS = Declaration(
    JSON_OR_TEXT,
    parameters=(
        Parameter("include", STRING, "core, memory, spec, lora, disagg, queues, totals or all, separated by commas"),
        Parameter("format", {"enum": ["json", "prometheus"]}, "json, or gauges in Prometheus' text format"),
        Parameter("dp_rank", {"const": 0}, "there is one data-parallel rank"),
    ),
    statuses=(400, 503),
)
METRICS = Declaration(TEXT, statuses=())


def file(media: str) -> Declaration:
    """A file of the page."""
    return Declaration(((media, STRING),), statuses=())
