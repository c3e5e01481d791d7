"""Compute threads of a thread that works beside the model's."""
import torch


def use_one_compute_thread() -> None:
    """The calling thread's operations stay on it, whatever number other threads set later; theirs is left to them.

    torch keeps one number for the process and gives it to a thread at that thread's first look, so the look must come right after the setting. Call
    it before the model's thread sets its own number.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()
