"""From a checkpoint on disk to a model on a device."""
import logging

import torch

from sglane.configs.model_config import ModelConfig
from sglane.layers.moe.shard import ALL_EXPERTS, ExpertShard
from sglane.layers.weights import BLOCK, FP8, Matrix, dequantise
from sglane.model_executor.loader_gguf import GGUFStore
from sglane.model_executor.loader_progress import LoadProgress
from sglane.model_executor.loader_safetensors import SafetensorsStore
from sglane.model_executor.loader_store import CheckpointError, TensorStore
from sglane.models.causal_lm import CausalLM
from sglane.models.registry import model_class

__all__ = ["CheckpointError", "CheckpointWeights", "load_model", "open_store"]

logger = logging.getLogger(__name__)

#: Types that a plain tensor may be stored in.
STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Buffers that some checkpoints carry although they follow from the configuration.
DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
SCALE_SUFFIX = "_scale_inv"
#: Modules of a draft layer that are the main model's own.
SHARED_WITH_MAIN = ("embed_tokens.", "shared_head.head.")
#: Names listed in an error message; more are counted.
MAX_NAMES = 8


def load_model(config: ModelConfig, device: torch.device, dtype: torch.dtype, show_progress: bool, force_progress: bool = False,
               shard: ExpertShard = ALL_EXPERTS) -> CausalLM:
    """Read every weight of the model but the routed experts of other ranks. Draft layers that the configuration does not ask for stay unread.

    dtype: run type of weights and activations. show_progress: a bar on standard error if that is a terminal; force_progress: also if it is not.
    Raises CheckpointError naming the tensor that is missing, unexpected or of the wrong shape.
    """
    store = open_store(config)
    drafts = None if config.draft is None else SafetensorsStore(config.draft.path, of_draft=True)
    prefix = None if drafts is None else _draft_prefix(config, drafts)  # if it is missing, that shows before everything else is read
    weights = CheckpointWeights(store, config, device, dtype, LoadProgress(store.label, show_progress, force_progress))
    model = model_class(config)(config, weights, shard)
    weights.finish()
    if drafts is not None and prefix is not None:
        weights = CheckpointWeights(drafts, config, device, dtype, LoadProgress("Loading draft layer", show_progress, force_progress),
                                    draft_prefix=prefix)
        model.load_draft(weights, prefix)
        weights.finish()
    logger.debug("loaded %s: %.3f GiB of weights", type(model).__name__, model.weight_bytes / (1 << 30))
    return model


def _draft_prefix(config: ModelConfig, store: TensorStore) -> str:
    """The module name of the draft layer, with a dot at its end."""
    assert config.draft is not None
    names = store.names()
    for layer in config.draft.layers:
        prefix = f"model.layers.{layer}."
        if f"{prefix}eh_proj.weight" in names:
            return prefix
    wanted = " or ".join(f"'model.layers.{layer}.eh_proj.weight'" for layer in config.draft.layers)
    raise CheckpointError(f"{config.draft.path}: the checkpoint has no NextN layer to draft with: the tensor {wanted} is missing; give "
                          "--speculative-draft-model-path, or use --speculative-algorithm NGRAM")


def open_store(config: ModelConfig) -> TensorStore:
    return GGUFStore(config) if config.source.kind == "gguf" else SafetensorsStore(config.source.path)


