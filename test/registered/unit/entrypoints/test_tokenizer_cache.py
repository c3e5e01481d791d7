"""Converted tokenizers are kept by content, appear as a whole, and are done without where nothing can be written."""
import subprocess
import sys
from pathlib import Path

import pytest

from kits.tiny_tokenizer import save_tiny_tokenizer
from sglane import environ
from sglane.entrypoints import tokenizer, tokenizer_cache
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


@pytest.mark.parametrize("name", ["TokenizersBackend", "PreTrainedTokenizerFast"])
def test_a_converted_tokenizer_is_read_without_torch(tmp_path, name):
    folder = save_tiny_tokenizer(tmp_path)
    config = folder / "tokenizer_config.json"
    assert '"TokenizersBackend"' in config.read_text()
    config.write_text(config.read_text().replace("TokenizersBackend", name))
    program = """
import sys
from sglane.entrypoints.tokenizer import load_any, load_converted
light = load_converted(sys.argv[1])
assert "torch" not in sys.modules, "two seconds of imports that the front has no use for"
whole = load_any(sys.argv[1])
talk = [{"role": "user", "content": "abc <s> de"}]
assert type(light) is type(whole)
assert light.backend_tokenizer.to_str() == whole.backend_tokenizer.to_str()
assert light.apply_chat_template(talk, tokenize=False) == whole.apply_chat_template(talk, tokenize=False)
assert (light.eos_token_id, light.chat_template) == (whole.eos_token_id, whole.chat_template)
"""
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, timeout=120)


def test_a_converted_tokenizer_of_another_class_is_loaded_as_that_class(tmp_path, monkeypatch):
    folder = save_tiny_tokenizer(tmp_path)
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("TokenizersBackend", "LlamaTokenizerFast"))
    monkeypatch.setattr(tokenizer, "load_any", lambda path: f"any of {path}")
    assert tokenizer.load_converted(str(folder)) == f"any of {folder}"
