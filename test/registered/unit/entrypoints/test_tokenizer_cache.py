"""Converted tokenizers are kept by content, appear as a whole, and are done without where nothing can be written."""
from pathlib import Path

import pytest

from sglane import environ
from sglane.entrypoints import tokenizer_cache
from sglane.entrypoints.tokenizer_cache import cache_folder, converted


class Converted:
    """Saves one file, as a tokenizer does."""

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(environ, "SGLANE_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF one")
    return path


def test_second_start_loads_the_copy(file):
    first = Converted()
    assert converted(file, "1", str, lambda: first) is first
    found = converted(file, "1", str, lambda: pytest.fail("converted again"))
    assert found == str(cache_folder(file, "1"))
    assert [entry.name for entry in cache_folder(file, "1").parent.iterdir()] == [cache_folder(file, "1").name]  # no drafts left


def test_key_follows_content_and_library(file):
    folder = cache_folder(file, "1")
    assert cache_folder(file, "2") != folder
    file.write_bytes(b"GGUF two")
    assert cache_folder(file, "1") != folder


def test_a_folder_that_is_there_wins(file):
    folder = cache_folder(file, "1")
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("theirs")
    tokenizer_cache.store(Converted(), folder)
    assert (folder / "tokenizer.json").read_text() == "theirs"


def test_unwritable_cache(file, monkeypatch):
    file.with_name("not-a-folder").write_text("")
    monkeypatch.setattr(environ, "SGLANE_CACHE_DIR", str(file.with_name("not-a-folder")))
    first = Converted()
    assert converted(file, "1", str, lambda: first) is first
