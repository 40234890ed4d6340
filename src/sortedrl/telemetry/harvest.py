"""The event of a harvest, made from its batch by the controller."""

from __future__ import annotations

from sortedrl.records import Batch, FinishReason
from sortedrl.telemetry import events


def batch_taken(t: float, batch: Batch, *, num_interrupted: int, num_paused: int) -> events.BatchTaken:
    samples, version = batch.samples, batch.version
    lengths, staleness, token_sums, slot_s = [], [], [], 0.0
    for sample in samples:  # one walk over the segments, since a simulation has millions of them
        length = token_sum = 0
        for segment in sample.segments:
            count = len(segment.tokens)
            length += count
            if not segment.is_masked:
                token_sum += (version - segment.version) * count
            slot_s += segment.slot_s
        lengths.append(length)
        token_sums.append(token_sum)
        staleness.append(sample.staleness(version))
    return events.BatchTaken(
        t=t,
        update=batch.update,
        version=version,
        samples=[s.id for s in samples],
        lengths=lengths,
        rewards=[s.reward or 0.0 for s in samples],
        staleness=staleness,
        staleness_token_sum=token_sums,
        truncated=sum([s.finish_reason is FinishReason.LENGTH for s in samples]),
        num_interrupted=num_interrupted,
        num_paused=num_paused,
        slot_s=slot_s,
    )
