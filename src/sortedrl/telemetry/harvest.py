"""The event of a harvest, made from its batch by the controller."""

from __future__ import annotations

from sortedrl.records import Batch, FinishReason
from sortedrl.telemetry import events


def batch_taken(t: float, batch: Batch, *, num_interrupted: int, num_paused: int) -> events.BatchTaken:
    samples = batch.samples
    return events.BatchTaken(
        t=t,
        update=batch.update,
        version=batch.version,
        samples=[s.id for s in samples],
        lengths=[s.num_tokens for s in samples],
        rewards=[s.reward or 0.0 for s in samples],
        staleness=[s.staleness(batch.version) for s in samples],
        staleness_token_sum=[
            sum((batch.version - segment.version) * len(segment.tokens) for segment in s.segments) for s in samples
        ],
        truncated=sum(s.finish_reason == FinishReason.LENGTH for s in samples),
        num_interrupted=num_interrupted,
        num_paused=num_paused,
        slot_s=sum(segment.slot_s for s in samples for segment in s.segments),
    )
