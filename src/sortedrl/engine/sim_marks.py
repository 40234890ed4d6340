"""Which version wrote what: the publications of a simulated run, and the segments that attempts wrote between them.

`SimEngine` marks every publication under which something runs, and asks for an attempt's segments when it has to tell
them. What it keeps true: the segments of an attempt follow one another without a gap, none is empty, and each has the
slot time that decoding it took. Where tokens say nothing, all that decoded from one publication to the next share one
segment, but never as their last, since the last one may yet grow.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from sortedrl.engine.base import Request
from sortedrl.engine.script import Answers
from sortedrl.engine.sim_attempt import Progress, Running
from sortedrl.records import Segment


class Marks:
    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._marks: list[tuple[int, float, int]] = []  # (steps, decode time) so far, version before
        self._between: list[Segment] = []  # for each of them, what an attempt wrote that decoded since the one before

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, made: Progress, version: int) -> None:
        """Another version than this one writes from here on; if this one wrote nothing, it leaves no mark."""
        steps, decode_s, _ = self._marks[-1] if self._marks else (0, 0.0, 0)
        if self._marks and made.steps == steps:
            return
        self._marks.append((made.steps, made.decode_s, version))
        zeros: Any = bytes(made.steps - steps) if self._answers.is_blank else b""
        self._between.append(Segment(version, zeros, zeros, made.decode_s - decode_s))

    def untold(self, running: Running, version: int) -> list[Segment]:
        """What an attempt wrote and no event has told; `version` is the one that writes now."""
        if running.is_parked:
            return []  # it told all when it was parked
        made, num_marks, first = running.progress, len(self._marks), running.since_mark
        start, since_s, ahead = running.delivered, running.since_s, running.since_length - running.since_step
        end = running.delivered = ahead + made.steps
        running.since_mark, running.since_s = num_marks, made.decode_s
        written, request = self._answers.written, running.request
        segments: list[Segment] = []
        if first < num_marks:
            steps, decode_s, writer = self._marks[first]
            if (count := ahead + steps - start) > 0:
                segments.append(Segment(writer, *written(request, start, count, writer), decode_s - since_s))
            segments += self._whole(request, first + 1, ahead)
            steps, since_s, _ = self._marks[-1]
            start = ahead + steps
        if end > start:
            segments.append(Segment(version, *written(request, start, end - start, version), made.decode_s - since_s))
        elif segments and segments[-1] is self._between[-1]:
            segments[-1] = replace(segments[-1])
        return segments

    def _whole(self, request: Request, first: int, ahead: int) -> list[Segment]:
        """Of an attempt that decoded all the while: what it wrote from each mark to the next."""
        if self._answers.is_blank:
            return self._between[first:]
        return [
            Segment(writer, *self._answers.written(request, ahead + steps, until - steps, writer), until_s - decode_s)
            for (steps, decode_s, _), (until, until_s, writer) in pairwise(self._marks[first - 1 :])
        ]
