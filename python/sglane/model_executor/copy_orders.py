"""What a plan's copies between device and host must fulfil; checked in debug mode, before anything is copied."""
from collections.abc import Sequence

import numpy as np

from sglane.plan.step_plan import StepPlan


class CopyOrderError(AssertionError):
    """A plan orders a copy that would go wrong; the message names step, ticket and pages."""


def check_copies(plan: StepPlan, cp_size: int, num_rows: int, num_host_rows: int) -> None:
    """Pairs in one lane, pages that exist and no sink among them, no page written twice. num_rows, num_host_rows: per lane, sinks included.

    Raises CopyOrderError.
    """
    loads = [(f"step {plan.step}: load {load.ticket}", *_pages(load.host_pages, load.device_pages)) for load in plan.loads]
    backups = [(f"step {plan.step}: backup {backup.ticket}", *_pages(backup.host_pages, backup.device_pages)) for backup in plan.backups]
    for what, host, device in loads + backups:
        if len(host) != len(device):
            raise CopyOrderError(f"{what} has {len(host)} host pages for {len(device)} device pages")
        _check_range(what, "host", host, cp_size, num_host_rows)
        _check_range(what, "device", device, cp_size, num_rows)
        apart = host % cp_size != device % cp_size
        if apart.any():
            raise CopyOrderError(f"{what} is between lanes: host pages {host[apart].tolist()}, device pages {device[apart].tolist()}")
    for copy in plan.tail_copies:
        what, num_source_rows = f"step {plan.step}: tail copy to page {copy.dst_page}", num_host_rows if copy.from_host else num_rows
        _check_range(what, "host" if copy.from_host else "device", np.array([copy.src_page]), cp_size, num_source_rows)
        _check_range(what, "device", np.array([copy.dst_page]), cp_size, num_rows)
    tails = [copy.dst_page for copy in plan.tail_copies]
    _check_distinct(f"step {plan.step}", "device", [*(device for _, _, device in loads), np.array(tails, np.int32)])
    _check_distinct(f"step {plan.step}", "host", [host for _, host, _ in backups])


def _pages(host: bytes, device: bytes) -> tuple[np.ndarray, np.ndarray]:
    return np.frombuffer(host, np.int32), np.frombuffer(device, np.int32)


def _check_range(what: str, side: str, pages: np.ndarray, cp_size: int, num_rows: int) -> None:
    wrong = (pages < cp_size) | (pages >= num_rows * cp_size)  # pages below cp_size are the lanes' sinks
    if wrong.any():
        raise CopyOrderError(f"{what}: {side} pages {pages[wrong].tolist()} are not in [{cp_size}, {num_rows * cp_size})")


def _check_distinct(what: str, side: str, written: Sequence[np.ndarray]) -> None:
    pages, counts = np.unique(np.concatenate([np.zeros(0, np.int32), *written]), return_counts=True)
    if (counts > 1).any():
        raise CopyOrderError(f"{what}: {side} pages {pages[counts > 1].tolist()} are written by more than one copy")
