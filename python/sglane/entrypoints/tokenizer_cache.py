"""Converted tokenizers of GGUF files. Converting takes seconds, so the result is kept in SGLANE_CACHE_DIR."""
import hashlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglane import environ

logger = logging.getLogger(__name__)

#: The metadata, vocabulary included, stands at the beginning of a GGUF file.
NUM_HASHED_BYTES = 1 << 25
#: A folder is complete when this file is in it: folders appear under their name as a whole.
COMPLETE = "tokenizer.json"


def cache_folder(file: Path, version: str) -> Path:
    """Where the converted tokenizer of a GGUF file belongs. version: of the library that converts it."""
    digest = hashlib.sha256(f"{version} {file.stat().st_size} ".encode())
    with file.open("rb") as data:
        digest.update(data.read(NUM_HASHED_BYTES))
    return Path(environ.SGLANE_CACHE_DIR) / "tokenizers" / digest.hexdigest()[:32]


def converted(file: Path, version: str, load: Callable[[str], Any], convert: Callable[[], Any]) -> Any:
    """The tokenizer of `file`: `load` of a folder if it was converted before, else `convert`, of which a copy is kept.

    A cache that cannot be written is reported and done without.
    """
    folder = cache_folder(file, version)
    if (folder / COMPLETE).is_file():
        return load(str(folder))
    logger.info("converting the tokenizer of %s (once: the result is kept in %s)", file.name, folder)
    tokenizer = convert()
    try:
        store(tokenizer, folder)
    except OSError as error:
        logger.warning("the converted tokenizer is not kept: %s", error)
    return tokenizer


def store(tokenizer: Any, folder: Path) -> None:
    """Save under the final name in one move; of two processes that do it at once, one wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=folder.parent))
    try:
        tokenizer.save_pretrained(str(draft))
        if not folder.exists():
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
