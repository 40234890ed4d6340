"""Copies what a reward worker prints to stderr of the trainer, within a limit per call.

`ProcessCaller` makes one for each worker process and passes `write_fd` as the worker's stdout and stderr. So the limit
also holds for C code and for programs that a reward function starts.

Guarantees: a call adds at most `MAX_OUTPUT` bytes and one line that says that the rest is dropped; control characters
are escaped, since the output may quote a model; the worker never waits because of output that is dropped.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import threading

from sortedrl.reward.worker import printable

MAX_OUTPUT = 64 << 10  # bytes per call
_STDERR = 2
_CLOSE_TIMEOUT_S = 1.0  # for the last output; a program that left the worker's process group may keep the pipe open


class WorkerOutput:
    """A pipe from a worker and the thread that empties it."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()  # the caller closes `write_fd` once the worker has it
        self.num_dropped = 0  # bytes of the current call
        self._num_left = MAX_OUTPUT
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._copy, name="reward-output", daemon=True)
        self._thread.start()

    def start_call(self) -> None:
        """Begin a new limit."""
        with self._lock:
            self._num_left = MAX_OUTPUT
            self.num_dropped = 0

    def close(self) -> None:
        """Wait for the last output of a worker that has ended."""
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _copy(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        with contextlib.closing(os.fdopen(self._read_fd, "rb", buffering=0)) as source:
            while chunk := source.read(MAX_OUTPUT):
                text, is_cut = self._take(chunk, decoder)
                if is_cut:
                    text += "\nreward worker: a call printed more than 64 KiB; the rest of its output is dropped\n"
                with contextlib.suppress(OSError):  # stderr is closed or full: the worker must not wait for it
                    _write_all(printable(text, keep="\n\t").encode("utf-8", "backslashreplace"))

    def _take(self, chunk: bytes, decoder: codecs.IncrementalDecoder) -> tuple[str, bool]:
        """The part of a chunk that is within the limit, and whether this chunk is the first that exceeds it."""
        with self._lock:
            shown = chunk[: self._num_left]
            is_cut = len(shown) < len(chunk) and self.num_dropped == 0
            self._num_left -= len(shown)
            self.num_dropped += len(chunk) - len(shown)
        text = decoder.decode(shown)
        if is_cut:
            decoder.reset()
        return text, is_cut


def _write_all(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(_STDERR, view) :]
