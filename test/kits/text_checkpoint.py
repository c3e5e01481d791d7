"""A tiny checkpoint that also has text: a byte-level tokenizer and a chat template that shows tools, for tests through all HTTP routes."""
import shutil
from pathlib import Path

from kits.canary import TEXTS
from kits.checkpoints import tiny

#: Ids 0 to 7: begin and end as in the checkpoints' config.json, then the markers of chat, thoughts and tool calls (qwen3's).
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
VOCAB_SIZE = 512
TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
#: What the merges are learnt from, besides the canary's texts: words of two bytes and more, JSON, characters of two to four bytes.
CORPUS = (*TEXTS, TEMPLATE, '{"name": "value", "number": 12, "list": [true, false, null]}', "žluťoučký kůň, 日本語のテキスト, 👩‍👩‍👧 🌸 e\u0301")


def with_text(family: str, folder: Path) -> Path:
    """Folder with the weights of tiny(family) and a tokenizer of its whole vocabulary. folder: an empty one of the caller's."""
    for path in tiny(family).iterdir():
        shutil.copy(path, folder / path.name)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer():  # type: ignore[no-untyped-def]  # transformers is imported on use: it takes seconds
    """transformers.PreTrainedTokenizerFast, VOCAB_SIZE ids at most."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE,
                                   additional_special_tokens=list(SPECIAL[2:]))
