"""Messages over a TCP stream: four bytes of length (big endian), then msgpack."""
import asyncio
import struct
from typing import Any

import msgspec

#: A longer message is refused before it is read: somebody else is talking.
MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct(">I")


class BadFrame(ValueError):
    """What arrived is no message of this protocol."""


def frame(message: Any) -> bytes:
    """The bytes of one message."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader, kind: Any) -> Any:
    """The next message, one of the union `kind`. Raises asyncio.IncompleteReadError at the end of the stream, BadFrame for anything else."""
    (num_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if num_bytes > MAX_FRAME_BYTES:
        raise BadFrame(f"a message of {num_bytes} bytes is announced")
    body = await reader.readexactly(num_bytes)
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise BadFrame(str(error)) from error
