"""The schedule's decisions as pure functions, and how to replace them by your own.

The decisions: `wants_cohort` (load more prompts?), `admit` (which samples get free slots), `choose_batch` (the next
update batch, or keep waiting), `decide_fates` (how interrupted samples continue). Nothing here changes the buffer or
reads a clock: the controller, the simulator and other trainers call these functions and apply the results. They take
them as a `Schedule`; the package `sortedrl.schedule` is one, and a subclass of `SortedSchedule` is another.
docs/reference/guarantees.md has the table of transitions and the proofs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Protocol

from sortedrl.buffer import Buffer
from sortedrl.records import Cohort, Mode, Sample, Unit
from sortedrl.schedule.knobs import Admission, Fate, HarvestRule, Knobs, Order

# Module names, because every poll needs them and Python 3.11 looks up enum members slowly.
WAIT, RESUME, RESTART, REPLAY, DRAIN = Fate.WAIT, Fate.RESUME, Fate.RESTART, Fate.REPLAY, HarvestRule.DRAIN
LOAD_ORDER, NEW_FIRST, TAIL_LAST = Admission.LOAD_ORDER, Admission.NEW_FIRST, Admission.TAIL_LAST

# ---- the decisions --------------------------------------------------------------------------------------------------


def wants_cohort(buffer: Buffer, knobs: Knobs, slots: int) -> bool:
    """Whether to load the next cohort: all samples are trained, or slots would idle and the lookahead allows it."""
    if not buffer.cohorts:
        return True
    num_resting = len(buffer.unverified) if _verifies_on_demand(knobs) else 0
    if len(buffer.pending) + len(buffer.running) - num_resting >= slots:
        return False
    if knobs.open_trajectories is not None and buffer.num_open >= knobs.open_trajectories:
        return False
    if knobs.flat_extra and not buffer.num_in_work and buffer.num_counted(knobs.flat_extra) < knobs.update_batch:
        return True  # groups with equal rewards are replaced, whatever the lookahead
    return knobs.lookahead is None or buffer.next_cohort - next(iter(buffer.cohorts)) <= knobs.lookahead


def admit(buffer: Buffer, knobs: Knobs, slots: int) -> list[Sample]:
    """The pending samples that get a free slot now, in order."""
    if buffer.fed or knobs.open_trajectories is not None:
        return _admit_trajectories(buffer, knobs, slots - len(buffer.running))
    return _admit(buffer, knobs, slots)


def _admit(buffer: Buffer, knobs: Knobs, slots: int) -> list[Sample]:
    free = slots - len(buffer.running)
    if free <= 0 or not buffer.pending:
        return []
    if _verifies_on_demand(knobs):
        return _admit_and_verify(buffer, knobs, free)
    is_due, room = _due(buffer, knobs), _room(buffer, knobs)
    if is_due is not None and not (buffer.grouped or knobs.admission == TAIL_LAST):
        # Usually none of thousands is due; then the code below gives the same result much faster.
        is_due = is_due if any(map(is_due, _may_be_due(buffer, knobs))) else None
    if is_due is not None:
        chosen = sorted(_arrange(buffer, knobs, buffer.pending.values()), key=lambda s: not is_due(s))[:free]
        return chosen if room is None else [s for place, s in enumerate(chosen) if place < room or is_due(s)]
    free = free if room is None else min(free, room)
    if free == 0:
        return []
    if knobs.admission == TAIL_LAST:
        return _admit_tail_last(buffer, knobs, free)
    if knobs.admission in (LOAD_ORDER, NEW_FIRST):
        return _admit_in_load_order(buffer, knobs, free)
    return _arrange(buffer, knobs, buffer.pending.values())[:free]


def choose_batch(buffer: Buffer, knobs: Knobs, *, has_data: bool = False) -> list[Sample] | None:
    """The next update batch, in training order, or None while it has to wait for samples or for data to load."""
    if knobs.harvest == DRAIN:
        return _drain_batch(buffer, knobs)
    if not buffer.ready:
        return None
    if buffer.num_ready < knobs.update_batch and buffer.running:
        return None  # the checks below would find the same, but this runs at every poll
    may_grow = buffer.num_in_work or (has_data and knobs.flat_extra)
    if may_grow and buffer.num_counted(knobs.flat_extra) < knobs.update_batch:
        return None
    if _is_held_back(buffer, knobs):  # last, because it looks at every sample
        return None
    ready = list(buffer.ready.values())
    if knobs.exact_batch:
        ready = _exactly_a_batch(buffer, knobs, ready)
    elif knobs.overlap:
        ready = _at_most_a_batch(buffer, knobs, ready)
    return _in_order(ready, knobs.order)


def lacks_only_scores(buffer: Buffer, knobs: Knobs) -> bool:
    """Whether the next batch is complete but for scores that are being computed."""
    if not buffer.finished:
        return False
    if knobs.harvest == DRAIN:
        cohort = next(iter(buffer.cohorts.values()))
        if len(buffer.finished) + len(buffer.scored) < cohort.num_left:
            return False  # first, because the code below looks at every sample
        complete = sum(s.cohort == cohort.id for held in (buffer.finished, buffer.scored) for s in held.values())
        return complete == cohort.num_left
    if len(buffer.finished) + len(buffer.scored) < knobs.update_batch:
        return False  # the code below would find the same, but this runs at every poll
    soon = buffer.num_ready_soon
    if soon == 0 or buffer.num_counted(knobs.flat_extra) + soon < knobs.update_batch:
        return False
    if knobs.exact_batch:
        complete = _complete_groups(buffer, buffer.finished.values())
        soon_ready = [group for group in complete if not any(s.id in buffer.unverified for s in group.samples)]
        return not _lacking(buffer, knobs, [*buffer.ready.values(), *soon_ready])
    is_due = _due(buffer, knobs)
    under_way = chain(buffer.running.values(), buffer.calling.values(), _may_be_due(buffer, knobs))
    return is_due is None or not any(map(is_due, under_way))


def admission_needs_scores(buffer: Buffer, knobs: Knobs, slots: int, *, has_data: bool) -> bool:
    """Whether scores that are being computed decide if more samples start now (`_room`).

    So it is where equal rewards are replaced (`flat_extra`), at staleness 0 with `on_bound = wait`.
    """
    if not (knobs.flat_extra and knobs.waits_at_zero and buffer.finished) or knobs.harvest == DRAIN:
        return False
    num_counted = buffer.num_counted(knobs.flat_extra)
    if num_counted >= knobs.update_batch or num_counted + buffer.num_ready_soon < knobs.update_batch:
        return False
    may_start = bool(buffer.pending) or (has_data and wants_cohort(buffer, knobs, slots))
    return may_start and buffer.num_running < slots


def interrupts_at_publication(buffer: Buffer, knobs: Knobs) -> list[Sample]:
    """Running samples that cannot simply continue under the next version."""
    running: Iterable[Sample] = buffer.running.values()
    if knobs.goes_on_unverified:
        running = [sample for sample in running if not _may_go_on_unverified(buffer, knobs, sample)]
    if knobs.interrupted != RESUME:
        return list(running)
    if knobs.max_staleness is None:
        return []
    return [sample for sample in running if _exceeds(buffer, knobs, sample, buffer.version + 1)]


def is_provisional(buffer: Buffer, knobs: Knobs, sample: Sample, version: int) -> bool:
    """Whether the answer of a running sample must be verified before it can be trained at `version`.

    Until then it may go on over any cache.
    """
    return knobs.goes_on_unverified and _num_unverified(buffer, knobs, sample, version) > 0


def decide_fates(buffer: Buffer, knobs: Knobs) -> list[tuple[Sample, Fate]]:
    """After new weights are published: how each sample that holds tokens continues. Others stay as they are."""
    decisions: list[tuple[Sample, Fate]] = []
    for sample in buffer.waiting.values():
        if sample.mode is Mode.REPLAY and knobs.on_bound == REPLAY:
            continue  # it still waits for a replay, which its tokens may need however new they are
        if sample.segments:
            exceeds = _exceeds(buffer, knobs, sample, buffer.version)
            decisions.append((sample, knobs.on_bound if exceeds else knobs.interrupted))
    for sample in buffer.calling.values():  # other fates come when the environment is done
        exceeds = _exceeds(buffer, knobs, sample, buffer.version)
        if (knobs.on_bound if exceeds else knobs.interrupted) == RESTART:
            decisions.append((sample, RESTART))
    for complete in (buffer.finished, buffer.scored) if knobs.max_staleness is not None else ():
        decisions += [(s, knobs.on_bound) for s in complete.values() if _exceeds(buffer, knobs, s, buffer.version)]
    assert all(fate != WAIT for _, fate in decisions), "a sample at the bound was not waited for"
    return decisions


# ---- schedules of your own -------------------------------------------------------------------------------------------


class Schedule(Protocol):
    """The decisions that the controller asks for. They read the buffer and change nothing."""

    def wants_cohort(self, buffer: Buffer, knobs: Knobs, slots: int) -> bool: ...

    def admit(self, buffer: Buffer, knobs: Knobs, slots: int) -> list[Sample]: ...

    def choose_batch(self, buffer: Buffer, knobs: Knobs, *, has_data: bool = False) -> list[Sample] | None: ...

    def lacks_only_scores(self, buffer: Buffer, knobs: Knobs) -> bool: ...

    def interrupts_at_publication(self, buffer: Buffer, knobs: Knobs) -> list[Sample]: ...

    def decide_fates(self, buffer: Buffer, knobs: Knobs) -> list[tuple[Sample, Fate]]: ...


class SortedSchedule:
    """The decisions of this module as methods, to subclass. `knobs` are the knobs that define your strategy."""

    knobs: Mapping[str, Any] = {}

    def wants_cohort(self, buffer: Buffer, knobs: Knobs, slots: int) -> bool:
        return wants_cohort(buffer, knobs, slots)

    def admit(self, buffer: Buffer, knobs: Knobs, slots: int) -> list[Sample]:
        return admit(buffer, knobs, slots)

    def choose_batch(self, buffer: Buffer, knobs: Knobs, *, has_data: bool = False) -> list[Sample] | None:
        return choose_batch(buffer, knobs, has_data=has_data)

    def lacks_only_scores(self, buffer: Buffer, knobs: Knobs) -> bool:
        return lacks_only_scores(buffer, knobs)

    def interrupts_at_publication(self, buffer: Buffer, knobs: Knobs) -> list[Sample]:
        return interrupts_at_publication(buffer, knobs)

    def decide_fates(self, buffer: Buffer, knobs: Knobs) -> list[tuple[Sample, Fate]]:
        return decide_fates(buffer, knobs)


DECISIONS = tuple(name for name in vars(Schedule) if not name.startswith("_"))


# ---- which samples are due ------------------------------------------------------------------------------------------


def _exceeds(buffer: Buffer, knobs: Knobs, sample: Sample, version: int) -> bool:
    return knobs.max_staleness is not None and buffer.staleness(sample, version) > knobs.max_staleness


def _due(buffer: Buffer, knobs: Knobs) -> Callable[[Sample], bool] | None:
    """A test for the samples that the next update must take, or None if there are none.

    It must take the rest of a cohort whose last allowed update it is. With `on_bound = wait` it must also take samples
    that would exceed the staleness bound one version later, each with its siblings. With `exact_batch` it must take as
    many as `owed` says, and samples are due while too few of them are ready; `Knobs` admits `wait` only where the
    cohort's updates keep the staleness bound too.
    """
    if knobs.exact_batch and knobs.harvest != DRAIN:
        lacking = _lacking(buffer, knobs, buffer.ready.values())
        return (lambda s: s.cohort <= lacking[-1]) if lacking else None
    bound = knobs.max_staleness if knobs.on_bound == WAIT else None
    cohorts = due_cohorts(buffer, knobs)
    if bound is None:
        return (lambda s: s.cohort in cohorts) if cohorts else None
    first_kept = buffer.version + 1 - bound  # a sample with an older token would exceed the bound

    def is_due_alone(sample: Sample) -> bool:
        oldest = buffer.oldest_version(sample)
        return (oldest is not None and oldest < first_kept) or sample.cohort in cohorts

    return (lambda s: any(map(is_due_alone, buffer.group_of(s).samples))) if buffer.grouped else is_due_alone


def due_cohorts(buffer: Buffer, knobs: Knobs) -> set[int]:
    """Cohorts whose last allowed update is the next one."""
    updates = knobs.cohort_updates or math.inf
    return {c.id for c in buffer.cohorts.values() if buffer.num_updates >= c.loaded_update + updates - 1}


def owed(buffer: Buffer, knobs: Knobs) -> dict[int, int]:
    """With `exact_batch`: how many samples of each cohort and the older ones the next update must take at least.

    An update takes U samples. If it took fewer of these, the updates that the cohort has left could not take the rest.
    Cohorts of which the next update needs to take none are left out.
    """
    if knobs.cohort_updates is None:
        return {}
    owed: dict[int, int] = {}
    num_left = 0
    for cohort in buffer.cohorts.values():  # oldest first, so deadlines never decrease
        num_left += cohort.num_left
        num_later = cohort.loaded_update + knobs.cohort_updates - buffer.num_updates - 1  # updates after the next one
        if (must := num_left - num_later * knobs.update_batch) > 0:
            owed[cohort.id] = must
    return owed


def _lacking(buffer: Buffer, knobs: Knobs, ready: Iterable[Unit]) -> list[int]:
    """The cohorts, oldest first, of which (and of older ones) fewer samples are in `ready` than `owed`.

    The youngest cohort is left out: no sample is younger, so any full batch holds what is owed of it.
    """
    required = owed(buffer, knobs)
    if not required:
        return []
    required.pop(next(reversed(buffer.cohorts)), None)
    of_cohort: Counter[int] = Counter()
    for group in ready:
        of_cohort[group.cohort] += len(group.samples)
    return [c for c, must in required.items() if sum(n for older, n in of_cohort.items() if older <= c) < must]


def _may_be_due(buffer: Buffer, knobs: Knobs) -> Iterable[Sample]:
    """The pending samples that can be due. Samples that never ran are due only through their cohort or siblings."""
    by_cohort = buffer.grouped or knobs.exact_batch or due_cohorts(buffer, knobs)
    return (buffer.pending if by_cohort else buffer.waiting).values()


def _room(buffer: Buffer, knobs: Knobs) -> int | None:
    """How many samples that are not due may start now; None: as many as there are free slots.

    Once a batch is ready, no more samples start than the updates within the staleness bound can train in batches of
    that size; more would make a batch larger. At staleness 0 none starts, since the update would have to wait for it;
    there answers that lack only a score count as ready, so what starts does not depend on when scores come. (Where
    equal rewards are replaced, only scores can tell, and the loop waits for them: `admission_needs_scores`.)
    """
    bound = knobs.max_staleness
    if bound is None or knobs.harvest == DRAIN or not (knobs.overlap or knobs.waits_at_zero):
        return None
    num_complete = buffer.num_counted(knobs.flat_extra)
    if knobs.waits_at_zero and not knobs.flat_extra:
        num_complete += buffer.num_ready_soon
    if num_complete < knobs.update_batch:
        return None
    num_updates = buffer.version + bound + 1 - buffer.num_updates  # one less while an update is under way
    return max(0, num_updates * knobs.update_batch - (len(buffer.samples) - len(buffer.unstarted)))


def _is_held_back(buffer: Buffer, knobs: Knobs) -> bool:
    """Whether the update must take a sample that is not ready yet."""
    if knobs.exact_batch:
        return bool(_lacking(buffer, knobs, buffer.ready.values()))
    is_due = _due(buffer, knobs)
    if is_due is None:
        return False
    if not buffer.grouped:
        working = chain(buffer.running.values(), buffer.calling.values(), buffer.finished.values())
        unready = chain(working, _may_be_due(buffer, knobs))
    else:
        unready = (sample for sample in buffer.samples.values() if not buffer.group_of(sample).is_ready)
    return any(map(is_due, unready))


# ---- answers that go on unverified ----------------------------------------------------------------------------------


def _num_unverified(buffer: Buffer, knobs: Knobs, sample: Sample, version: int) -> int:
    """How many updates up to `version` the answer of a running sample has gone through that a replay must make good.

    They count from its oldest token, or from the begin of its attempt. Where interrupted answers resume, those within
    the staleness bound do not count.
    """
    staleness = buffer.staleness(sample, version)
    if knobs.interrupted == REPLAY:
        return staleness
    return 0 if knobs.max_staleness is None else staleness - knobs.max_staleness


def _may_go_on_unverified(buffer: Buffer, knobs: Knobs, sample: Sample) -> bool:
    """Whether a running sample goes on as it is under the next version, and is verified later."""
    num_unverified = _num_unverified(buffer, knobs, sample, buffer.version + 1)
    return num_unverified > 0 and (knobs.max_unverified is None or num_unverified <= knobs.max_unverified)


# ---- verification on demand -----------------------------------------------------------------------------------------

MAX_AHEAD = 2  # update batches of complete answers that may wait before no more samples start


def _verifies_on_demand(knobs: Knobs) -> bool:
    """Whether complete answers past the bound are verified only when a batch needs them.

    More answers than one batch may be complete when an update ends: with overlap, and if they went on unverified. Those
    that the next batch does not take would have to be verified again after it.
    """
    return knobs.goes_on_unverified or (knobs.overlap and knobs.on_bound == REPLAY and knobs.harvest != DRAIN)


def _admit_and_verify(buffer: Buffer, knobs: Knobs, free: int) -> list[Sample]:
    """First the complete answers that the next batch needs, which leave their slots at once; then unfinished samples.

    Replay keeps the bound, whatever starts now. So samples start until complete answers for `MAX_AHEAD` batches wait.
    """
    needed, unverified = _needed_answers(buffer, knobs)[:free], buffer.unverified
    free -= len(needed)
    if free == 0:
        return needed
    is_due = _due(buffer, knobs)
    if is_due is None and knobs.admission == LOAD_ORDER:
        started = [s for s in _shortest_known_first(buffer) if s.id not in unverified]
        chosen = [*started, *islice(buffer.unstarted.values(), free)]
    else:
        chosen = _arrange(buffer, knobs, (s for s in buffer.pending.values() if s.id not in unverified))
    if is_due is not None:
        chosen.sort(key=lambda s: not is_due(s))
    if _is_far_ahead(buffer, knobs):
        chosen = [] if is_due is None else [s for s in chosen if is_due(s)]
    return [*needed, *chosen[:free]]


def _needed_answers(buffer: Buffer, knobs: Knobs) -> list[Sample]:
    """The complete answers to verify now: due ones, and as many as the next batch lacks, the oldest tokens first."""
    if not buffer.unverified or (buffer.is_updating and knobs.max_staleness == 0):
        return []  # after the update they would have to be verified again
    is_due, num_lacking = _due(buffer, knobs), knobs.update_batch - buffer.num_counted(knobs.flat_extra)
    under_way = _complete_groups(buffer, chain(buffer.running.values(), buffer.finished.values()))
    for group in under_way:
        if not any(sample.id in buffer.unverified for sample in group.samples):
            num_lacking -= len(group.samples)
    complete = _ranked(_complete_groups(buffer, buffer.unverified.values()), knobs.order)
    needed: list[Sample] = []
    for group in sorted(complete, key=lambda group: -group.staleness(buffer.version)):
        if num_lacking > 0 or (is_due is not None and any(map(is_due, group.samples))):
            num_lacking -= len(group.samples)
            needed += [sample for sample in group.samples if sample.id in buffer.unverified]
    return needed


def _is_far_ahead(buffer: Buffer, knobs: Knobs) -> bool:
    limit = MAX_AHEAD * knobs.update_batch
    if len(buffer.scored) + len(buffer.unverified) < limit:
        return False  # the code below would find the same, but this runs at every poll
    complete = _complete_groups(buffer, buffer.unverified.values())
    return buffer.num_counted(knobs.flat_extra) + sum(len(group.samples) for group in complete) >= limit


def _complete_groups(buffer: Buffer, samples: Iterable[Sample]) -> list[Unit]:
    """The groups of these samples in which every answer is complete, verified or not."""
    groups = {(group := buffer.group_of(s)).id: group for s in samples if s.finish_reason is not None}
    return [group for group in groups.values() if all(s.finish_reason is not None for s in group.samples)]


# ---- trajectories of several turns ----------------------------------------------------------------------------------


def _admit_trajectories(buffer: Buffer, knobs: Knobs, free: int) -> list[Sample]:
    """As `_admit`, but samples that came back from their environment come first, and few trajectories are opened.

    The order is: complete answers that the next batch needs, due samples, samples that were fed, all others. A sample
    without tokens starts only while fewer than `open_trajectories` are open, unless it is due.
    """
    if free <= 0 or not buffer.pending:
        return []
    chosen = _admit(buffer, knobs, len(buffer.running) + len(buffer.pending))
    if knobs.admission == TAIL_LAST:  # postponed are samples that an update interrupted, not those that were fed
        known = {sample.id for sample in chosen}
        chosen += [sample for sample in buffer.fed.values() if sample.id not in known]
    is_due = _due(buffer, knobs) or (lambda _: False)
    needed = buffer.unverified if _verifies_on_demand(knobs) else {}
    chosen.sort(key=lambda s: (s.id not in needed, not is_due(s), s.id not in buffer.fed))
    if knobs.open_trajectories is None:
        return chosen[:free]
    num_new = max(knobs.open_trajectories - buffer.num_open, 0)
    admitted: list[Sample] = []
    for sample in chosen:
        if not sample.segments and not is_due(sample):
            if num_new == 0:
                continue
            num_new -= 1
        admitted.append(sample)
    if not (admitted or buffer.running or buffer.calling) and knobs.admission == TAIL_LAST:
        admitted = _shortest_known_first(buffer)  # what was postponed keeps others from being opened
    return admitted[:free]


# ---- the order of admission -----------------------------------------------------------------------------------------


def _admit_in_load_order(buffer: Buffer, knobs: Knobs, free: int) -> list[Sample]:
    """Samples that hold tokens come first, then those that never ran; the other way round for restarts and `new-first`.

    Those that have run are in the order of their known lengths, the shortest first.
    """
    holds_work = knobs.interrupted != RESTART and knobs.admission != NEW_FIRST
    if not holds_work and len(buffer.unstarted) >= free:
        return list(islice(buffer.unstarted.values(), free))
    started = _shortest_known_first(buffer)
    unstarted = islice(buffer.unstarted.values(), free)
    return [*started, *unstarted][:free] if holds_work else [*unstarted, *started][:free]


def _admit_tail_last(buffer: Buffer, knobs: Knobs, free: int) -> list[Sample]:
    """Short rounds start somewhat more samples than they train; interrupted ones wait for the cohort's last round."""
    if not buffer.unstarted:
        return _admit_in_load_order(buffer, knobs, free)
    round_size = math.ceil(knobs.cohort_samples / (knobs.cohort_batches - 1))
    room = min(free, max(round_size - buffer.num_started, 0))
    if room == 0 and buffer.num_running == 0 and not buffer.calling:
        room = free  # failed attempts used up the round
    if room < len(buffer.unstarted):
        return list(islice(buffer.unstarted.values(), room))
    # Slots left over after the last unstarted sample go to the tail at once: the decision must not depend on being
    # asked a second time.
    return [*buffer.unstarted.values(), *_shortest_known_first(buffer)][:free]


