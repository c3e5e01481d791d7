"""The communicators of the ranks: one per purpose, so that the sequence of operations on each is a function of the plan."""
import datetime
import logging
import os
import platform
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from sglane.distributed.exchange.collective import CollectiveExchange
from sglane.distributed.exchange.local import Exchange, LocalExchange
from sglane.distributed.exchange.peer import PeerExchange
from sglane.distributed.futex import MACHINES
from sglane.distributed.peers import Peers, meet
from sglane.utils.addresses import HostPort

logger = logging.getLogger(__name__)

#: A rank that waits longer than this for the others ends with an error.
WAIT_TIMEOUT_S = 600.0
#: One communicator each, in the order of the fields of Groups.
PURPOSES = ("attention", "experts", "prefetch", "step")
#: How a rendezvous begins that only ranks of one host can reach.
_ONE_HOST = "file://"
#: How one begins that ranks of several hosts can reach.
_HOSTS = "tcp://"

Transport = Literal["auto", "peer", "collective"]


class TransportRefused(ValueError):
    """The ranks cannot exchange rows in the way that was asked for."""


@dataclass(frozen=True)
class Groups:
    """attention: rows and partial results inside a layer. experts: rows of mixture-of-experts layers. prefetch: prefix rows of the next layer.
    step: the exchange that ends each step, always on CPU tensors.
    pools: connections over which the ranks hand each other their KV pools; None: pools are not mapped by other ranks."""

    attention: Exchange
    experts: Exchange
    prefetch: Exchange
    step: Exchange
    pools: Peers | None = None


def local_groups() -> Groups:
    """One rank: nothing to set up."""
    return Groups(LocalExchange(), LocalExchange(), LocalExchange(), LocalExchange())


def pick_transport(wanted: Transport, rendezvous: str, device_type: str) -> Literal["peer", "collective"]:
    """auto: peer for CPU ranks of one host, else collective. Raises TransportRefused with the reason."""
    if device_type == "cuda":
        reason = "the KV pools and rows of GPU ranks are not mapped by other ranks yet"
    elif not rendezvous.startswith(_ONE_HOST):
        reason = f"the ranks are on several hosts, which meet at {rendezvous}"
    elif platform.machine() not in MACHINES:
        reason = f"it knows the machines {', '.join(MACHINES)}, and this one is {platform.machine()}"
    else:
        return "collective" if wanted == "collective" else "peer"
    if wanted == "peer":
        raise TransportRefused(f"--cp-exchange peer: {reason}; use collective")
    return "collective"


def init_groups(rank: int, cp_size: int, rendezvous: str, device_type: str, transport: Transport = "auto",
                timeout_s: float = WAIT_TIMEOUT_S) -> Groups:
    """Meet the other ranks at `rendezvous`: file://PATH in a folder of this server alone, or tcp://HOST:PORT where rank 0 listens.

    Blocks until all are there. timeout_s: how long a rank is waited for, now and later. Raises TransportRefused, PeerLost.
    """
    if cp_size == 1:
        return local_groups()
    picked = pick_transport(transport, rendezvous, device_type)
    logger.info("CP exchange: %s (--cp-exchange %s)", picked, transport)
    if picked == "peer":
        *peers, pools = meet(rank, cp_size, rendezvous.removeprefix(_ONE_HOST), len(PURPOSES) + 1, timeout_s)
        return Groups(*(PeerExchange(each, timeout_s) for each in peers), pools=pools)
    timeout = datetime.timedelta(seconds=timeout_s)
    if rendezvous.startswith(_ONE_HOST):
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=cp_size, timeout=timeout)
    else:
        store = open_store(HostPort.parse(rendezvous.removeprefix(_HOSTS)), rank, cp_size, timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=cp_size, timeout=timeout)
    backends = ["nccl" if device_type == "cuda" else "gloo"] * 3 + ["gloo"]
    return Groups(*(CollectiveExchange(dist.new_group(backend=backend, timeout=timeout)) for backend in backends))


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
    if groups.pools is not None:
        groups.pools.close()
    exchanges = (groups.attention, groups.experts, groups.prefetch, groups.step)
    for exchange in exchanges:
        if isinstance(exchange, PeerExchange):
            exchange.close()
    if isinstance(groups.step, CollectiveExchange):
        dist.destroy_process_group()
