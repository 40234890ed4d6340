"""Messages between a run and a process of its own, over a pair of connected sockets.

An engine's process (`engine/pool/child_launcher.py`) and a learner's (`learner/forked.py`) use it, each with one end
here and one there. A message is a header, which is plain JSON, and bytes that the header explains: `Numbers` packs
tokens and log-probs, which are exact that way and cost a microsecond. The pair has no name, so nobody else can connect
to it. Nothing is pickled.

Guarantees: messages arrive whole and in order; two ends that send at once cannot block each other, because an end that
cannot send reads meanwhile; the end of the other process raises `ChannelClosed`.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

_LENGTHS = struct.Struct("<QQ")  # of header and bytes
_CHUNK = 1 << 18  # bytes read at once
_BYTES = 8  # of a packed number


class ChannelClosed(Exception):
    """The process at the other end has ended, or closed its end."""


class Numbers:
    """The numbers behind a header: written in order, and read in the same order."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray()
        self._given = data
        self._read = 0

    def put(self, kind: str, values: Sequence[float]) -> int:
        """Append numbers, of kind "q" (integers) or "d" (floats); returns how many."""
        self.data += array(kind, values).tobytes()
        return len(values)

    def get(self, kind: str, count: int) -> list[Any]:
        begin, self._read = self._read, self._read + count * _BYTES
        return array(kind, self._given[begin : self._read]).tolist()


class Message(NamedTuple):
    header: Any
    data: bytes


class Channel:
    """One end. Any thread may use it, one at a time."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._fd = end.fileno()
        self._buffer = bytearray()
        self._arrived: deque[Message] = deque()
        self._lock = threading.Lock()
        self._readable, self._either = select.poll(), select.poll()
        self._readable.register(self._fd, select.POLLIN)
        self._either.register(self._fd, select.POLLIN | select.POLLOUT)

    def send(self, header: Any, data: bytes | bytearray = b"") -> None:
        """Send a message, and read what comes while the other end is not ready for it."""
        text = json.dumps(header, separators=(",", ":")).encode()
        with self._lock:
            left = memoryview(b"".join((_LENGTHS.pack(len(text), len(data)), text, data)))
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except BlockingIOError:
                    self._either.poll()
                    self._read()
                except OSError as error:
                    raise ChannelClosed(f"the other process has ended ({error.strerror})") from error

    def receive(self, timeout: float | None = 0.0) -> Message | None:
        """The next message, or None if there is none within `timeout` seconds; without a timeout, wait for one."""
        deadline = None if timeout is None or timeout <= 0.0 else time.monotonic() + timeout
        while True:
            with self._lock:
                while not self._arrived and self._read():
                    pass
                if self._arrived:
                    return self._arrived.popleft()
            if timeout is not None and timeout <= 0.0:
                return None
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            # In milliseconds, at least one: a wait of 0 would spin, and the lock is free meanwhile.
            self._readable.poll(None if left is None else max(left * 1000, 1))

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> bool:
        """Read what has come, without waiting; returns whether there was anything."""
        try:
            chunk = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosed(f"the other process has ended ({error.strerror})") from error
        if not chunk:
            raise ChannelClosed("the other process has ended")
        self._buffer += chunk
        self._unpack()
        return True

    def _unpack(self) -> None:
        """Move the complete messages out of the buffer."""
        begin, held = 0, len(self._buffer)
        while held - begin >= _LENGTHS.size:
            num_text, num_data = _LENGTHS.unpack_from(self._buffer, begin)
            text = begin + _LENGTHS.size
            data, end = text + num_text, text + num_text + num_data
            if end > held:
                break
            self._arrived.append(Message(json.loads(self._buffer[text:data]), bytes(self._buffer[data:end])))
            begin = end
        del self._buffer[:begin]