def _shortest_known_first(buffer: Buffer) -> list[Sample]:
    """Pending samples that have run before, the shortest known first."""
    return sorted(buffer.waiting.values(), key=lambda s: (buffer.group_of(s).known_length, s.id))


def _arrange(buffer: Buffer, knobs: Knobs, samples: Iterable[Sample]) -> list[Sample]:
    """Pending samples in the order of `knobs.admission`."""
    if knobs.admission == Admission.LONGEST_EXPECTED_FIRST:
        return sorted(samples, key=lambda s: (-buffer.expected_work(s), s.id))
    is_new_first = knobs.interrupted == RESTART or knobs.admission == NEW_FIRST
    return sorted(
        samples, key=lambda s: ((s.id in buffer.unstarted) != is_new_first, buffer.group_of(s).known_length, s.id)
    )


# ---- batches --------------------------------------------------------------------------------------------------------


def _drain_batch(buffer: Buffer, knobs: Knobs) -> list[Sample] | None:
    """The next batch of the oldest cohort, once the whole cohort is scored (`harvest = drain`)."""
    cohort: Cohort | None = next(iter(buffer.cohorts.values()), None)
    if cohort is None or buffer.num_ready < cohort.num_left:
        return None  # first, because the code below looks at every sample
    groups = [group for group in buffer.ready.values() if group.cohort == cohort.id]
    if sum(len(group.samples) for group in groups) < cohort.num_left:
        return None
    return _in_order(_one_batch(groups, knobs), knobs.order)


