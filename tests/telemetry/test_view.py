"""Series of bounded size, the event file while it grows, and the view of a run."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sortedrl.errors import RunDirError
from sortedrl.telemetry.event_file import EventFile, event_from
from sortedrl.telemetry.events import RunEnded
from sortedrl.telemetry.run_reader import RunReader
from sortedrl.telemetry.sample_lives import MAX_LIVES, SampleLife, TokenAges
from sortedrl.telemetry.series import Ends, Thinned, TimeBins
from sortedrl.telemetry.view import MAX_BARS, RunView


@given(st.lists(st.integers(0, 9), max_size=90))
def test_thinned_points_stand_for_all(values: list[int]):
    series: Thinned[list[int]] = Thinned(8, lambda first, second: first + second)
    for value in values:
        series.append([value])
    assert [value for point in series for value in point] == values
    assert len(series) <= 8
    assert all(len(point) == series.stride for point in series.points[:-1])


def test_ends_keep_the_first_and_the_last():
    ends: Ends[int] = Ends(3)
    for value in range(5):
        ends.append(value)
    assert list(ends) == [0, 1, 2, 3, 4]
    assert ends.is_whole
    for value in range(5, 10):
        ends.append(value)
    assert list(ends) == [0, 1, 2, 7, 8, 9]
    assert (ends.num_seen, ends.is_whole) == (10, False)


def test_time_bins_by_hand():
    bins = TimeBins(1, limit=4, width=1.0)
    bins.add(0, 0.5, 2.5, 2.0)  # 1, 2, 1 slot-seconds in the first three
    edges, (heights,) = bins.heights(2.5)
    assert edges == [0.0, 1.0, 2.0, 2.5]
    assert heights == pytest.approx([1.0, 2.0, 2.0])
    bins.add(0, 4.0, 6.0)  # past the last bin: they double to 2 s, with 3, 1, 2, 0
    edges, (heights,) = bins.heights(6.0)
    assert (bins.width, edges) == (2.0, [0.0, 2.0, 4.0, 6.0])
    assert heights == pytest.approx([1.5, 0.5, 1.0])


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 50)), max_size=40))
def test_time_bins_lose_nothing(spans: list[tuple[float, float]]):
    bins = TimeBins(1, limit=16)
    for start, length in spans:
        bins.add(0, start, start + length)
    assert sum(bins.rows[0]) == pytest.approx(sum(length for _, length in spans), abs=1e-6)


# ---- the file -------------------------------------------------------------------------------------------------------


def write(path: Path, records: Iterable[Any], mode: str = "w") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def ends(*times: int) -> list[dict[str, Any]]:
    return [{"kind": "RunEnded", "t": t, "reason": "stopped"} for t in times]


def ended_at(*times: int) -> list[RunEnded]:
    return [RunEnded(t=t, reason="stopped") for t in times]


def test_a_file_is_followed_line_by_line(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    write(path, ends(1, 2))
    events = EventFile(path)
    assert events.read() == (ended_at(1, 2), True)
    assert events.read() == ([], False)
    write(path, ends(3), "a")
    with path.open("a") as file:
        file.write('{"kind": "RunEnded", "t": 4,')
    assert events.read() == (ended_at(3), False)
    assert events.is_cut_short
    with path.open("a") as file:
        file.write(' "reason": "stopped"}\n')
    assert events.read() == (ended_at(4), False)
    assert not events.is_cut_short


def test_a_file_that_was_truncated_is_read_again(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    write(path, ends(1, 2))
    events = EventFile(path)
    events.read()
    # A resumed run drops the events after its checkpoint, and soon has written more than there were.
    write(path, ends(1, 7, 8))
    assert events.read() == (ended_at(1, 7, 8), True)
    path.unlink()
    write(path, ends(9))
    assert events.read() == (ended_at(9), True)


def test_what_is_no_event_file_is_named(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    with pytest.raises(RunDirError, match=r"is not a run directory: it has no events\.jsonl"):
        EventFile(path).read()
    with pytest.raises(RunDirError, match="not a directory"):
        EventFile(tmp_path / "none" / "events.jsonl").read()
    write(path, ends(1))
    with path.open("a") as file:
        file.write("nonsense\n")
    events = EventFile(path)
    assert events.read() == (ended_at(1), True)
    assert events.damage == "1 line is unreadable and left out (line 2: not JSON)"
    write(path, [[1], [2]])
    with pytest.raises(RunDirError, match="line 1: not an event"):
        EventFile(path).read()


# ---- the view -------------------------------------------------------------------------------------------------------


def started(**more: Any) -> dict[str, Any]:
    run = {"strategy": "toy", "seed": 0, "slots": 2, "update_batch": 1, "total_samples": 2, "schema_version": 1}
    return {"kind": "RunStarted", "t": 5.0, **run, **more}


def attempt(t: float, sample: int, number: int, slot: int, version: int, **more: Any) -> dict[str, Any]:
    what = {"mode": "fresh", "cached": 0, **more}
    return {
        "kind": "AttemptStarted",
        "t": t,
        "sample": sample,
        "attempt": number,
        "slot": slot,
        "version": version,
        **what,
    }


def ended(t: float, sample: int, number: int, slot: int, outcome: str, num_tokens: int) -> dict[str, Any]:
    where = {"sample": sample, "attempt": number, "slot": slot}
    return {"kind": "AttemptEnded", "t": t, **where, "outcome": outcome, "num_tokens": num_tokens, "error": ""}


def taken(t: float, update: int, samples: list[int], lengths: list[int], staleness: list[int]) -> dict[str, Any]:
    batch = {"samples": samples, "lengths": lengths, "rewards": [1.0] * len(samples), "staleness": staleness}
    sums = {"staleness_token_sum": staleness, "truncated": 0, "num_interrupted": 0, "slot_s": 1.0}
    return {"kind": "BatchTaken", "t": t, "update": update, "version": update, **batch, **sums}


def done(t: float, update: int) -> list[dict[str, Any]]:
    return [
        {"kind": "UpdateDone", "t": t, "update": update, "version": update + 1, "optimizer_steps": 1, "seconds": 1.0},
        {"kind": "WeightsPublished", "t": t + 0.5, "version": update + 1, "seconds": 0.5},
    ]


# Two slots, two samples. From 10 s on: both run; at 12 the first is done and taken, the second is interrupted with 4
# tokens, updated until 13.5, continues under version 1 from 14 to 16 and is taken with 10 tokens.
TINY = [
    started(),
    {"kind": "CohortLoaded", "t": 10.0, "cohort": 0, "update": 0, "samples": [0, 1]},
    attempt(10.0, 0, 1, 0, 0),
    attempt(10.0, 1, 1, 1, 0),
    ended(12.0, 0, 1, 0, "stop", 3),
    ended(12.0, 1, 1, 1, "interrupted", 4),
    taken(12.0, 0, [0], [3], [0]),
    {"kind": "SampleRequeued", "t": 12.0, "sample": 1, "decision": "resume", "discarded": 0},
    *done(13.0, 0),
    attempt(14.0, 1, 2, 0, 1, mode="resume", cached=4),
    ended(16.0, 1, 2, 0, "stop", 10),
    taken(16.0, 1, [1], [10], [1]),
    *done(17.0, 1),
]


def folded(records: Iterable[dict[str, Any]]) -> RunView:
    view = RunView("toy")
    for record in records:
        event = event_from(dict(record))
        assert event is not None
        view.emit(event)
    return view


def test_a_tiny_run_by_hand():
    view = folded(TINY)
    bars = [(s.slot, s.version, s.start, s.end, s.outcome) for s in view.bars]
    assert bars == [(0, 0, 0.0, 2.0, "stop"), (1, 0, 0.0, 2.0, "interrupted"), (0, 1, 4.0, 6.0, "stop")]
    assert [(p.update, p.t, p.samples_trained, p.mean_length) for p in view.updates] == [
        (0, 3.0, 1, 3.0),
        (1, 7.0, 2, 10.0),
    ]
    # 4 + 2 slot-seconds of 2 slots in 2 + 2 s of rollout
    assert view.summary.bubble_ratio == pytest.approx(1 - 6 / 8)
    assert view.summary.goodput == pytest.approx(2 / 8)
    assert view.summary.tokens_per_s == pytest.approx(13 / 7.5)
    # Tokens 0 to 3 of the second sample were a version old, 4 to 9 were not; the first had none that was.
    assert list(view.samples.trained) == [(0, [(0, 3)]), (1, [(1, 4), (0, 6)])]
    first, second = view.samples.recent
    assert (first.loaded, first.started, first.interruptions, first.trained) == (0.0, 0.0, [], 2.0)
    assert (second.loaded, second.started, second.interruptions, second.trained) == (0.0, 0.0, [2.0], 6.0)
    assert [(w.shortest, w.median, w.longest, w.num_interrupted) for w in view.samples.waits] == [(2.0, 4.0, 6.0, 1)]
    # Slots that wait for an update: both, from 12 to 13.5 and from 16 to 17.5.
    assert sum(view.occupancy.rows[1]) == pytest.approx(2 * 1.5 + 2 * 1.5)


def test_weights_that_change_in_the_middle_split_the_bar():
    """Slots keep their samples over the update: one stays from 0 to 2 under version 0 and from 3.5 to 4.5 under 1."""
    batch = {**taken(12.0, 0, [0], [3], [0]), "num_paused": 1}
    view = folded([*TINY[:5], batch, *done(13.0, 0), ended(14.5, 1, 1, 1, "stop", 9), taken(14.5, 1, [1], [9], [1])])
    bars = [(s.sample, s.version, s.start, s.end, s.outcome) for s in view.bars]
    assert bars[1:] == [(1, 0, 0.0, 2.0, "published"), (1, 1, 3.5, 4.5, "stop")]
    # 9 tokens in 2 + 1 s: six of version 0, three of version 1.
    assert view.samples.trained[-1] == (1, [(1, 6), (0, 3)])
    assert view.samples.recent[1].interruptions == [2.0]


def test_a_replay_makes_the_accepted_tokens_young():
    verified = {"kind": "AttemptVerified", "t": 14.0, "sample": 1, "attempt": 2, "cached": 4, "accepted": 3}
    view = folded([*TINY[:11], verified, *TINY[11:]])
    assert view.samples.trained[-1] == (1, [(0, 10)])
    assert view.metrics.discarded_tokens == 1
    assert [(p.num_replays, p.cached, p.accepted) for p in view.replays] == [(1, 4, 3)]


def test_what_ran_when_a_process_ended_runs_no_more():
    view = folded([*TINY[:4], {"kind": "RunResumed", "t": 11.0, "version": 0, "lineage": 1}])
    assert [(s.end, s.outcome) for s in view.bars] == [(1.0, "cut"), (1.0, "cut")]
    assert view.running == {}


def test_unknown_and_broken_events_are_named(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    write(path, [*TINY, {"kind": "Surprise", "t": 17.0}])
    reader = RunReader(tmp_path)
    reader.read_all()
    assert any("1 events of unknown kinds, which are left out: Surprise" in remark for remark in reader.remarks())
    write(path, [*TINY[:4], {"kind": "AttemptEnded", "t": 11.0, "sample": 0}])
    reader = RunReader(tmp_path)
    reader.read_all()
    assert any("has damaged events: 1 line is unreadable" in remark for remark in reader.remarks())
    write(path, [{"t": 0.0}])
    with pytest.raises(RunDirError, match="it has no kind"):
        RunReader(tmp_path).read_all()
    write(path, [started(), {"kind": "RunEnded", "t": "late", "reason": "stopped"}])
    reader = RunReader(tmp_path)
    reader.read_all()
    assert "a RunEnded at late s: TypeError" in reader.file.damage


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300)), min_size=1, max_size=6))
def test_token_ages_lose_no_token(runs: list[tuple[int, int]]):
    ages = TokenAges()
    ages.add(0, [runs, [(1, 2)]])
    (row,) = ages.rows
    assert row.tokens.sum() == pytest.approx(sum(count for _, count in runs) + 2)
    assert row.ages.sum() == pytest.approx(sum(age * count for age, count in runs) + 2)


def test_a_life_keeps_its_first_tokens():
    life = SampleLife(sample=0, cohort=0, loaded=0.0, runs=[(0, 4), (1, 3)])
    life.keep(5)
    assert life.runs == [(0, 4), (1, 1)]
    life.keep(0)
    assert life.runs == []


def test_memory_does_not_grow_with_the_run(tmp_path: Path):
    """Ten times the ends that are kept: every series stays within its limit, and nothing trained is held."""
    write(tmp_path / "events.jsonl", long_run(num_updates=1500, batch=16))
    view = RunReader(tmp_path).read_all()
    assert view.bars.num_seen == 1500 * 16
    assert len(view.bars) == 2 * MAX_BARS
    assert len(view.updates) <= 1024
    assert sum(point.num_samples for point in view.updates) == 1500 * 16
    assert len(view.samples.recent) == MAX_LIVES
    assert view.samples.untrained == {}
    assert (view.metrics._untrained, view.metrics._held, view.metrics._longest) == (set(), {}, {})
    assert view.samples._open_cohorts == {}
    assert len(view.samples.waits) <= 256
    assert np.sum([row.tokens.sum() for row in view.samples.ages.rows]) == pytest.approx(view.metrics.trained_tokens)


def long_run(*, num_updates: int, batch: int) -> Iterable[dict[str, Any]]:
    """Yield a run with one cohort per update, completely trained."""
    draw = random.Random(0)
    yield started(slots=batch)
    for update in range(num_updates):
        t, samples = 10.0 * update, list(range(update * batch, (update + 1) * batch))
        yield {"kind": "CohortLoaded", "t": t, "cohort": update, "update": update, "samples": samples}
        lengths = [draw.randrange(1, 200) for _ in samples]
        for slot, sample in enumerate(samples):
            yield attempt(t, sample, 1, slot, update)
        for slot, sample in enumerate(samples):
            yield ended(t + 8.0, sample, 1, slot, "stop", lengths[slot])
        yield taken(t + 8.0, update, samples, lengths, [0] * batch)
        yield from done(t + 9.0, update)
