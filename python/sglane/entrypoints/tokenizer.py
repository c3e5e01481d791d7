"""Text and chat messages -> token ids; token ids -> text. Work on long texts leaves the event loop's thread."""
import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import numpy as np
import numpy.typing as npt

from sglane.entrypoints.detokenizer import Detokenizer, Pieces
from sglane.entrypoints.errors import ApiError
from sglane.entrypoints.tokenizer_cache import converted

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

#: Shorter texts are tokenized at once: a thread costs more.
INLINE_CHARACTERS = 2048
#: What one text or message costs beside its characters, in characters.
ITEM_CHARACTERS = 16
NUM_THREADS = 2
#: Prompt tokens that a detokenizer sees before the first output token.
NUM_CONTEXT_TOKENS = 5
#: What a chat template raises when messages don't suit it.
TEMPLATE_ERRORS = (jinja2.TemplateError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


class TokenizerError(ValueError):
    """No usable tokenizer or chat template; the message says where it was looked for."""


class TextTokenizer:
    """One model's tokenizer and chat template. Safe to use from several threads."""

    def __init__(self, path: str, chat_template: str | None):
        """path: folder of a Hugging Face tokenizer, or a GGUF file. chat_template: file that replaces the tokenizer's own template."""
        self._hf = load_hf_tokenizer(path)
        self._backend = self._hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.path = path
        self.pieces = Pieces(self._backend)
        self.eos_token_ids = () if self._hf.eos_token_id is None else (int(self._hf.eos_token_id),)
        self._template = self._hf.chat_template if chat_template is None else read_template(chat_template)
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    @cached_property
    def begin_token_id(self) -> int | None:
        """What the tokenizer puts in front of every text; None: nothing, though the model may have a token of that name."""
        first = self.encode("", add_special_tokens=True)[:1].tolist()
        return first[0] if first and first[0] == self._hf.bos_token_id else None

    def encode(self, text: str, *, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        """int32 [n]."""
        return np.array(self._backend.encode(text, add_special_tokens=add_special_tokens).ids, dtype=np.int32)

    async def encode_texts(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[npt.NDArray[np.int32]]:
        """Any texts, empty ones included; with the begin token if the tokenizer adds one."""
        num_characters = sum(map(len, texts)) + ITEM_CHARACTERS * len(texts)
        return await self._run(num_characters, lambda: [self.encode(text, add_special_tokens=add_special_tokens) for text in texts])

    async def encode_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool, continue_final_message: bool,
                          template_arguments: dict[str, Any]) -> npt.NDArray[np.int32]:
        """Messages through the chat template. Raises a 400 if there is none or it refuses them."""
        if self._template is None:
            raise ApiError(400, "messages need a chat template, but this model has none: use /v1/completions, or --chat-template", "messages")

        def work() -> npt.NDArray[np.int32]:
            text = self.render(messages, add_generation_prompt, continue_final_message, template_arguments)
            return self.encode(text, add_special_tokens=False)

        num_characters = sum(ITEM_CHARACTERS + len(str(message.get("content"))) for message in messages) + len(str(template_arguments))
        if any("tool_calls" in message for message in messages):
            num_characters += INLINE_CHARACTERS
        return await self._run(num_characters, work)

    @cached_property
    def _joins_arguments(self) -> bool:
        """Whether the chat template takes the arguments of earlier calls as text. Most want an object; a trial conversation tells."""
        key, value = "a_parameter", "its value"
        trials = []
        for arguments in ({key: value}, json.dumps({key: value})):
            call = {"type": "function", "id": "call_0", "function": {"name": "a_tool", "arguments": arguments}}
            trial = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
            try:
                text = self._apply(trial, False, False, {})
            except TEMPLATE_ERRORS:
                text = ""
            trials.append(value in text and f"'{key}'" not in text)  # not as Python writes it
        return trials == [False, True]

    def _apply(self, messages: list[dict[str, Any]], add_generation_prompt: bool, continue_final_message: bool, arguments: dict[str, Any]) -> str:
        text = self._hf.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message, **arguments,
        )
        assert isinstance(text, str)
        return text

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, continue_final_message: bool, arguments: dict[str, Any]) -> str:
        try:
            if any("tool_calls" in message for message in messages) and self._joins_arguments:
                messages = [with_text_arguments(message) for message in messages]
            return self._apply(messages, add_generation_prompt, continue_final_message, arguments)
        except TEMPLATE_ERRORS as error:
            raise ApiError(400, f"messages: the chat template refuses them: {error}", "messages") from error

    async def _run(self, num_characters: int, work: Callable[[], Result]) -> Result:
        if num_characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template looks at tools."""
        return "tools" in str(self._template)

    def detokenizer(self, skip_special_tokens: bool, prompt: npt.NDArray[np.int32], markers: Sequence[str] = ()) -> Detokenizer:
        """markers: special tokens that are part of one are never skipped."""
        return self.pieces.detokenizer(skip_special_tokens, prompt[-NUM_CONTEXT_TOKENS:].tolist(), markers)

    def token_text(self, token_id: int) -> str:
        """One token on its own; bytes that are no whole character are shown as replacement marks."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces.text_bytes(token_id)

    def decode(self, token_ids: npt.NDArray[np.int32], *, skip_special_tokens: bool = False) -> str:
        """Text of a whole prompt, by default with special tokens."""
        return str(self._backend.decode(token_ids.tolist(), skip_special_tokens=skip_special_tokens))


def with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON."""
    calls = []
    for call in message.get("tool_calls", ()):
        arguments = call["function"].get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message


def load_hf_tokenizer(path: str) -> Any:
    """A fast tokenizer from a folder or a GGUF file. Never looks at the network."""
    import transformers
    from transformers import PreTrainedTokenizerFast  # most of a second to import: not needed with --skip-tokenizer-init

    file = Path(path)
    try:
        if file.is_file() and file.suffix == ".gguf":
            tokenizer = converted(file, transformers.__version__, load_converted, lambda: load_any(str(file.parent), gguf_file=file.name))
        else:
            tokenizer = load_any(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TokenizerError(f"no tokenizer in {path}: {error}; give --tokenizer-path, or --skip-tokenizer-init to work with token ids") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TokenizerError(f"the tokenizer in {path} is a {type(tokenizer).__name__}; only tokenizers with a tokenizer.json are supported")
    return tokenizer


def load_any(path: str, **options: str) -> Any:
    """Whatever class the folder asks for."""
    from transformers import AutoTokenizer  # it imports torch: two more seconds, and memory that the front has no use for

    return AutoTokenizer.from_pretrained(path, local_files_only=True, **options)


def load_converted(folder: str) -> Any:
    """A folder that `save_pretrained` wrote. The plain class reads its own folders without torch."""
    from transformers import PreTrainedTokenizerFast

    saved_class = json.loads((Path(folder) / "tokenizer_config.json").read_text(encoding="utf-8")).get("tokenizer_class")
    if saved_class in (PreTrainedTokenizerFast.__name__, "PreTrainedTokenizerFast"):
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return load_any(folder)


def read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"--chat-template {path}: {error}") from error
