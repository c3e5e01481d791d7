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
        self._socket.setsockopt(zmq.IPV6, _is_ipv6(address))
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Any) -> None:
        self._socket.send(self._encoder.encode(message), copy=False)

    def close(self) -> None:
        self._socket.close()


class Receiver:
    """Binds a PULL socket and decodes messages of the union `kind`."""

    def __init__(self, context: zmq.Context, address: str, kind: Any, second_address: str = ""):
        """second_address: where it listens too; empty: nowhere."""
        self.socket = context.socket(zmq.PULL)
        self.socket.set_hwm(0)
        for each in filter(None, (address, second_address)):
            self.socket.setsockopt(zmq.IPV6, _is_ipv6(each))
            self.socket.bind(each)
        self._decoder = msgspec.msgpack.Decoder(kind)

    @property
    def address(self) -> str:
        """The address bound last, with its port even if that was left open (*)."""
        return self.socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()

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


def _is_ipv6(address: str) -> bool:
    return address.startswith("tcp://[")
