"""A schedule of the user's behind checks, so that a wrong decision is an error with a name and not lost or stale data.

`run/builders/loop.py` and the simulator wrap every schedule that is not ours in a `CheckedSchedule`. The checks come
before the controller acts on a decision: what breaks a rule raises ScheduleError and changes neither the buffer nor the
ledger. The rules are those of docs/reference/guarantees.md: a free slot for each start, whole groups of scored answers
in a batch, each sample once, tokens within the staleness bound, a cohort trained within its updates, no wait that
cannot end, and no change of the buffer by the schedule itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from sortedrl.buffer import Buffer
from sortedrl.errors import ScheduleError, SortedRLError, first_line
from sortedrl.records import Sample
from sortedrl.schedule.decisions import Schedule, due_cohorts, owed
from sortedrl.schedule.knobs import Fate, Knobs


class CheckedSchedule:
    """Passes on the decisions of `inner` that keep the rules; `name` is how messages call it."""

    def __init__(self, inner: Schedule, name: str) -> None:
        self.inner = inner
        self.name = name
        self._stalled: tuple[int, ...] | None = None  # the buffer's counts when nothing could happen any more

    def wants_cohort(self, buffer: Buffer, knobs: Knobs, slots: int) -> bool:
        wants = bool(self._ask(buffer, "wants_cohort", buffer, knobs, slots))
        if wants and buffer.cohorts and knobs.lookahead is not None and not knobs.flat_extra:
            num_open = buffer.next_cohort - next(iter(buffer.cohorts))
            if num_open > knobs.lookahead:
                self._refuse(f"wants_cohort asks for cohort {buffer.next_cohort}, past lookahead = {knobs.lookahead}")
        return wants

    def admit(self, buffer: Buffer, knobs: Knobs, slots: int) -> list[Sample]:
        answer = self._ask(buffer, "admit", buffer, knobs, slots)
        chosen = self._samples("admit", answer, "pending", buffer.pending)
        num_free = slots - buffer.num_running
        if len(chosen) > num_free:
            self._refuse(f"admit starts {len(chosen)} samples in {num_free} free slots")
        return chosen

    def choose_batch(self, buffer: Buffer, knobs: Knobs, *, has_data: bool = False) -> list[Sample] | None:
        chosen = self._ask(buffer, "choose_batch", buffer, knobs, has_data=has_data)
        if chosen is None:
            self._check_progress(buffer)
            return None
        batch = self._samples("choose_batch", chosen, "scored", buffer.scored)
        if not batch:
            self._refuse("choose_batch returns an empty batch: return None to wait")
        ids = {sample.id for sample in batch}
        for sample in batch:
            if any(sibling.id not in ids for sibling in buffer.group_of(sample).samples):
                self._refuse(f"choose_batch takes sample {sample.id} without all its siblings")
            self._check_staleness("choose_batch trains", buffer, knobs, sample)
        if knobs.exact_batch:
            self._check_exact(buffer, knobs, batch)
            return batch
        due = due_cohorts(buffer, knobs)
        late = [sample for sample in buffer.samples.values() if sample.cohort in due and sample.id not in ids]
        if late:
            self._refuse(
                f"choose_batch leaves sample {late[0].id} of cohort {late[0].cohort} behind, whose last update is this "
                f"one ({knobs.cohort_updates} updates by cohort_batches and lookahead)"
            )
        return batch

    def lacks_only_scores(self, buffer: Buffer, knobs: Knobs) -> bool:
        return bool(self._ask(buffer, "lacks_only_scores", buffer, knobs))

    def interrupts_at_publication(self, buffer: Buffer, knobs: Knobs) -> list[Sample]:
        answer = self._ask(buffer, "interrupts_at_publication", buffer, knobs)
        return self._samples("interrupts_at_publication", answer, "running", buffer.running)

    def decide_fates(self, buffer: Buffer, knobs: Knobs) -> list[tuple[Sample, Fate]]:
        answer = self._ask(buffer, "decide_fates", buffer, knobs)
        try:
            decided = [(sample, Fate(fate)) for sample, fate in answer]
        except (TypeError, ValueError):
            self._refuse(f"decide_fates returns {answer!r:.80}, not pairs of a sample and a fate")
        held = {**buffer.waiting, **buffer.calling, **buffer.finished, **buffer.scored}
        self._samples("decide_fates", [sample for sample, _ in decided], "interrupted or complete", held)
        for sample, fate in decided:
            if fate == Fate.WAIT:
                self._refuse(f"decide_fates lets sample {sample.id} wait: resume, replay or restart it")
            if fate == Fate.REPLAY and Fate.REPLAY not in (knobs.interrupted, knobs.on_bound):
                self._refuse(
                    f"decide_fates replays sample {sample.id}, and its knobs do not: set interrupted or on_bound to "
                    "replay, so that the engine is checked for it"
                )
            if fate != Fate.RESTART and sample.id in buffer.calling:
                self._refuse(f"decide_fates gives sample {sample.id} the fate {fate} while its environment works")
            if fate == Fate.RESUME and sample.id not in buffer.waiting:
                self._refuse(f"decide_fates resumes sample {sample.id}, whose answer is complete")
            if fate == Fate.RESUME:
                self._check_staleness("decide_fates resumes", buffer, knobs, sample)
        return decided

    # ---- checks -----------------------------------------------------------------------------------------------------

    def _ask(self, buffer: Buffer, decision: str, *arguments: Any, **options: Any) -> Any:
        ask: Callable[..., Any] = getattr(self.inner, decision)
        before = _counts(buffer)
        try:
            answer = ask(*arguments, **options)
        except SortedRLError:
            raise
        except Exception as error:  # the user's code
            why = f"{type(error).__name__}: {first_line(error)}"
            raise ScheduleError(f"the schedule {self.name} failed in {decision}: {why}; correct it") from error
        if _counts(buffer) != before:
            self._refuse(f"{decision} changed the buffer: a schedule only reads it")
        return answer

    def _samples(self, decision: str, answer: Any, state: str, held: Mapping[int, Sample]) -> list[Sample]:
        """The samples of an answer, once each; all of them must be in `held`."""
        if not isinstance(answer, Iterable):
            self._refuse(f"{decision} returns {answer!r:.80}, not a list of samples")
        chosen = list(answer)
        seen: set[int] = set()
        for sample in chosen:
            if not isinstance(sample, Sample):
                self._refuse(f"{decision} names {sample!r:.80}, which is not a sample")
            if held.get(sample.id) is not sample:
                self._refuse(f"{decision} names sample {sample.id}, which is not {state} but {sample.state}")
            if sample.id in seen:
                self._refuse(f"{decision} names sample {sample.id} twice")
            seen.add(sample.id)
        return chosen

    def _check_staleness(self, what: str, buffer: Buffer, knobs: Knobs, sample: Sample) -> None:
        staleness = buffer.staleness(sample, buffer.version)
        if knobs.max_staleness is not None and staleness > knobs.max_staleness:
            self._refuse(f"{what} sample {sample.id} at staleness {staleness}, past the bound {knobs.max_staleness}")

    def _check_exact(self, buffer: Buffer, knobs: Knobs, batch: list[Sample]) -> None:
        """With `exact_batch`: no more than U samples, and of old cohorts as many as their updates need."""
        if len(batch) > knobs.update_batch:
            self._refuse(f"choose_batch takes {len(batch)} samples, and exact_batch allows {knobs.update_batch}")
        for cohort, must in owed(buffer, knobs).items():
            if (found := sum(sample.cohort <= cohort for sample in batch)) < must:
                self._refuse(
                    f"choose_batch takes {found} samples of cohort {cohort} and older ones, and their last updates "
                    f"could not take the rest: take {must} or more"
                )

    def _check_progress(self, buffer: Buffer) -> None:
        """Refuse to wait if nothing runs, nothing is being scored, and the last round has changed nothing."""
        if buffer.running or buffer.calling or buffer.finished:
            self._stalled = None
            return
        counts = _counts(buffer)
        if counts == self._stalled:
            self._refuse(
                f"it starts no sample and gives no batch, and nothing runs: {len(buffer.pending)} samples are pending "
                f"and {len(buffer.scored)} scored, so the run would wait forever"
            )
        self._stalled = counts

    def _refuse(self, why: str) -> NoReturn:
        raise ScheduleError(f"the schedule {self.name} broke a rule: {why}; correct it (docs/guides/own_strategy.md)")


def _counts(buffer: Buffer) -> tuple[int, ...]:
    states = (buffer.running, buffer.calling, buffer.finished, buffer.scored)
    held = (buffer.unstarted, buffer.waiting, *states, buffer.cohorts)
    return (buffer.version, buffer.num_updates, buffer.num_loaded, buffer.num_started, *map(len, held))
