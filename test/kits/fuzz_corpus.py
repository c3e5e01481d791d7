"""What `kits.fuzz` begins with: valid bodies of every POST route, fields that may be added, and values that are hard to take."""
from typing import Any

TOOL = {"type": "function", "function": {
    "name": "look_up", "description": "d", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": "x"}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
SAMPLING: dict[str, Any] = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.1,
    "n": 2, "stop": ["\n", "x"], "stop_token_ids": [7, 9], "logit_bias": {"5": 3.5, "17": -100}, "ignore_eos": True, "stop_regex": ["[0-9]{3}"],
    "no_stop_trim": True, "skip_special_tokens": False, "spaces_between_special_tokens": True, "stream_interval": 2,
}
GRAMMARS: dict[str, Any] = {
    "json_schema": SCHEMA, "regex": "[ab]{2,4}", "ebnf": 'root ::= "a" | "b" root',
    "structural_tag": {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]},
}
SESSION: dict[str, Any] = {"id": "s", "rid": "native", "offset": -1, "replace": True, "drop_previous_output": False}
OPENAI: dict[str, Any] = {
    "model": "default", "seed": 3, "min_tokens": 2, "max_tokens": 6, "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "user": "u", "rid": "named", "priority": 2, "cache_salt": "salt", "extra_key": "key", "return_cached_tokens_details": True, "best_of": 2,
    "session_params": SESSION,
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
}
NATIVE: dict[str, Any] = {
    "rid": "native", "priority": -1, "cache_salt": "salt", "extra_key": "key", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3,
    "token_ids_logprob": [3, 4], "return_text_in_logprobs": True, "stream": True, "session_params": SESSION,
}
MESSAGES = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": "y"},
]
CHAT: dict[str, Any] = {
    "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False, "logprobs": True, "top_logprobs": 2, "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": True}, "separate_reasoning": True, "stream_reasoning": False, "continue_final_message": False,
    "add_generation_prompt": True, "max_completion_tokens": 5,
}
#: route -> bodies that are valid. What is not there at first comes in through OPTIONAL.
CORPUS: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        {"text": "Hello", "sampling_params": {"max_new_tokens": 5, "temperature": 0}},
        {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3}},
        {"text": ["a b", "c"], "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3}], "rid": ["r1", "r2"]},
        {"input_ids": [[5, 6], [7] * 40], "sampling_params": {"max_new_tokens": 4, "n": 2}, "return_logprob": [True, False], "stream": True},
    ],
    "/v1/completions": [
        {"prompt": "Once upon a time", "max_tokens": 5}, {"prompt": ["a", "b"], "max_tokens": 3, "n": 2, "echo": True, "logprobs": 3},
        {"prompt": [5, 6, 7], "max_tokens": 4, "stream": True}, {"prompt": [[5], [6, 7]], "max_tokens": 2, "suffix": None},
    ],
    "/v1/chat/completions": [
        {"messages": MESSAGES[:2], "max_tokens": 5}, {"messages": MESSAGES, "tools": [TOOL], "max_tokens": 6, "stream": True},
        {"messages": [{"role": "assistant", "content": "So"}], "continue_final_message": True, "max_tokens": 3},
    ],
    "/tokenize": [{"prompt": "some text", "add_special_tokens": False}, {"prompt": ["a", "b"], "model": "default"}],
    "/detokenize": [{"tokens": [5, 6, 7], "skip_special_tokens": False}, {"tokens": [[5], [6, 7]]}],
    "/v1/tokenize": [{"prompt": "x"}],
    "/v1/detokenize": [{"tokens": [1]}],
    "/abort_request": [{"rid": "named"}, {"rid": ["native", "r1"]}, {"abort_all": True}, {}],
    "/open_session": [{"capacity_of_str_len": 1000, "session_id": "s", "streaming": True, "timeout": 30.0}, {"capacity_of_str_len": 0}],
    "/close_session": [{"session_id": "s"}, {"session_id": "none"}],
    "/flush_cache": [{}],
    "/configure_logging": [{"log_requests": False}, {"log_level": "warning"}],
}
#: Routes that stop everybody's work or slow it down, as they should: a valid body would end the run. They have tests of their own.
OPERATOR = frozenset({"/pause_generation", "/continue_generation", "/start_profile", "/stop_profile"})
OPTIONAL: dict[str, dict[str, Any]] = {
    "/generate": {**NATIVE, "sampling_params": {**SAMPLING, **GRAMMARS, "max_new_tokens": 4, "min_new_tokens": 1, "sampling_seed": 4}},
    "/v1/completions": {**SAMPLING, **OPENAI, **GRAMMARS, "echo": True, "logprobs": 2},
    "/v1/chat/completions": {**SAMPLING, **OPENAI, **GRAMMARS, **CHAT},
}

NUMBERS = [
    0, -1, 1, 2, 3, 1.5, -0.0, 1e-30, 1e30, 1e308, 129, 511, 512, 513, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 2**70,
    float("nan"), float("inf"), float("-inf"),
]
TEXTS = [
    "", " ", "\x00", "a", "NaN", "null", "1", "0x10", "é", "日本語", "👩‍👩‍👧", "\u202e\u200d\ufeff", "\ud800", "e\u0301" * 30, "a" * 2000,
    "<|im_end|>", "</s>", "{{ 1/0 }}", "{% for x in range(99) %}x{% endfor %}", "(a+)+$", "(((((", "[", "{", '{"type": "object"}', "root ::= root",
    "../../etc/passwd", "%s%n", "\r\nX: y", "auto", "text",
]
#: Bytes to put into a body; content types; ends of a path; more headers.
INSERTS = [b"\xff", b"\x00", b"\xed\xa0\x80", b"NaN", b"1e999", b"[" * 3000, b",", b"\xef\xbb\xbf", b"9" * 5000]
CURIOUS_KINDS = ["text/plain", "", "application/json; charset=utf-16", "application/x-www-form-urlencoded", "APPLICATION/JSON", "é", ";", "a" * 3000]
CURIOUS_PATHS = ["/", "?stream=1", "?timeout=nan", "?timeout=-1", "/%ff", "/../x", "?%00=%ff", "/" + "x" * 4000, "?" + "a=b&" * 500]
CURIOUS_HEADERS = [("Authorization", "Bearer \u00e9"), ("Expect", "100-continue"), ("X-Big", "y" * 8000), ("Accept-Encoding", "x"), ("Cookie", "=;=")]
