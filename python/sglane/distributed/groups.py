"""The communicators of the ranks: one per purpose, so that the sequence of operations on each is a function of the plan."""
import datetime
from dataclasses import dataclass

import torch.distributed as dist

from sglane.distributed.exchange.collective import CollectiveExchange
from sglane.distributed.exchange.local import Exchange, LocalExchange

#: A rank that waits longer than this for the others ends with an error.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


@dataclass(frozen=True)
class Groups:
    """attention: rows and partial results inside a layer. experts: rows of mixture-of-experts layers. prefetch: prefix rows of the next layer.
    step: the exchange that ends each step, always on CPU tensors."""

    attention: Exchange
    experts: Exchange
    prefetch: Exchange
    step: Exchange


def local_groups() -> Groups:
    """One rank: nothing to set up."""
    return Groups(LocalExchange(), LocalExchange(), LocalExchange(), LocalExchange())


def init_groups(rank: int, cp_size: int, rendezvous: str, device_type: str) -> Groups:
    """Meet the other ranks at `rendezvous` (a torch.distributed init_method). Blocks until all are there."""
    if cp_size == 1:
        return local_groups()
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=cp_size, timeout=COLLECTIVE_TIMEOUT)
    backends = ["nccl" if device_type == "cuda" else "gloo"] * 3 + ["gloo"]
    return Groups(*(CollectiveExchange(dist.new_group(backend=backend, timeout=COLLECTIVE_TIMEOUT)) for backend in backends))


def close_groups(groups: Groups) -> None:
    """Leave the communicators; no operation may be under way."""
    if groups.step.size > 1:
        dist.destroy_process_group()
