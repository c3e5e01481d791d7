"""Token embedding and output head."""
import torch.nn.functional as F
from torch import Tensor

from sglane.layers.linear import Linear
from sglane.layers.weights import Matrix, WeightSource


class Embedding:
    """tokens int64 [n] -> [n, hidden] in the run type."""

    def __init__(self, table: Tensor):
        self.table = table  # [vocab, hidden]

    @staticmethod
    def load(weights: WeightSource, name: str, vocab_size: int, hidden_size: int) -> "Embedding":
        return Embedding(weights.tensor(f"{name}.weight", (vocab_size, hidden_size)))

    def __call__(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.table)


def load_head(weights: WeightSource, name: str, embedding: Embedding, tied: bool) -> Linear:
    """hidden [m, hidden] -> [m, vocab]. Tied: the embedding's table, of which a packed product keeps a copy of its own."""
    if not tied:
        return Linear.load(weights, {name: embedding.table.shape[0]}, embedding.table.shape[1])
    head = Linear(Matrix(embedding.table))
    weights.note_copy(head.copied_bytes)
    return head
