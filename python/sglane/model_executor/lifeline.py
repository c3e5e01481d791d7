"""A rank on another host must not outlive the server, even when its own launcher is stopped and cannot kill it."""
import logging
import os
import socket
import threading

from sglane.plan.nodes import Lifeline
from sglane.utils.addresses import HostPort
from sglane.utils.frames import frame

logger = logging.getLogger(__name__)

CONNECT_S = 10.0


def hold_lifeline(address: str, rank: int) -> None:
    """Connect to node 0's launcher at HOST:PORT; the process ends when that connection does. Raises OSError if nobody is there.

    A thread waits, because the main thread may be inside a collective that never ends.
    """
    target = HostPort.parse(address)
    line = socket.create_connection((target.host, target.port), CONNECT_S)
    line.settimeout(None)
    line.sendall(frame(Lifeline(rank)))
    threading.Thread(target=_wait, args=(line,), name="lifeline", daemon=True).start()


def _wait(line: socket.socket) -> None:
    try:
        while line.recv(4096):
            pass
    except OSError as error:
        logger.warning("the connection to node 0 failed: %s", error)
    logger.error("node 0 is gone, this rank ends")
    os._exit(1)
