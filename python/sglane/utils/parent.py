"""A process that must not outlive the one that started it: `python -m sglane.utils.parent PID MODULE` is `python -m MODULE` that ends with PID.

Bound before MODULE is imported: that takes seconds, in which PID may be killed.
"""
import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """No orphan survives the parent, however that ends (Linux). parent: its process id; None: whoever is it now."""
    expected = os.getppid() if parent is None else parent
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != expected:  # it ended before
        sys.exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    runpy.run_module(sys.argv[2], run_name="__main__", alter_sys=True)
