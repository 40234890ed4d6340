"""`events.jsonl` as it grows: each call gives the events that have come since the last.

The report reads a whole file with it, the dashboard follows one that a run is writing. What it keeps true: a line is
handed out once and only when it is complete; a file that was replaced or cut back, as a resumed run does, is read again
from its start; a file that is no event file is named as that.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from sortedrl.errors import RunDirError

Record = dict[str, Any]

FILE_NAME = "events.jsonl"
CHUNK_BYTES = 4 << 20
_MARK_BYTES = 64
_MAX_LINE_BYTES = 256 << 20  # the largest line names the samples of one cohort


class EventFile:
    """A position in the event file of a run directory."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / FILE_NAME
        self.num_lines = 0
        self.offset = 0  # behind the last complete line
        self.size = 0  # when it was last looked at
        self._inode = -1
        self._mark = b""  # the bytes before `offset`: in another file they would be others

    @property
    def is_cut_short(self) -> bool:
        """Whether the last line had no end when it was last looked at."""
        return self.size > self.offset

    def read(self) -> tuple[list[Record], bool]:
        """The next events, at most a few megabytes of them, and whether they begin the file anew."""
        if not self.path.parent.is_dir():
            raise RunDirError(f"{self.path.parent} is not a directory; name the directory of a run")
        try:
            with self.path.open("rb") as file:
                is_new = self._rewind(file)
                lines = self._lines(file)
        except FileNotFoundError:
            raise RunDirError(
                f"{self.path.parent} is no run: {self.path} is not a file; name a run directory that holds one"
            ) from None
        except OSError as error:
            raise RunDirError(f"cannot read {self.path}: {error.strerror}; check its permissions") from error
        return self._records(lines), is_new

    def _rewind(self, file: BinaryIO) -> bool:
        """Back to the start if this is not the file that was read before."""
        status = os.fstat(file.fileno())
        self.size = status.st_size
        is_same = status.st_ino == self._inode and status.st_size >= self.offset
        if is_same and self._mark:
            file.seek(self.offset - len(self._mark))
            is_same = file.read(len(self._mark)) == self._mark
        if not is_same:
            self._inode, self.offset, self.num_lines, self._mark = status.st_ino, 0, 0, b""
        file.seek(self.offset)
        return not is_same

    def _lines(self, file: BinaryIO) -> list[bytes]:
        data = file.read(CHUNK_BYTES)
        while (end := data.rfind(b"\n")) < 0 and len(data) < _MAX_LINE_BYTES:
            more = file.read(CHUNK_BYTES)
            if not more:
                return []
            data += more
        if end < 0:
            raise RunDirError(f"{self.path}, line {self.num_lines + 1}: no end of line; is it an event file of a run?")
        data = data[: end + 1]
        self.offset += len(data)
        self._mark = data[-_MARK_BYTES:]
        return data.split(b"\n")[:-1]

    def _records(self, lines: list[bytes]) -> list[Record]:
        if not lines:
            return []
        try:
            records = json.loads(b"[" + b",".join(lines) + b"]")  # one call: far faster than one a line
        except (ValueError, RecursionError):
            records = []
        if len(records) != len(lines) or not all(isinstance(record, dict) for record in records):
            records = [self._record(number, line) for number, line in enumerate(lines, start=self.num_lines + 1)]
        self.num_lines += len(lines)
        return records

    def _record(self, number: int, line: bytes) -> Record:
        try:
            record = json.loads(line.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError) as error:
            raise RunDirError(f"{self.path}, line {number}: not JSON; is it an event file of a run?") from error
        if not isinstance(record, dict):
            raise RunDirError(f"{self.path}, line {number}: no event; is it an event file of a run?")
        return record