def _at_most_a_batch(buffer: Buffer, knobs: Knobs, ready: list[Unit]) -> list[Unit]:
    """As many ready groups as make one update batch, those with the oldest tokens first.

    It takes more only where it must: the rest of a cohort whose last allowed update it is, and samples that would
    exceed the staleness bound one version later.
    """
    num_wanted = knobs.update_batch + buffer.num_ready - buffer.num_counted(knobs.flat_extra)
    if buffer.num_ready <= num_wanted:
        return ready
    cohorts = due_cohorts(buffer, knobs)
    bound = math.inf if knobs.max_staleness is None else knobs.max_staleness
    by_age: dict[tuple[bool, int], list[Unit]] = {}
    for group in ready:
        age = group.staleness(buffer.version)
        can_wait = (age < bound or knobs.on_bound == REPLAY) and group.cohort not in cohorts
        by_age.setdefault((can_wait, -age), []).append(group)
    taken: list[Unit] = []
    for (can_wait, _), groups in sorted(by_age.items()):
        num_there = sum(len(group.samples) for group in groups) if buffer.grouped else len(groups)
        taken += _first(groups, num_wanted, knobs.order) if can_wait and num_there > num_wanted else groups
        num_wanted -= num_there
    return taken


def _exactly_a_batch(buffer: Buffer, knobs: Knobs, ready: list[Unit]) -> list[Unit]:
    """Ready groups that make one update batch, the oldest cohort first, then the oldest tokens, then by `order`."""
    ranked = _ranked(ready, knobs.order)
    if buffer.num_ready > knobs.update_batch:
        ranked.sort(key=lambda group: (group.cohort, -group.staleness(buffer.version)))
    return _fitting(ranked, knobs.update_batch)


