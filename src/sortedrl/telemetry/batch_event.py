"""`BatchTaken`, the event of a harvest: the batch, and what the engine did since the harvest before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter

from sortedrl.engine.base import Engine, EngineStats
from sortedrl.records import Batch, FinishReason
from sortedrl.telemetry import events

LENGTH = FinishReason.LENGTH  # a module name, because Python 3.11 looks up enum members slowly
_slot_s = attrgetter("slot_s")


class EngineAccount:
    """The engine's counters from one harvest to the next, without evaluations."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = engine.stats()

    def since_last(self) -> EngineStats:
        """Counters since the last call, or since the account was made."""
        stats = self._engine.stats()
        since, self._before = stats.minus(self._before), stats
        return since

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Context in which the engine's work does not count."""
        before = self._engine.stats()
        yield
        self._before = self._before.plus(self._engine.stats().minus(before))


def batch_taken(t: float, batch: Batch, since: EngineStats, num_interrupted: int, num_paused: int) -> events.BatchTaken:
    samples, version = batch.samples, batch.version
    answers = [sample.segments for sample in samples]
    slot_s = sum(map(_slot_s, chain.from_iterable(answers)))
    return events.BatchTaken(
        t=t,
        update=batch.update,
        version=version,
        samples=[s.id for s in samples],
        lengths=[s.num_tokens for s in samples],
        rewards=[s.reward or 0.0 for s in samples],
        staleness=[version - segments[0].version if segments else 0 for segments in answers],  # of its oldest token
        staleness_token_sum=[
            sum([(version - s.version) * len(s.tokens) for s in segments if not s.is_masked]) for segments in answers
        ],
        truncated=sum([s.finish_reason is LENGTH for s in samples]),
        num_interrupted=num_interrupted,
        num_paused=num_paused,
        slot_s=slot_s,
        busy_s=since.busy_slot_s,
        prefill_s=since.prefill_slot_s,
        prompt_tokens=since.prompt_tokens,
        recomputed_tokens=since.recomputed_tokens,
    )
