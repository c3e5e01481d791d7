"""Waiting in the kernel for a word of shared memory to change, and the one fence that the kernel gives (Linux futex(2))."""
import ctypes
import errno
import os
import platform

#: Number of the system call by machine.
_SYSCALLS = {"x86_64": 202, "aarch64": 98}
#: Machines on which this works.
MACHINES = tuple(_SYSCALLS)
_WAIT = 0  # not FUTEX_PRIVATE: waiter and waker are different processes
_WAKE = 1
_EVERYONE = 0x7FFFFFFF
#: Why a wait may end without a wake-up: the word had changed before, time is over, a signal came.
_EARLY = (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR)


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Futex:
    """Waits and wake-ups on aligned 32-bit words, addressed by their address in this process."""

    def __init__(self) -> None:
        """This machine must be one of MACHINES."""
        machine = platform.machine()
        self._number = ctypes.c_long(_SYSCALLS[machine])
        self._call = ctypes.CDLL(None, use_errno=True).syscall  # the interpreter's lock is free meanwhile
        self._wait, self._wake, self._everyone = ctypes.c_int(_WAIT), ctypes.c_int(_WAKE), ctypes.c_int(_EVERYONE)
        self._ordered = machine == "x86_64"
        self._own_word = ctypes.c_uint32(0)

    def wait(self, address: int, value: int, timeout_s: float) -> None:
        """Sleep while the word at `address` is `value`, at most `timeout_s` (< 1). May return early: look at the word again."""
        limit = _TimeSpec(0, int(timeout_s * 1e9))
        if self._call(self._number, ctypes.c_void_p(address), self._wait, ctypes.c_uint32(value), ctypes.byref(limit)) != 0:
            code = ctypes.get_errno()
            if code not in _EARLY:
                raise OSError(code, f"futex wait: {os.strerror(code)}")

    def wake(self, address: int) -> None:
        """Wake everyone who sleeps on the word."""
        self._call(self._number, ctypes.c_void_p(address), self._wake, self._everyone)

    def fence(self) -> None:
        """No load or store moves across this call.

        x86-64 keeps stores in their order and loads in theirs, which is all that is asked for here. Elsewhere (ARM) a wake-up on a word
        that nobody waits for does it: the kernel has a full barrier between entering FUTEX_WAKE and looking for waiters, because the
        protocol of futexes needs one.
        """
        if not self._ordered:
            self.wake(ctypes.addressof(self._own_word))
