"""Requests and events as JSON and packed numbers, for an engine in a child process.

`child_launcher.py` and `child_program.py` use it on their ends of a `channel.py`: headers of plain
JSON, and tokens and log-probs as packed `Numbers`. Reading follows the order of writing.

Guarantees: what is unpacked equals what was packed, log-probs to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sortedrl.channel import Numbers
from sortedrl.engine.base import (
    Delta,
    EngineEvent,
    Failed,
    Finished,
    Partial,
    Request,
    Sampling,
    SegmentDelta,
    Span,
    Verified,
)
from sortedrl.engine.pool.actor_loop import Report
from sortedrl.records import FinishReason, Mode, Segment

# ---- requests --------------------------------------------------------------------------------------------------------


def pack_requests(requests: Iterable[Request], numbers: Numbers) -> list[Any]:
    return [_pack_request(request, numbers) for request in requests]


def unpack_requests(packed: Iterable[list[Any]], numbers: Numbers) -> list[Request]:
    return [_unpack_request(numbers, *fields) for fields in packed]


def _pack_request(request: Request, numbers: Numbers) -> list[Any]:
    s = request.sampling
    return [
        request.sample,
        request.attempt,
        numbers.put("q", request.prompt),
        request.budget,
        request.seed,
        [s.temperature, s.stop_tokens, s.top_k, s.top_p, s.min_p, s.stop_strings],
        request.mode.value,
        numbers.put("q", request.cached),
        list(request.spans),
        request.replay_tolerance,
    ]


def _unpack_request(
    numbers: Numbers,
    sample: int,
    attempt: int,
    num_prompt: int,
    budget: int,
    seed: int,
    sampling: list[Any],
    mode: str,
    num_cached: int,
    spans: list[list[Any]],
    replay_tolerance: float,
) -> Request:
    temperature, stop_tokens, top_k, top_p, min_p, stop_strings = sampling
    prompt = numbers.get("q", num_prompt)
    return Request(
        sample,
        attempt,
        prompt,
        budget,
        seed,
        Sampling(
            temperature=temperature,
            stop_tokens=tuple(stop_tokens),
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            stop_strings=tuple(stop_strings),
        ),
        Mode(mode),
        numbers.get("q", num_cached),
        [Span(*span) for span in spans],
        replay_tolerance,
    )


# ---- reports ---------------------------------------------------------------------------------------------------------


def pack_report(report: Report, numbers: Numbers) -> list[Any]:
    return [report.number, [_pack_event(event, numbers) for event in report.events]]


def unpack_report(packed: list[Any], numbers: Numbers) -> Report:
    number, events = packed
    return Report(number=number, events=[_unpack_event(numbers, *fields) for fields in events])


def _pack_event(event: EngineEvent, numbers: Numbers) -> list[Any]:
    head = [type(event).__name__, event.sample, event.attempt, event.clock]
    match event:
        case Delta():
            count = numbers.put("q", event.tokens)
            numbers.put("d", event.logprobs)
            return [*head, event.start, count, event.version, event.slot_s, event.verified]
        case Finished():
            return [*head, event.reason.value, event.start, _pack_segments(event.segments, numbers)]
        case SegmentDelta():
            return [*head, event.start, _pack_segments(event.segments, numbers)]
        case Verified():
            return [*head, event.cached, event.accepted]
        case Failed():
            return [*head, event.error]
        case Partial():
            return head
        case _:
            raise AssertionError(f"unknown engine event {event}")


def _unpack_event(numbers: Numbers, kind: str, sample: int, attempt: int, clock: float, *rest: Any) -> EngineEvent:
    match kind:
        case "Delta":
            start, count, version, slot_s, verified = rest
            tokens, logprobs = numbers.get("q", count), numbers.get("d", count)
            return Delta(sample, attempt, clock, start, tokens, logprobs, version, slot_s, verified)
        case "Finished":
            reason, start, segments = rest
            return Finished(sample, attempt, clock, FinishReason(reason), start, _unpack_segments(segments, numbers))
        case "SegmentDelta":
            start, segments = rest
            return SegmentDelta(sample, attempt, clock, start, _unpack_segments(segments, numbers))
        case "Verified":
            return Verified(sample, attempt, clock, *rest)
        case "Failed":
            return Failed(sample, attempt, clock, *rest)
        case "Partial":
            return Partial(sample, attempt, clock)
        case _:
            raise AssertionError(f"unknown engine event {kind}")


def _pack_segments(segments: Iterable[Segment], numbers: Numbers) -> list[Any]:
    packed: list[Any] = []
    for segment in segments:
        count = numbers.put("q", segment.tokens)
        numbers.put("d", segment.logprobs)
        packed.append([segment.version, count, segment.slot_s, segment.is_masked])
    return packed


def _unpack_segments(packed: Iterable[list[Any]], numbers: Numbers) -> list[Segment]:
    segments: list[Segment] = []
    for version, count, slot_s, is_masked in packed:
        tokens, logprobs = numbers.get("q", count), numbers.get("d", count)
        segments.append(Segment(version, tokens, logprobs, slot_s, is_masked))
    return segments