def _fitting(ranked: Iterable[Unit], num_samples: int) -> list[Unit]:
    """The first groups that hold at most `num_samples` samples together; a group that is too large is passed over."""
    fitting: list[Unit] = []
    for group in ranked:
        if len(group.samples) <= num_samples:
            fitting.append(group)
            num_samples -= len(group.samples)
        if num_samples == 0:
            break
    return fitting


def _one_batch(groups: list[Unit], knobs: Knobs) -> list[Unit]:
    """Choose the groups of one update batch from the groups that are left of a fully scored cohort."""
    if knobs.exact_batch:
        ranked = _ranked(groups, knobs.order)
        if knobs.order == Order.INTERLEAVED:
            step = math.ceil(sum(len(group.samples) for group in groups) / knobs.update_batch)
            ranked = [group for start in range(step) for group in ranked[start::step]]
        return _fitting(ranked, knobs.update_batch)
    if knobs.order == Order.INTERLEAVED:
        num_batches = max(1, round(sum(len(group.samples) for group in groups) / knobs.update_batch))
        return _ranked(groups, knobs.order)[::num_batches]
    return _first(groups, knobs.update_batch, knobs.order)


def _first(groups: list[Unit], num_samples: int, order: Order) -> list[Unit]:
    """The first groups in `order` that hold `num_samples` samples."""
    first: list[Unit] = []
    for group in _ranked(groups, order):
        if num_samples <= 0:
            break
        first.append(group)
        num_samples -= len(group.samples)
    return first


def _ranked(groups: list[Unit], order: Order) -> list[Unit]:
    """Groups sorted by length, or shuffled by their seeds."""
    ranked = sorted(groups, key=attrgetter("id"))  # two sorts, because key pairs would be thousands of objects
    if order == Order.SHUFFLED:
        ranked.sort(key=attrgetter("seed"))
    else:
        ranked.sort(key=attrgetter("num_tokens"), reverse=order == Order.LONGEST_FIRST)
    return ranked


def _in_order(groups: list[Unit], order: Order) -> list[Sample]:
    ranked = _ranked(groups, order)
    singles = [group for group in ranked if isinstance(group, Sample)]
    return singles if len(singles) == len(ranked) else [sample for group in ranked for sample in group.samples]
