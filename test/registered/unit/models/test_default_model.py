"""The embedded default model (GGUF, quantised) against transformers' own load of the same file: logits and greedy tokens in float32."""
from pathlib import Path

import pytest
import torch

from kits.dense_attention import DenseAttention
from sglane.configs.model_config import load_model_config
from sglane.model_executor.loader import load_model

PROMPTS = ("The capital of France is", "def fibonacci(n):", "<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n")
NUM_NEW = 16


@pytest.fixture(scope="module")
def models():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    config = load_model_config(None, None)
    path = Path(config.source.path)
    own = load_model(config, torch.device("cpu"), torch.float32, show_progress=False)
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    return own, theirs, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_and_tokens(models, prompt):
    own, theirs, tokenizer = models
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids[0]
    with torch.inference_mode():
        expected = theirs(input_ids=ids[None]).logits[0]
        # Without a mask it would be guessed from the padding id, which is also the id of <|im_end|>.
        continuation = theirs.generate(ids[None], attention_mask=torch.ones_like(ids[None]), max_new_tokens=NUM_NEW, do_sample=False)
    attention = DenseAttention()
    logits = attention.run(own, ids)
    assert (logits - expected).abs().max() < 1e-3
    tokens = []
    for _ in range(NUM_NEW):
        tokens.append(int(logits[-1].argmax()))
        logits = attention.run(own, torch.tensor(tokens[-1:]))
    expected_tokens = continuation[0, len(ids):].tolist()  # shorter if the model ends
    assert len(expected_tokens) > 3 and tokens[:len(expected_tokens)] == expected_tokens
