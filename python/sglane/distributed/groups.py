"""The communicators of the ranks: one per purpose, so that the sequence of operations on each is a function of the plan."""
import datetime
import os
from dataclasses import dataclass

import torch.distributed as dist

from sglane.distributed.exchange.collective import CollectiveExchange
from sglane.distributed.exchange.local import Exchange, LocalExchange
from sglane.utils.addresses import HostPort

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


def init_groups(rank: int, cp_size: int, rendezvous: str, device_type: str, start_timeout_s: float = 600.0) -> Groups:
    """Meet the other ranks at `rendezvous`: file://PATH on one host, or tcp://HOST:PORT where rank 0 listens.

    Blocks until all are there; raises a RuntimeError of torch when they are not after `start_timeout_s`.
    """
    if cp_size == 1:
        return local_groups()
    timeout = datetime.timedelta(seconds=start_timeout_s)
    if rendezvous.startswith("tcp://"):
        store = open_store(HostPort.parse(rendezvous.removeprefix("tcp://")), rank, cp_size, timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=cp_size, timeout=timeout)
    else:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=cp_size, timeout=timeout)
    backends = ["nccl" if device_type == "cuda" else "gloo"] * 3 + ["gloo"]
    return Groups(*(CollectiveExchange(dist.new_group(backend=backend, timeout=COLLECTIVE_TIMEOUT)) for backend in backends))


def use_interface(name: str) -> None:
    """Gloo listens on this network interface, unless GLOO_SOCKET_IFNAME names one already. Call before init_groups.

    By itself it takes the address of the host's name, which is often one that only this host can reach.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def open_store(address: HostPort, rank: int, cp_size: int, timeout: datetime.timedelta) -> dist.TCPStore:
    """The ranks' common store. Rank 0's listens on the given address only: left to itself it would listen on every interface."""
    if rank > 0:
        return dist.TCPStore(address.host, address.port, cp_size, False, timeout)
    listener = address.listen()
    return dist.TCPStore(address.host, address.port, cp_size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def close_groups(groups: Groups) -> None:
    """Leave the communicators; no operation may be under way."""
    if groups.step.size > 1:
        dist.destroy_process_group()
