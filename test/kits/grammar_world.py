"""A vocabulary of bytes for grammars over models whose tokens mean nothing."""
from sglane.model_executor.grammar import Vocabulary

SPECIAL_ID, END_ID = 0, 1
#: Pieces of several characters, some of which cross the parts of a JSON text.
LONG_PIECES = [b'{"', b'":', b'", "', b'"}', b"true", b"null", b"  ", b"\n\n", b"12", b'name"', b"}}", b"\xc3\xa9"]


def byte_vocabulary(size: int) -> Vocabulary:
    """Token 0 is special, token 1 ends an answer, then the bytes from 9 on as far as they fit (7 bits), then longer pieces; the rest has no text."""
    pieces = [b"", b""] + [bytes([value]) for value in (9, 10, 13, *range(32, 127))] + LONG_PIECES
    assert len(pieces) <= size, f"{len(pieces)} tokens for {size} logits"
    return Vocabulary(pieces=pieces, end_token_ids=[END_ID], size=size)


def text_of(vocabulary: Vocabulary, tokens: list[int]) -> str:
    """The answer's text; an end token at its end is left out. Raises UnicodeDecodeError for broken characters."""
    if tokens and tokens[-1] == END_ID:
        tokens = tokens[:-1]
    return b"".join(vocabulary.pieces[token] for token in tokens).decode()
