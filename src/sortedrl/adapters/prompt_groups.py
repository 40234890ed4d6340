"""Whole prompt groups that another framework generates, stores and hands out: which of them an update takes.

verl's and NeMo-RL's hooks choose among complete groups; they do not start or interrupt answers. So a group is one
sample here. The buffer and its ledger know every group that was seen, in what order it came and which update took it.

Guarantees: an update takes exactly the groups it asks for; a group is taken once, also after the trainer was killed and
went back to a checkpoint; no group is dropped for being old; with `max_wait` no group that is there waits longer than
so many updates. `sortedrl ledger --verify` proves it from the file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sortedrl.buffer import Buffer
from sortedrl.errors import ConfigError, RunDirError
from sortedrl.ledger.compare import check_bounds, check_rules
from sortedrl.ledger.run_lock import RunLock
from sortedrl.ledger.store import Store
from sortedrl.records import FinishReason, Prompt, Sample, Segment
from sortedrl.schedule import Knobs, Order, resolve_knobs

LEDGER_FILE = "ledger.sqlite"
NOISE = "of the framework's engine"

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class CompleteGroup:
    """A prompt group whose answers are all there."""

    id: str
    num_tokens: int  # of its longest answer


class PromptGroups:
    """The groups that were seen and not yet trained, and the ledger of those that were."""

    def __init__(
        self, per_update: int, *, order: str = Order.SHORTEST_FIRST, max_wait: int = 4, run_dir: Path | None = None
    ) -> None:
        if order not in list(Order):
            raise ConfigError(f"order must be one of {', '.join(Order)}, not {order!r}")
        if per_update < 1 or max_wait < 1:
            raise ConfigError("an update takes at least one group, and a group waits at least one update")
        # No bound of ours: what the framework has written cannot be restarted by its sampler.
        self.knobs: Knobs = resolve_knobs(
            {"lookahead": "none", "max_staleness": "none", "interrupted": "resume", "order": order},
            per_update,
            exact_batch=True,
        )
        self.max_wait = max_wait
        self.run_dir = run_dir
        self._store: Store | None = None
        self._lock: RunLock | None = None
        self._buffer: Buffer | None = None
        self._number: dict[str, int] = {}  # samples by the group's id

    @property
    def buffer(self) -> Buffer:
        assert self._buffer is not None, "call `begin` first"
        return self._buffer

    @property
    def num_updates(self) -> int:
        return self.buffer.num_updates

    def begin(self, updates_done: int) -> None:
        """Start, or go on after so many updates, as the framework's checkpoint says."""
        if self._buffer is not None:
            return
        if self.run_dir is None:
            self._buffer = Buffer()
            self._buffer.version = self._buffer.num_updates = updates_done
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(self.run_dir)
        self._lock.acquire()
        try:
            self._begin_in(self.run_dir, updates_done)
        except BaseException:
            self._lock.release()
            self._lock = None
            raise

    def _begin_in(self, run_dir: Path, updates_done: int) -> None:
        path = run_dir / LEDGER_FILE
        if updates_done == 0:
            for old in run_dir.glob(f"{LEDGER_FILE}*"):
                old.unlink()
            self._store = Store.create(path, grouped=False, knobs=asdict(self.knobs), noise=NOISE)
            self._buffer = self._store.restore()
            return
        self._store, self._buffer = _reopen(path, updates_done, self.knobs)
        held = {sample.prompt.id: sample.id for sample in self._buffer.samples.values()}
        self._number = {**self._store.trained_prompts(), **held}
        self._buffer.publish(updates_done)

    def offer(self, groups: Iterable[CompleteGroup]) -> None:
        """Record complete groups; those that are known are passed over. What comes together is one cohort."""
        buffer = self.buffer
        new = [group for group in groups if group.id not in self._number]
        samples = [
            Sample(
                id=buffer.num_loaded + place,
                prompt=Prompt(id=group.id, tokens=(0,), content=group.id),
                index=0,
                epoch=0,
                cohort=buffer.next_cohort,
                seed=0,
                budget=max(group.num_tokens, 1),
            )
            for place, group in enumerate(new)
        ]
        if not samples:
            return
        buffer.load(samples)
        for sample, group in zip(samples, new, strict=True):
            buffer.start(sample)
            # The framework keeps the tokens and bounds their staleness; here a group counts from when it is complete.
            length = max(group.num_tokens, 1)
            buffer.append(sample, Segment(buffer.version, [0] * length, [0.0] * length), start=0)
            buffer.finish(sample, FinishReason.STOP)
            buffer.score(sample.id, sample.attempt, 0.0)
            self._number[group.id] = sample.id

    def take(self, present: Iterable[str], *, first: Iterable[str] = ()) -> list[str] | None:
        """The groups of the next update, recorded as trained; None if too few of those that are present are known.

        The groups in `first` come first, then those that have waited `max_wait` updates, then `order` decides.
        """
        buffer, count = self.buffer, self.knobs.update_batch
        numbers = [self._number.get(group, -1) for group in present]
        there = [buffer.scored[number] for number in numbers if number in buffer.scored]
        if len(there) < count:
            return None
        urgent = set(first)
        ranked = sorted(self._ranked(there), key=lambda sample: sample.prompt.id not in urgent)
        taken = buffer.take(ranked[:count])
        buffer.publish(buffer.version + 1)
        return [sample.prompt.id for sample in taken]

    def is_trained(self, group: str) -> bool:
        """Whether an update took this group."""
        number = self._number.get(group)
        return number is not None and number not in self.buffer.samples

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _ranked(self, samples: Sequence[Sample]) -> list[Sample]:
        cohorts, order = self.buffer.cohorts, self.knobs.order
        sign = -1 if order == Order.LONGEST_FIRST else 1
        by_length = order in (Order.SHORTEST_FIRST, Order.LONGEST_FIRST)

        def rank(sample: Sample) -> tuple[int, int, int]:
            waited = self.buffer.num_updates - cohorts[sample.cohort].loaded_update
            due = waited if waited >= self.max_wait else -1
            return (-due, sign * sample.num_tokens if by_length else 0, sample.id)

        return sorted(samples, key=rank)


def _reopen(path: Path, updates_done: int, knobs: Knobs) -> tuple[Store, Buffer]:
    if not path.is_file():
        raise RunDirError(
            f"the trainer continues after update {updates_done - 1}, and there is no {path}: restore the ledger of the "
            "run that made the checkpoint, or start anew"
        )
    store = Store.open(path)
    try:
        check_bounds(path, store.knobs, asdict(knobs))
        seq, last = store.seq_of_update(updates_done - 1), store.num_updates
    finally:
        store.close(commit=False)
    check_rules(path)
    if seq is None:
        raise RunDirError(
            f"the trainer continues after update {updates_done - 1}, and {path} ends with update {last - 1}: it is "
            "older than the checkpoint, or of another run; continue from an earlier checkpoint"
        )
    if last > updates_done:
        log.warning("%s has %d updates and the checkpoint %d: the ledger goes back", path, last, updates_done)
    return Store.reopen(path, seq)
