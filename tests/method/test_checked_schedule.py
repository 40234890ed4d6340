"""Schedules of the user's: ours pass every check and decide as ever, and each way to break a rule is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import pytest

from sortedrl.buffer import Buffer
from sortedrl.errors import ScheduleError
from sortedrl.records import FinishReason, Prompt, Sample
from sortedrl.schedule import PRESETS, Fate, Knobs, SortedSchedule, Strategy, owed
from sortedrl.schedule.checked import CheckedSchedule
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import Trace

LENGTHS = [(7 * number) % 41 + 3 for number in range(96)]
TRACE = Trace(lengths=LENGTHS, prompts=[number // 2 for number in range(96)], cap=50, source="a test")
OPTIONS: dict[str, Any] = {"slots": 8, "update_batch": 8, "divergence": 0.01, "update_s": 5.0}


def knobs_of(strategy: Strategy) -> dict[str, Any]:
    """A preset as a user would write it."""
    return {name: "none" if value is None else value for name, value in PRESETS[strategy].items()}


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("strategy", list(Strategy))
def test_our_schedule_behind_checks_decides_as_without(strategy: Strategy, group_size: int) -> None:
    own = type("Own", (SortedSchedule,), {"knobs": knobs_of(strategy)})
    options = {
        **OPTIONS,
        "group_size": group_size,
        "order": "shuffled",
        "lookahead": knobs_of(strategy).get("lookahead", 1),
    }
    checked = simulate(TRACE, strategy=own, **options)
    plain = simulate(TRACE, strategy=strategy.value, **options)
    assert checked.strategy == f"<{__name__}.Own>"
    assert checked.model_dump(exclude={"strategy"}) == plain.model_dump(exclude={"strategy"})


def run_with(**decisions: Callable[..., Any]) -> None:
    """Simulate a schedule that takes some decisions otherwise; each gets ours first."""

    def method(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def decide(self: Any, buffer: Buffer, knobs: Knobs, *arguments: Any, **options: Any) -> Any:
            return change(getattr(SortedSchedule, name)(self, buffer, knobs, *arguments, **options), buffer, knobs)

        return decide

    methods = {name: method(name, change) for name, change in decisions.items()}
    knobs = {"interrupted": "resume", "max_staleness": 1, "on_bound": "restart", "lookahead": 1}
    simulate(TRACE, strategy=type("Bad", (SortedSchedule,), {"knobs": knobs, **methods}), **OPTIONS)


def start(ours: list[Sample], buffer: Buffer, knobs: Knobs) -> list[Sample]:
    """A schedule that reports a change and makes it as well."""
    for sample in ours:
        buffer.start(sample)
    return ours


def all_scored(ours: Any, buffer: Buffer, knobs: Knobs) -> list[Sample] | None:
    return list(buffer.scored.values()) or None


def without_oldest(ours: list[Sample] | None, buffer: Buffer, knobs: Knobs) -> list[Sample] | None:
    """Leaves the first sample of every cohort for later, as long as there are others."""
    kept = [sample for sample in ours or () if sample.id % 32]
    return kept or None


@pytest.mark.parametrize(
    ("decision", "change", "message"),
    [
        ("admit", lambda ours, b, k: [*ours, *ours], r"admit names sample 0 twice"),
        ("admit", lambda ours, b, k: list(b.pending.values()), r"admit starts \d+ samples in \d+ free slots"),
        ("admit", lambda ours, b, k: [*ours[1:], *list(b.running.values())[:1]], r"which is not pending but running"),
        ("admit", lambda ours, b, k: None, r"admit returns None, not a list of samples"),
        ("admit", lambda ours, b, k: [sample.id for sample in ours], r"admit names 0, which is not a sample"),
        (
            "admit",
            lambda ours, b, k: [],
            r"starts no sample and gives no batch, and nothing runs: 32 samples are pending",
        ),
        ("admit", lambda ours, b, k: 1 // 0, r"failed in admit: ZeroDivisionError: .*; correct it"),
        ("admit", start, r"admit changed the buffer: a schedule only reads it"),
        ("choose_batch", lambda ours, b, k: [], r"choose_batch returns an empty batch: return None to wait"),
        ("choose_batch", lambda ours, b, k: ours and [*ours, ours[0]], r"choose_batch names sample \d+ twice"),
        ("choose_batch", lambda ours, b, k: [*b.running.values()] or None, r"which is not scored but running"),
        (
            "choose_batch",
            lambda ours, b, k: None,
            r"gives no batch, and nothing runs: 0 samples are pending and 64 scored",
        ),
        (
            "choose_batch",
            without_oldest,
            r"leaves sample 0 of cohort 0 behind, whose last update is this one \(8 updates",
        ),
        ("wants_cohort", lambda ours, b, k: True, r"wants_cohort asks for cohort 2, past lookahead = 1"),
        ("wants_cohort", lambda ours, b, k: False, r"nothing runs: 0 samples are pending and 0 scored"),
        (
            "interrupts_at_publication",
            lambda ours, b, k: [*b.pending.values()][:1],
            r"which is not running but pending",
        ),
        (
            "decide_fates",
            lambda ours, b, k: [(s, "wait") for s in b.waiting.values()],
            r"lets sample \d+ wait: resume,",
        ),
        (
            "decide_fates",
            lambda ours, b, k: [(s, "replay") for s in b.waiting.values()],
            r"replays sample \d+, and its knobs",
        ),
        ("decide_fates", lambda ours, b, k: [(s, Fate.RESUME) for s in b.scored.values()], r"whose answer is complete"),
        ("decide_fates", lambda ours, b, k: [s for s, _ in ours], r"not pairs of a sample and a fate"),
        ("decide_fates", lambda ours, b, k: [(s, Fate.RESUME) for s, _ in ours], r"staleness 2, past the bound 1"),
    ],
)
def test_a_broken_rule_is_named(decision: str, change: Callable[..., Any], message: str) -> None:
    changes = {decision: change}
    if decision == "decide_fates":  # leave something to decide about
        changes["interrupts_at_publication"] = lambda ours, buffer, knobs: list(buffer.running.values())
        changes["choose_batch"] = lambda ours, buffer, knobs: ours and ours[:4]
    with pytest.raises(ScheduleError, match=message) as raised:
        run_with(**changes)
    assert "Bad" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_tokens_past_the_staleness_bound_are_not_trained() -> None:
    """Nothing is requeued at the bound, so old answers come up for training."""
    with pytest.raises(ScheduleError, match=r"choose_batch trains sample \d+ at staleness 2, past the bound 1"):
        run_with(interrupts_at_publication=lambda ours, b, k: [], decide_fates=lambda ours, b, k: [])


def test_half_a_group_is_not_trained() -> None:
    half = type(
        "Half",
        (SortedSchedule,),
        {"choose_batch": lambda self, buffer, knobs, has_data=False: all_scored(0, buffer, knobs)},
    )
    with pytest.raises(ScheduleError, match=r"choose_batch takes sample \d+ without all its siblings"):
        simulate(TRACE, strategy=half, group_size=2, **OPTIONS)


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("strategy", [strategy for strategy in Strategy if strategy != Strategy.ASYNC])
def test_our_schedule_passes_the_checks_with_exact_batches(strategy: Strategy, group_size: int) -> None:
    own = type("Own", (SortedSchedule,), {"knobs": {**knobs_of(strategy), "exact_batch": True}})
    lookahead = knobs_of(strategy).get("lookahead", 2)
    summary = simulate(TRACE, strategy=own, group_size=group_size, lookahead=lookahead, **OPTIONS)
    assert summary.samples == 96
    assert summary.updates == 96 // OPTIONS["update_batch"]


def two_cohorts() -> Buffer:
    """Two cohorts of four scored samples, of each of which the first update took two."""
    buffer = Buffer()
    for cohort in (0, 1):
        prompts = [Prompt(id=f"p{cohort}{n}", tokens=(1,), content="") for n in range(4)]
        buffer.load(
            [Sample(4 * cohort + n, prompt, 0, 0, cohort, seed=n, budget=9) for n, prompt in enumerate(prompts)]
        )
    for sample in list(buffer.pending.values()):
        buffer.start(sample)
        buffer.finish(sample, FinishReason.STOP)
        buffer.score(sample.id, sample.attempt, 0.0)
    buffer.take([buffer.samples[number] for number in (0, 1, 4, 5)])
    buffer.publish(1)
    return buffer


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ((2, 3, 6, 7), None),
        ((6, 7), "takes 0 samples of cohort 0 and older ones, .*: take 2 or more"),
        ((2, 3), "takes 2 samples of cohort 1 and older ones, .*: take 4 or more"),
    ],
)
def test_an_exact_batch_must_leave_no_more_than_later_updates_can_take(
    chosen: tuple[int, ...], message: str | None
) -> None:
    knobs = Knobs(update_batch=4, cohort_batches=1, lookahead=1, max_staleness=None, exact_batch=True)
    buffer = two_cohorts()
    assert owed(buffer, knobs) == {0: 2, 1: 4}  # both cohorts were loaded before update 0 and have updates 0 and 1

    class Chooses(SortedSchedule):
        def choose_batch(self, buffer: Buffer, knobs: Knobs, *, has_data: bool = False) -> list[Sample]:
            return [buffer.samples[number] for number in chosen]

    with nullcontext() if message is None else pytest.raises(ScheduleError, match=message):
        CheckedSchedule(Chooses(), "Chooses").choose_batch(buffer, knobs)


def test_a_batch_of_more_than_u_is_refused_with_exact_batches() -> None:
    class Greedy(SortedSchedule):
        knobs: Mapping[str, Any] = MappingProxyType({"exact_batch": True})

        def choose_batch(self, buffer: Buffer, knobs: Knobs, *, has_data: bool = False) -> list[Sample] | None:
            return list(buffer.scored.values()) if super().choose_batch(buffer, knobs, has_data=has_data) else None

    equal = Trace(lengths=[5] * 64, prompts=list(range(64)), cap=50, source="a test")
    with pytest.raises(ScheduleError, match="choose_batch takes 32 samples, and exact_batch allows 8"):
        simulate(equal, strategy=Greedy, **{**OPTIONS, "slots": 32})
