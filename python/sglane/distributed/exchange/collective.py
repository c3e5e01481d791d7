"""Exchange by collectives of torch.distributed (gloo between CPUs, NCCL between GPUs; also across hosts)."""
import torch
import torch.distributed as dist
from torch import Tensor


class CollectiveExchange:
    """Padded all-gathers over one communicator."""

    def __init__(self, group: dist.ProcessGroup):
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather(self, x: Tensor) -> Tensor:
        """x [...], same shape and type on every rank; returns [size, ...] in rank order."""
        out = x.new_empty((self.size, *x.shape))
        if x.numel():
            # Bytes, because gloo does not know every element type.
            flat = x.contiguous().view(-1).view(torch.uint8)
            dist.all_gather_into_tensor(out.view(-1).view(torch.uint8), flat, group=self._group)
        return out

    def gather_rows(self, x: Tensor, max_length: int, inverse: Tensor) -> Tensor:
        """x [n, ...], n <= max_length; returns [T, ...] in global order (see Exchange)."""
        if max_length == 0:
            return x
        padded = x
        if x.shape[0] != max_length:
            padded = x.new_zeros((max_length, *x.shape[1:]))
            padded[:x.shape[0]] = x
        gathered = self.all_gather(padded)  # [size, max_length, ...]
        return gathered.flatten(0, 1).index_select(0, inverse)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """x [size, ...] -> [...] (see Exchange). An all-to-all and a sum, because the order of gloo's and NCCL's own sums depends on the size."""
        found = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            dist.all_to_all_single(found.view(-1).view(torch.uint8), x.contiguous().view(-1).view(torch.uint8), group=self._group)
        return found.sum(0)

    def barrier(self) -> None:
        dist.barrier(group=self._group)
