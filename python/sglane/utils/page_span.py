"""Checks of page and slot lists, for tests and debug runs; pure, on host arrays."""
import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32] | npt.NDArray[np.int64]


def check_copy_order(sources: Ids, targets: Ids, *, cp_size: int, num_source_rows: int, num_target_rows: int) -> None:
    """sources, targets: [n] page ids of a copy, pairwise. num_*_rows: rows of a lane in either pool, the sink row included. Raises ValueError that
    names the first pair at fault: another lane, a sink row, a page outside the pool, a page named twice; or an empty or unequal list."""
    if sources.ndim != 1 or sources.shape != targets.shape or not len(sources):
        raise ValueError(f"a copy order has pages {list(sources.shape)} and {list(targets.shape)}: not pairs, or none")
    for name, pages, num_rows in (("source", sources, num_source_rows), ("target", targets, num_target_rows)):
        _refuse(pages, (pages < cp_size) | (pages >= num_rows * cp_size), f"the {name} is a sink row or outside of {num_rows} x {cp_size} rows")
        _, first, counts = np.unique(pages, return_index=True, return_counts=True)
        twice = np.isin(np.arange(len(pages)), first[counts > 1])
        _refuse(pages, twice, f"the {name} is named twice")
    _refuse(targets, sources % cp_size != targets % cp_size, "the target is not in the lane of the source")


def pages_of_slots(slots: Ids, page_size: int) -> Ids:
    """slots: [n] rows of a pool (page * page_size + offset) that are meant to be whole pages, one after the other. Returns the pages [n / page_size];
    raises ValueError that names the first group that is partial, does not begin at a page boundary, or is not contiguous."""
    if len(slots) % page_size:
        raise ValueError(f"{len(slots)} slots end with a partial page of {page_size}")
    groups = slots.reshape(-1, page_size)
    _refuse(groups[:, 0], groups[:, 0] % page_size != 0, f"a group of {page_size} slots that begins here is not aligned to a page")
    _refuse(groups[:, 0], (np.diff(groups, axis=1) != 1).any(axis=1), "the slots of the page that begins here are not contiguous")
    return groups[:, 0] // page_size


def _refuse(ids: Ids, is_wrong: npt.NDArray[np.bool_], why: str) -> None:
    if is_wrong.any():
        index = int(is_wrong.argmax())
        raise ValueError(f"entry {index} ({ids[index]}): {why}")
