"""Tokens to text: no character is split, the grouping of tokens does not matter, stop strings are never shown in part."""
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from sglane.entrypoints.detokenizer import BytesDetokenizer, Pieces, WindowDetokenizer, byte_alphabet

NOTHING = np.empty(0, np.int32)
SAMPLES = [
    "plain ascii, nothing else",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "漢字とひらがな、カタカナ",
    "family \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 flag \U0001f1e8\U0001f1ff skin \U0001f44d\U0001f3fd",
    "e\u0301 combining n\u0303, nbsp\u00a0, zero\u200bwidth",
    " leading and trailing ",
]


CHARACTERS = {byte: character for character, byte in byte_alphabet().items()}


def byte_token(tokenizer, byte):
    """The id of the token that is this one byte; None if the vocabulary has none."""
    return tokenizer.token_to_id(CHARACTERS[byte])


def run(detokenizer, ids):
    parts = [detokenizer.step(token) for token in ids]
    return [*parts, detokenizer.flush()]


@pytest.mark.parametrize("text", SAMPLES)
def test_text_comes_back_token_by_token(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = run(tokenizer.detokenizer(True, NOTHING), ids.tolist())
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("text", SAMPLES)
def test_text_comes_back_byte_by_byte(tokenizer, text):
    backend = tokenizer._backend
    ids = [byte_token(backend, byte) for byte in text.encode()]
    assert None not in ids
    parts = run(tokenizer.detokenizer(True, NOTHING), ids)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    for end in range(len(ids)):
        shown = "".join(parts[: end + 1])
        assert text.startswith(shown), "a prefix of the text is shown at any time"


def test_special_tokens_are_shown_only_when_asked_for(tokenizer):
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", add_special_tokens=False).tolist()
    assert "".join(run(tokenizer.detokenizer(True, NOTHING), ids)) == "hi"
    assert "".join(run(tokenizer.detokenizer(False, NOTHING), ids)) == "<|im_start|>hi<|im_end|>"


def test_ids_beyond_the_tokenizer_are_empty(tokenizer):
    assert "".join(run(tokenizer.detokenizer(True, NOTHING), [504, 10**6, 3575])) == "The capital"


def test_every_byte_triple_before_a_space(tokenizer):
    """Stray bytes become replacement marks exactly where a whole decode puts them, and nothing raises."""
    rng = random.Random(0)
    backend = tokenizer._backend
    alphabet = [byte_token(backend, byte) for byte in range(256)]
    known = [byte for byte in range(256) if alphabet[byte] is not None]
    space = backend.encode(" x").ids[0]
    triples = [tuple(rng.choice(known) for _ in range(3)) for _ in range(3000)]
    corners = [(a, b, c) for a in (0xE2, 0xF0, 0xC3, 0x80) for b in (0x82, 0x9F, 0x41, 0xE2) for c in (0xAC, 0x98, 0xFF, 0x20)]
    triples += [triple for triple in corners if set(triple) <= set(known)]
    for triple in triples:
        ids = [*(alphabet[byte] for byte in triple), space]
        text = "".join(run(tokenizer.detokenizer(True, NOTHING), ids))
        assert text == bytes(triple).decode(errors="replace") + " x"
        assert text == backend.decode(ids)


def test_random_tokens_give_what_a_whole_decode_gives(tokenizer):
    rng = random.Random(1)
    backend = tokenizer._backend
    for _ in range(500):
        ids = [rng.randrange(backend.get_vocab_size()) for _ in range(rng.randint(1, 30))]
        for skip in (True, False):
            assert "".join(run(tokenizer.detokenizer(skip, NOTHING), ids)) == backend.decode(ids, skip_special_tokens=skip)


def test_logprob_texts_are_the_tokens_bytes(tokenizer):
    ids = [byte_token(tokenizer._backend, byte) for byte in "€".encode()]
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == "€".encode()
    assert tokenizer.token_text(504) == "The"


@pytest.fixture(scope="module")
def sentencepiece():
    """A byte-fallback vocabulary with metaspaces, as Llama 2 has."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Paris", "▁is", "a", "▁", "b", "é"]
    tokenizer = Tokenizer(BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def test_the_space_of_the_first_output_token_is_kept(sentencepiece):
    pieces = Pieces(sentencepiece)
    assert not pieces.are_bytes
    ids = [sentencepiece.token_to_id(token) for token in ("▁Paris", "▁is", "é")]
    context = [sentencepiece.token_to_id("a")]
    assert "".join(run(pieces.detokenizer(True, context), ids)) == " Paris isé"


def test_byte_fallback_holds_incomplete_characters(sentencepiece):
    detokenizer = Pieces(sentencepiece).detokenizer(True, [sentencepiece.token_to_id("a")])
    ids = [1 + byte for byte in "€\U0001f600".encode()] + [sentencepiece.token_to_id("b")]
    parts = run(detokenizer, ids)
    assert "".join(parts) == "€\U0001f600b"
    assert not any("\ufffd" in part for part in parts)


def test_a_run_of_garbage_is_given_out_in_the_end():
    decode = {(): ""}
    detokenizer = WindowDetokenizer(lambda ids: decode.get(tuple(ids), "\ufffd" * len(ids)), [])
    parts = run(detokenizer, [7] * 1000)
    assert "".join(parts) == "\ufffd" * 1000
    assert len([part for part in parts if part]) > 10, "it is not all kept to the end"


@given(st.lists(st.binary(max_size=4), max_size=12))
def test_bytes_of_any_grouping(pieces):
    detokenizer = BytesDetokenizer(lambda index: pieces[index])
    assert "".join(run(detokenizer, range(len(pieces)))) == b"".join(pieces).decode(errors="replace")
