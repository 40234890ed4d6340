"""Which version wrote what: the publications of a simulated run, and the segments that attempts wrote between them.

`SimEngine` marks every publication under which something runs, and asks for an attempt's segments when it has to tell
them. What it keeps true: the segments of an attempt follow one another without a gap, none is empty, and each has the
slot time that decoding it took. Where tokens say nothing, all that decoded from one publication to the next share one
segment, but never as their last, since the last one may yet grow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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
        segments: list[Segment] = []
        if running.is_parked:
            return segments  # it told all when it was parked
        made, marks, first = running.progress, self._marks, running.since_mark
        start, since_s, ahead = running.delivered, running.since_s, running.since_length - running.since_step
        running.since_mark, running.since_s, running.delivered = len(marks), made.decode_s, ahead + made.steps
        if first == len(marks) and ahead + made.steps > start:  # no publication since: most answers are short
            tokens, logprobs = self._answers.written(running.request, start, ahead + made.steps - start, version)
            return [Segment(version, tokens, logprobs, made.decode_s - since_s)]
        stretches = [*marks[first:], (made.steps, made.decode_s, version)]
        shared = self._between[first + 1 :] if len(stretches) > 2 and self._answers.is_blank else ()
        for steps, decode_s, writer in (stretches[0], stretches[-1]) if shared else stretches:
            stop = ahead + steps
            if stop > start:
                tokens, logprobs = self._answers.written(running.request, start, stop - start, writer)
                segments.append(Segment(writer, tokens, logprobs, decode_s - since_s))
                start, since_s = stop, decode_s
            if shared:
                segments += shared
                steps, since_s, _ = marks[-1]
                start, shared = ahead + steps, ()
        if segments and self._between and segments[-1] is self._between[-1]:
            segments[-1] = replace(segments[-1])
        return segments
