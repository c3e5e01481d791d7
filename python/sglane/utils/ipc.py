"""ZeroMQ PUSH/PULL channels that carry msgspec messages."""
from typing import Any

import msgspec
import zmq


class Sender:
    """Encodes and pushes messages to one PULL socket. One thread only."""

    def __init__(self, context: zmq.Context, address: str):
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(0)  # never drop, never block: the protocol itself bounds what is under way
        self._socket.setsockopt(zmq.LINGER, 2000)  # ms, so that a last error message still leaves
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Any) -> None:
        self._socket.send(self._encoder.encode(message), copy=False)

    def close(self) -> None:
        self._socket.close()


class Receiver:
    """Binds a PULL socket and decodes messages of the union `kind`."""

    def __init__(self, context: zmq.Context, address: str, kind: Any):
        self.socket = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        self.socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(kind)

    def poll(self, timeout_ms: int) -> bool:
        return bool(self.socket.poll(timeout_ms))

    def recv(self) -> Any:
        """Block until a message is there."""
        return self._decoder.decode(self.socket.recv())

    def drain(self) -> list[Any]:
        """All messages that are there now, without waiting."""
        messages = []
        while self.socket.poll(0):
            messages.append(self._decoder.decode(self.socket.recv()))
        return messages

    def close(self) -> None:
        self.socket.close(linger=0)
