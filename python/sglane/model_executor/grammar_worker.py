"""Tries grammars out for the front, in a process that may be killed: `python -m sglane.model_executor.grammar_worker`.

First line on standard input: the name of the library and the vocabulary's file, as a JSON array. It is answered by a line once the vocabulary is
read. Then one Grammar (JSON) a line, each answered by one line: a JSON string with what is wrong, empty if it is usable.
"""
import os
import re
import resource
import sys
from pathlib import Path

import msgspec
import setproctitle

from sglane.model_executor.grammar import GRAMMAR_ERRORS, Backend, make_backend, read_vocabulary
from sglane.plan.io_struct import Grammar
from sglane.utils.parent import die_with_parent

#: Memory for data; a grammar that needs more fails here, not in an executor.
MAX_DATA_BYTES = 4 << 30
MAX_COMPILED_BYTES = 64 << 20
MAX_MESSAGE_CHARACTERS = 500


def try_out(backend: Backend, grammar: Grammar) -> str:
    """What is wrong; empty if nothing is."""
    try:
        num_bytes = backend.prepare(grammar)
    except GRAMMAR_ERRORS as error:
        return readable(str(error))
    except MemoryError:
        return "needs too much memory"
    if num_bytes > MAX_COMPILED_BYTES:
        return f"needs {num_bytes >> 20} MiB when compiled, more than {MAX_COMPILED_BYTES >> 20} MiB"
    return ""


def readable(message: str) -> str:
    """Without the library's time stamp and place in its source."""
    return re.sub(r"^\[[\d:]+\] \S+: ", "", message.strip())[:MAX_MESSAGE_CHARACTERS] or "can't be compiled"


def main() -> None:
    die_with_parent()
    setproctitle.setproctitle("sglane::grammar")
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_DATA_BYTES, MAX_DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    name, path = msgspec.json.decode(sys.stdin.buffer.readline(), type=tuple[str, str])
    backend = make_backend(name, read_vocabulary(Path(path)))
    answers.write(b'""\n')
    answers.flush()
    for line in sys.stdin.buffer:
        answers.write(msgspec.json.encode(try_out(backend, msgspec.json.decode(line, type=Grammar))) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
