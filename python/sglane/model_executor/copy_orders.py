"""What a plan's copies between device and host must fulfil; checked in debug mode, before anything is copied."""
from collections.abc import Iterator, Sequence

import numpy as np

from sglane.plan.step_plan import StepPlan
from sglane.utils.page_span import check_copy_order


class CopyOrderError(AssertionError):
    """A plan orders a copy that would go wrong; the message names step, ticket and pages."""


def check_copies(plan: StepPlan, cp_size: int, num_rows: int, num_host_rows: int) -> None:
    """Pairs in one lane, pages that exist and no sink among them, no page written twice. num_rows, num_host_rows: per lane, sinks included.

    Raises CopyOrderError.
    """
    written_device, written_host = [], []
    for what, sources, targets, from_host, to_host in _copies(plan):
        try:
            check_copy_order(sources, targets, cp_size=cp_size, num_source_rows=num_host_rows if from_host else num_rows,
                             num_target_rows=num_host_rows if to_host else num_rows)
        except ValueError as error:
            raise CopyOrderError(f"step {plan.step}: {what}: {error}") from error
        (written_host if to_host else written_device).append(targets)
    _check_distinct(plan.step, "device", written_device)
    _check_distinct(plan.step, "host", written_host)


def _copies(plan: StepPlan) -> Iterator[tuple[str, np.ndarray, np.ndarray, bool, bool]]:
    """(name, source pages, target pages, from the host, to the host)"""
    for load in plan.loads:
        yield f"load {load.ticket}", np.frombuffer(load.host_pages, np.int32), np.frombuffer(load.device_pages, np.int32), True, False
    for backup in plan.backups:
        yield f"backup {backup.ticket}", np.frombuffer(backup.device_pages, np.int32), np.frombuffer(backup.host_pages, np.int32), False, True
    for copy in plan.tail_copies:
        source, target = np.array([copy.src_page], np.int32), np.array([copy.dst_page], np.int32)
        yield f"tail copy to page {copy.dst_page}", source, target, copy.from_host, False


def _check_distinct(step: int, side: str, written: Sequence[np.ndarray]) -> None:
    pages, counts = np.unique(np.concatenate([np.zeros(0, np.int32), *written]), return_counts=True)
    if (counts > 1).any():
        raise CopyOrderError(f"step {step}: {side} pages {pages[counts > 1].tolist()} are written by more than one copy")
