"""A tokenizer for the tiny checkpoints: 512 tokens, a byte or two letters each, so that whatever the model samples is text."""
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NUM_TOKENS = 512
BEGIN, END = "<s>", "</s>"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def save_tiny_tokenizer(folder: Path) -> Path:
    """Byte-level, with a chat template; ids 0 and 1 are the checkpoints' begin and end tokens."""
    from transformers import PreTrainedTokenizerFast  # large

    tokens = [BEGIN, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    letters = "abcdefghijklmnopqrstuvwxyz"
    tokens += [first + second for first in letters for second in letters][: NUM_TOKENS - len(tokens)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END, chat_template=TEMPLATE)
    wrapped.save_pretrained(folder)
    return folder
