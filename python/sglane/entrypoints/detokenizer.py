"""Token by token to text that never splits a character. Results do not depend on how tokens are grouped."""
import codecs
import json
from collections.abc import Callable, Container, Sequence
from typing import Protocol

from tokenizers import Tokenizer

#: Most tokens of the window method that wait for the end of a character.
MAX_HELD_TOKENS = 16
REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Text of one sequence of tokens."""

    def step(self, token_id: int) -> str:
        """The text that is certain after this token; an incomplete character is held back."""

    def flush(self) -> str:
        """What is still held at the end; an incomplete character becomes a replacement mark."""


class BytesDetokenizer:
    """For vocabularies whose tokens are byte strings: an incremental UTF-8 decoder over them. Invalid bytes become replacement marks."""

    def __init__(self, piece: Callable[[int], bytes]):
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def step(self, token_id: int) -> str:
        return self._decoder.decode(self._piece(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other decoders: the text of a short window of tokens, compared with the text of the part that was given out already."""

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int]):
        """context: the last prompt tokens, because a decoder may treat the first token of a text differently."""
        self._decode = decode
        self._window = list(context)
        self._num_read = len(context)  # tokens of the window whose text was given out

    def step(self, token_id: int) -> str:
        self._window.append(token_id)
        return self._advance(final=len(self._window) - self._num_read > MAX_HELD_TOKENS)

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before, text = self._decode(self._window[: self._num_read]), self._decode(self._window)
        if not final and (len(text) <= len(before) or text.endswith(REPLACEMENT)):
            return ""
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        return text[len(before) :]


class HidingDetokenizer:
    """Leaves some tokens out."""

    def __init__(self, shown: Detokenizer, hidden: Container[int]):
        self._shown = shown
        self._hidden = hidden

    def step(self, token_id: int) -> str:
        return "" if token_id in self._hidden else self._shown.step(token_id)

    def flush(self) -> str:
        return self._shown.flush()


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level vocabularies write for each byte -> the byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + index): byte for index, byte in enumerate(others)}}


class Pieces:
    """The bytes of every token of a vocabulary whose decoder works on bytes."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._kind = decoder_kind(tokenizer)
        self._alphabet = byte_alphabet()
        self._known: dict[int, bytes] = {}

    @property
    def are_bytes(self) -> bool:
        return self._kind == "byte_level"

    def piece(self, token_id: int) -> bytes:
        """All tokens."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._make(self._tokenizer.id_to_token(token_id) or "")
        return found

    def piece_without_special(self, token_id: int) -> bytes:
        """Special tokens are empty."""
        return b"" if token_id in self._special else self.piece(token_id)

    def in_markers(self, markers: Sequence[str]) -> set[int]:
        """Special tokens that are part of a marker."""
        return {index for index in self._special if any(self._tokenizer.id_to_token(index) in marker for marker in markers)}

    def text_bytes(self, token_id: int) -> bytes:
        """Bytes of one token on its own, for reports of log probabilities."""
        if self.are_bytes:
            return self.piece(token_id)
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def detokenizer(self, skip_special_tokens: bool, context: Sequence[int], markers: Sequence[str] = ()) -> Detokenizer:
        """For output that follows a prompt which ends with the tokens `context`. Special tokens that are part of a marker are never skipped."""
        shown = self.in_markers(markers)
        if skip_special_tokens and shown:
            return HidingDetokenizer(self.detokenizer(False, context), self._special - shown)
        if self.are_bytes:
            return BytesDetokenizer(self.piece_without_special if skip_special_tokens else self.piece)
        return WindowDetokenizer(lambda ids: self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens), context)

    def _make(self, token: str) -> bytes:
        try:
            return bytes([self._alphabet[character] for character in token])
        except KeyError:
            return token.encode()  # an added token, written as it is


def decoder_kind(tokenizer: Tokenizer) -> str:
    """`byte_level`, or `other`."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    kinds = [decoder] if decoder and decoder["type"] != "Sequence" else (decoder or {}).get("decoders", [])
    return "byte_level" if [kind["type"] for kind in kinds] == ["ByteLevel"] else "other"