class CheckpointWeights:
    """See WeightSource. Keeps the list of what nobody has asked for yet."""

    def __init__(self, store: TensorStore, config: ModelConfig, device: torch.device, dtype: torch.dtype, progress: LoadProgress,
                 keep_fp8: bool | None = None, draft_prefix: str | None = None):
        """keep_fp8: whether FP8 matrices stay FP8; by default on CUDA. (CPUs have no product with them.) draft_prefix: module name of the draft
        layer, if its tensors are asked for and nothing else."""
        self.device = device
        self.dtype = dtype
        self.resident_bytes = 0
        self._store = store
        self._progress = progress
        self._keep_fp8 = device.type == "cuda" if keep_fp8 is None else keep_fp8
        names = set(store.names())
        if draft_prefix is not None:
            shared = tuple(draft_prefix + name for name in SHARED_WITH_MAIN)  # checkpoints carry copies
            self._unread = {name for name in names if name.startswith(draft_prefix) and not name.startswith(shared)}
        else:
            drafts = tuple(f"model.layers.{config.num_layers + i}." for i in range(max(config.num_draft_layers, 1)))
            self._unread = {name for name in names if not name.startswith(drafts) and not name.endswith(DERIVED_SUFFIXES)}
        if config.tie_word_embeddings:
            self._unread.discard("lm_head.weight")  # some tied checkpoints carry the copy
        progress.start({name: store.shard(name) for name in self._unread})

    def has(self, name: str) -> bool:
        return name in self._store.names()

    def note_copy(self, num_bytes: int) -> None:
        self.resident_bytes += num_bytes

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """See WeightSource."""
        data = self._read(name, shape, None)
        if data.dtype == FP8:
            return self._placed(dequantise(data, self._scales(name, data, None), dtype or self.dtype))
        return self._placed(self._checked(name, data).to(dtype or self.dtype))

    def matrix(self, name: str, shape: tuple[int, int], part: int | None = None) -> Matrix:
        """See WeightSource."""
        data = self._read(name, shape, part)
        if data.dtype != FP8:
            return Matrix(self._placed(self._checked(name, data).to(self.dtype)))
        scales = self._scales(name, data, part)
        if self._keep_fp8:
            return Matrix(self._placed(data), self._placed(scales))
        return Matrix(self._placed(dequantise(data, scales, self.dtype)))

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """See WeightSource. For progress and for what is left over, the tensor counts as read."""
        self._see(name, shape, None)
        if self._store.is_fp8(name):
            self._see(name + SCALE_SUFFIX, (*shape[:-2], *scale_grid(*shape[-2:])), None)

    def finish(self) -> None:
        """Everything must have been asked for."""
        self._progress.finish()
        if self._unread:
            names = sorted(self._unread)
            more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            raise CheckpointError(f"{self._store.path}: unexpected tensors in the checkpoint: {', '.join(names[:MAX_NAMES])}{more}")

    def _read(self, name: str, shape: tuple[int, ...], part: int | None) -> torch.Tensor:
        """The stored tensor, or one part [...] of a tensor [parts, ...], of the given shape."""
        self._see(name, shape, part)
        return self._store.read(name, part)

    def _see(self, name: str, shape: tuple[int, ...], part: int | None) -> None:
        """The tensor is there with this shape; it is not left over."""
        if not self.has(name):
            raise CheckpointError(f"{self._store.path}: the tensor '{name}' {list(shape)} is missing in the checkpoint")
        whole = self._store.shape(name)
        found = whole if part is None else whole[1:]
        if found != shape or (part is not None and part >= whole[0]):
            expected = list(shape) if part is None else ["> " + str(part), *shape]
            raise CheckpointError(f"{self._store.path}: the tensor '{name}' has shape {list(whole)}, expected {expected}")
        if name in self._unread:
            self._unread.discard(name)
            self._progress.taken(name)

    def _scales(self, name: str, data: torch.Tensor, part: int | None) -> torch.Tensor:
        """Block scales of an FP8 matrix as float32. Newer files store the exponent of a power of two in a byte."""
        scales = self._read(name + SCALE_SUFFIX, scale_grid(*data.shape), part)
        if scales.dtype == torch.uint8:
            return torch.exp2(scales.float() - 127.0)
        if scales.dtype not in (*STORED_DTYPES, torch.float8_e8m0fnu):
            raise CheckpointError(f"{self._store.path}: the tensor '{name}{SCALE_SUFFIX}' is stored as {scales.dtype}, which is no form of a scale")
        return scales.float()

    def _checked(self, name: str, data: torch.Tensor) -> torch.Tensor:
        if data.dtype not in STORED_DTYPES:
            raise CheckpointError(f"{self._store.path}: the tensor '{name}' is stored as {data.dtype}, which is not supported")
        return data

    def _placed(self, data: torch.Tensor) -> torch.Tensor:
        self.resident_bytes += data.nbytes
        return data.to(self.device)


def scale_grid(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the block scales of a matrix."""
    return -(-rows // BLOCK), -(-columns // BLOCK)
