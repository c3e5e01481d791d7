"""POST /tokenize and /detokenize: the model's tokenizer on its own, as benchmark clients ask for it."""
import asyncio
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from sglane.entrypoints.body import read_object
from sglane.entrypoints.errors import bad_field
from sglane.entrypoints.request_builder import need_tokenizer
from sglane.entrypoints.responses import json_response
from sglane.entrypoints.server_state import ServerState
from sglane.entrypoints.validation import Fields, kind_of, token_ids

#: Texts of one request.
MAX_TEXTS = 1 << 16


class TextApi:
    def __init__(self, server: ServerState):
        self._server = server

    async def tokenize(self, request: Request) -> Response:
        """`prompt` (one text or a list) -> `tokens`, `count` (lists of them for a list), `max_model_len`."""
        fields = Fields(await read_object(request))
        engine = self._server.engine()
        fields.refuse(("messages",), "is not supported here: send the text as prompt")
        fields.string("model")
        add_special_tokens = fields.flag("add_special_tokens", True)
        tokenizer = need_tokenizer(engine.tokenizer, "prompt")
        prompt = fields.get("prompt")
        texts = [prompt] if isinstance(prompt, str) else prompt
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise bad_field("prompt", f"must be a string or an array of strings, not {kind_of(prompt)}")
        check_num_texts("prompt", len(texts))
        tokens = [ids.tolist() for ids in await tokenizer.encode_texts(texts, add_special_tokens)]
        counts = [len(ids) for ids in tokens]
        is_one = isinstance(prompt, str)
        return json_response({
            "tokens": tokens[0] if is_one else tokens, "count": counts[0] if is_one else counts, "max_model_len": engine.info.context_length,
        })

    async def detokenize(self, request: Request) -> Response:
        """`tokens` (ids, or a list of lists) -> `text` (or a list)."""
        fields = Fields(await read_object(request))
        engine = self._server.engine()
        fields.string("model")
        skip_special_tokens = fields.flag("skip_special_tokens", True)
        tokenizer = need_tokenizer(engine.tokenizer, "tokens")
        tokens = fields.get("tokens")
        if not isinstance(tokens, list):
            raise bad_field("tokens", f"must be an array of token ids, not {kind_of(tokens)}")
        is_batch = bool(tokens) and isinstance(tokens[0], list)
        check_num_texts("tokens", len(tokens) if is_batch else 1)
        rows = [token_ids("tokens", row, engine.facts.vocab_size) for row in (tokens if is_batch else [tokens])]

        def work() -> list[str]:
            return [tokenizer.decode(row, skip_special_tokens=skip_special_tokens) for row in rows]

        texts: Any = await asyncio.to_thread(work)
        return json_response({"text": texts if is_batch else texts[0]})


def check_num_texts(field: str, num_texts: int) -> None:
    if num_texts > MAX_TEXTS:
        raise bad_field(field, f"has {num_texts} texts, more than {MAX_TEXTS}")
