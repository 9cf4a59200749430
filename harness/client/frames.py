"""Messages between the client's two processes over a private socket pair: each is a length, followed by a pickle."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

LENGTH = 4  # bytes of a message's length


def packed(message: Any) -> bytes:
    """Return a message as bytes: its length, then its pickle."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(LENGTH, "little") + body


class Unpacker:
    """A decoder that turns a stream of bytes back into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that these bytes complete."""
        self._rest += data
        while len(self._rest) >= LENGTH:
            end = LENGTH + int.from_bytes(self._rest[:LENGTH], "little")
            if len(self._rest) < end:
                return
            body = bytes(self._rest[LENGTH:end])
            del self._rest[:end]
            yield pickle.loads(body)
