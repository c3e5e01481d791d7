"""The packaged demonstration model as a checkpoint: transformers reads it alike, the package lists all its files, its template is what it learnt."""
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kits.dense_attention import DenseAttention
from kits.oracle import Oracle
from sglane.configs.model_config import PACKAGED_MODELS, load_model_config
from sglane.model_executor.loader import load_model

FOLDER = PACKAGED_MODELS["tiny-dsa"]
#: In the style of the training text, and not in it; longer than what a row selects.
TEXT = """And it came to pass in those days, that there was a man of the hill country, and he had three sons. And the eldest said unto his father,
Behold, I will go down into the city, and I will buy corn, that we may live, and not die. And his father said, Go, my son, and the LORD be with
thee. And he arose, and took with him two servants, and went down into the city, and came unto the gate thereof. And the men of the city said unto
him, Whence comest thou? And he said, I am come from the hill country, for the famine is sore in the land. And they gave him bread and water, and
he did eat and drink. And when the king heard that he was come, he sent messengers unto him, saying, Come, and stand before me. And he went in
unto the king, and bowed himself to the ground. And the king said unto him, What is thy name, and who is thy father? And he told him all."""


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.tensor(AutoTokenizer.from_pretrained(FOLDER)(TEXT).input_ids)


def test_logits_agree(ids: torch.Tensor) -> None:
    """The oracle, this engine's model and transformers, beyond index_topk."""
    torch.set_num_threads(1)
    config = load_model_config("tiny-dsa", None)
    assert config.index is not None and len(ids) > config.index.topk + 32
    expected = Oracle(FOLDER).run(ids, {})[0]
    own = DenseAttention().run(load_model(config, torch.device("cpu"), torch.float32, show_progress=False), ids)
    assert (own - expected).abs().max() < 1e-3
    theirs = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        assert (theirs(input_ids=ids[None], use_cache=False).logits[0] - expected).abs().max() < 1e-3


def test_the_package_lists_its_files() -> None:
    project = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
    patterns = tomllib.loads((project / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["sglane"]
    listed = {file.name for pattern in patterns for file in FOLDER.parents[1].glob(pattern)}
    assert listed == {file.name for file in FOLDER.iterdir()} and {"config.json", "tokenizer.json", "model.safetensors"} <= listed


def test_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, "ABCD")]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|user|>A<|user|>B<|assistant|>C<|eos|><|user|>D<|assistant|>"
    assert tokenizer("x").input_ids[0] == 0 and tokenizer("<|eos|>", add_special_tokens=False).input_ids == [1]
