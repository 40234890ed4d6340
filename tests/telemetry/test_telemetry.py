"""Figures of a run worked out by hand, events written to and read from files, and the console."""

from __future__ import annotations

import io
import json
import logging
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sortedrl.engine.base import EngineStats
from sortedrl.errors import RunDirError
from sortedrl.schedule import Strategy, resolve_knobs
from sortedrl.telemetry.console import ConsoleSink, slots_bar, time_left
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import (
    KINDS,
    AttemptEnded,
    AttemptStarted,
    AttemptVerified,
    BatchTaken,
    CheckpointBegun,
    CheckpointSaved,
    CohortLoaded,
    Evaluated,
    Event,
    FunctionsScored,
    LearnerRestarted,
    MachineMeasured,
    RewardCalled,
    RewardFailed,
    RunEnded,
    RunResumed,
    RunStarted,
    SampleRequeued,
    SampleScored,
    ScoresAwaited,
    UpdateDone,
    WeightsPublished,
)
from sortedrl.telemetry.metrics import LedgerCounts, RunMetrics, Timing
from sortedrl.telemetry.sinks import Fanout, JsonlSink, MetricsSink
from sortedrl.telemetry.summary import (
    Summary,
    comparison_table,
    group_line,
    mean_slot_time,
    slot_time_table,
    summarize,
    summary_table,
    uneven_updates,
)
from tests.support.scripted_runs import ScriptedPolicy, scripted_run


def started(t: float, sample: int, slot: int, version: int, mode: str = "fresh", cached: int = 0) -> AttemptStarted:
    attempt = 1 if mode == "fresh" else 2
    return AttemptStarted(t=t, sample=sample, attempt=attempt, mode=mode, cached=cached, slot=slot, version=version)


def ended(t: float, sample: int, slot: int, outcome: str, num_tokens: int, attempt: int = 1) -> AttemptEnded:
    return AttemptEnded(t=t, sample=sample, attempt=attempt, outcome=outcome, num_tokens=num_tokens, slot=slot)


def evaluated(t: float, samples_trained: int, sampled: float, greedy: float) -> Evaluated:
    return Evaluated(
        t=t,
        version=0,
        samples_trained=samples_trained,
        sampled_accuracy=sampled,
        greedy_accuracy=greedy,
        mean_length=4.0,
        by_group={"2": {"sampled_accuracy": sampled + 0.1, "greedy_accuracy": greedy}},
        sampled_reward=sampled + 0.0625,
    )


# Four slots, of which at most three run; every running slot writes one token a second.
#   0 to  5 s: 10 writes 2, then 13 writes 3 in its slot; 11 and 12 write 5 each, then are interrupted      15 tokens
#   5 to  8 s: update (2 s) and publication (1 s)
#   8 to 11 s: 11 resumes and writes 2, then 15 writes 1 in its slot; 12 is replayed, keeps 1 of 5, writes 3;
#              14 writes 3                                                                                   9 tokens
#  11 to 13 s: update (1 s) and publication (1 s); the run ends at 16 s.
RUN: list[Event] = [
    RunStarted(t=0.0, strategy="sorted", seed=7, slots=4, update_batch=2, total_samples=8),
    evaluated(0.0, 0, 0.25, 0.125),
    CohortLoaded(t=0.0, cohort=0, update=0, samples=[10, 11, 12, 13]),
    started(0.0, 10, 0, 0),
    started(0.0, 11, 1, 0),
    started(0.0, 12, 2, 0),
    ended(2.0, 10, 0, "stop", 2),
    FunctionsScored(t=2.0, sample=10, attempt=1, rewards={"right": 1.0, "short": 0.5}),
    SampleScored(t=2.0, sample=10, attempt=1, reward=1.0),
    started(2.0, 13, 0, 0),
    ended(5.0, 13, 0, "stop", 3),
    RewardFailed(t=5.0, sample=13, attempt=1, error="mine.score: exception"),
    SampleScored(t=5.0, sample=13, attempt=1, reward=0.0),
    ended(5.0, 11, 1, "interrupted", 5),
    ended(5.0, 12, 2, "interrupted", 5),
    BatchTaken(
        t=5.0,
        update=0,
        version=0,
        samples=[10, 13],
        lengths=[2, 3],
        rewards=[1.0, 0.0],
        staleness=[0, 0],
        staleness_token_sum=[0, 0],
        truncated=0,
        num_interrupted=2,
        slot_s=5.0,
    ),
    SampleRequeued(t=5.0, sample=11, decision="resume", discarded=0),
    SampleRequeued(t=5.0, sample=12, decision="replay", discarded=0),
    UpdateDone(t=7.0, update=0, version=1, optimizer_steps=2, seconds=2.0, metrics={"loss": 0.5}),
    MachineMeasured(t=7.0, cores_used=0.5, load=1.0, cores=2, process_bytes=10**9, disk_free_bytes=10**9),
    WeightsPublished(t=8.0, version=1, seconds=1.0),
    CohortLoaded(t=8.0, cohort=1, update=1, samples=[14, 15]),
    started(8.0, 11, 0, 1, "resume", 5),
    started(8.0, 12, 1, 1, "replay", 5),
    AttemptVerified(t=8.0, sample=12, attempt=2, cached=5, accepted=1),
    started(8.0, 14, 2, 1),
    ended(10.0, 11, 0, "stop", 7, attempt=2),
    RewardCalled(t=10.0, worker=0, seconds=0.01, lag_s=0.0, num_samples=1),
    ScoresAwaited(t=10.0, seconds=0.0),
    SampleScored(t=10.0, sample=11, attempt=2, reward=1.0),
    started(10.0, 15, 0, 1),
    ended(11.0, 12, 1, "length", 4, attempt=2),
    SampleScored(t=11.0, sample=12, attempt=2, reward=1.0),
    ended(11.0, 14, 2, "interrupted", 3),
    ended(11.0, 15, 0, "interrupted", 1),
    BatchTaken(
        t=11.0,
        update=1,
        version=1,
        samples=[12, 11],
        lengths=[4, 7],
        rewards=[1.0, 1.0],
        staleness=[0, 1],
        staleness_token_sum=[0, 5],  # the five tokens of version 0 lag by one
        truncated=1,
        num_interrupted=2,
        slot_s=11.0,
    ),
    SampleRequeued(t=11.0, sample=14, decision="restart", discarded=3),
    SampleRequeued(t=11.0, sample=15, decision="resume", discarded=0),
    LearnerRestarted(t=11.0, number=1, reason="rank 1 has died", point="checkpoint 1", updates_repeated=1, seconds=2.0),
    CheckpointBegun(t=11.0, version=1, seconds=0.0),
    UpdateDone(t=12.0, update=1, version=2, optimizer_steps=2, seconds=1.0, metrics={"loss": 0.25}),
    WeightsPublished(t=13.0, version=2, seconds=1.0),
    evaluated(13.0, 4, 0.5, 0.75),
    CheckpointSaved(t=13.0, version=2, seq=40, seconds=0.25),
    RunResumed(t=13.0, version=2, lineage=1),
    RunEnded(t=16.0, reason="stopped"),
]
STATS = EngineStats(
    decode_steps=8, decoded_tokens=24, slot_steps=32, busy_slot_steps=20, recomputed_tokens=10, busy_slot_s=24.0
)
TIMING = Timing(rollout_s=8.0, update_s=3.0, publish_s=2.0, wall_s=16.0)


# Of 4 x 13 slot-seconds. Running: 24, of which 16 wrote what was trained, 7 what was discarded, 1 what 15 holds.
# One slot idles in both rollouts (5 + 3 s); the updates take 2 + 1 s, the publications 1 + 1 s, of all four.
SLOT_TIME = {
    "trained": 16 / 52,
    "in_flight": 1 / 52,
    "discarded": 7 / 52,
    "recomputed": 0.0,
    "prefill": 0.0,
    "overhead": 0.0,
    "tail": 8 / 52,
    "tool": 0.0,
    "reward": 0.0,
    "update": 12 / 52,
    "publish": 8 / 52,
    "save": 0.0,
    "start_up": 0.0,
}


def folded(events: list[Event]) -> RunMetrics:
    metrics = RunMetrics()
    for event in events:
        metrics.emit(event)
    return metrics


def test_every_figure_of_the_hand_worked_run():
    summary = summarize(folded(RUN), stats=STATS, timing=TIMING, held=[14, 15], cohort_batches=2, lookahead=0)
    assert summary.model_dump() == {
        "schema_version": 1,
        "strategy": "sorted",
        "status": "stopped",
        "seed": 7,
        "slots": 4,
        "update_batch": 2,
        "cohort_batches": 2,
        "lookahead": 0,
        "updates": 2,
        "optimizer_steps": 4,
        "samples": 4,
        "trained_tokens": 16,  # 2 + 3 + 4 + 7
        "generated_tokens": 24,  # 16 trained, 7 discarded, and the 1 token that 15 holds
        "discarded_tokens": 7,  # 4 by the replay of 12, 3 by the restart of 14
        "recomputed_tokens": 10,
        "decode_steps": 8,
        "rollout_s": 8.0,
        "update_s": 3.0,
        "publish_s": 2.0,
        "save_s": 0.0,
        "ledger_s": None,
        "wall_s": 16.0,
        "tokens_per_s": 1.0,  # 16 tokens in 16 s
        "bubble_ratio": 0.25,  # 24 of 4 x 8 slot-seconds were busy
        "idle_slot_steps": 0.375,  # 12 of 32
        "goodput": 0.5,  # (5 + 11) of 32 decoded what was trained
        "slot_time": SLOT_TIME,
        "learner_wait_s": 9.0,  # 5 until the first harvest, then from 7 to 11
        "events_gap": None,
        "emit_s": None,
        "staleness_mean": 0.25,  # one of four samples lags by one
        "staleness_token_mean": 5 / 16,
        "staleness_max": 1,
        "divergence_rate": 0.5,  # 1 difference, found at the 2nd token checked
        "accepted_prefix": 0.2,  # 1 of 5
        "mean_length": 4.0,
        "mean_longest": 4.25,
        "length_in_order": None,  # no lengths were predicted
        "length_log_error": None,
        "tools": None,
        "replay_law": None,
        "flat_groups": None,
        "filtered_samples": None,
        "reward_errors": None,
        "unscored_samples": 1,
        "alarm": None,
        "accuracy_before": 0.25,
        "accuracy_after": 0.5,
        "greedy_accuracy_before": 0.125,
        "greedy_accuracy_after": 0.75,
        "heldout_reward_before": 0.3125,
        "heldout_reward_after": 0.5625,
        "accuracy_by_group_before": {"2": 0.35},
        "accuracy_by_group_after": {"2": 0.6},
        "ledger": {"loaded": 6, "trained": 4, "lost": 0, "duplicated": 0},
    }


def test_the_events_clock_agrees_with_the_engine():
    metrics = folded(RUN)
    assert metrics.generated_tokens == STATS.decoded_tokens
    # 24 busy slot-seconds in 5 + 3 seconds with something running; training ends at 13 s.
    stats, timing = metrics.measured()
    assert (stats.running, stats.busy_slot_s, timing.rollout_s, timing.wall_s) == (0, 24.0, 8.0, 13.0)


def test_accepted_prefix_is_a_mean_over_replays():
    verified = [(5, 1), (10, 10), (0, 0)]  # a replay of no tokens does not count
    metrics = folded([AttemptVerified(t=0.0, sample=1, attempt=1, cached=c, accepted=a) for c, a in verified])
    assert metrics.accepted_prefix == pytest.approx((0.2 + 1.0) / 2)
    assert metrics.divergence_rate == pytest.approx(1 / 12)
    assert metrics.discarded_tokens == 4


def test_what_does_not_apply_is_null():
    summary = summarize(folded(RUN[:1]), stats=None, timing=None, held=None)
    dumped = summary.model_dump()
    for name in ("bubble_ratio", "goodput", "staleness_max", "accepted_prefix", "divergence_rate", "ledger", "wall_s"):
        assert dumped[name] is None, name
    assert summary.samples == 0


def test_ledger_counts_lost_and_duplicated():
    metrics = folded(RUN)
    assert metrics.ledger(held=[15]) == LedgerCounts(loaded=6, trained=4, lost=1, duplicated=0)
    batch = next(event for event in RUN if isinstance(event, BatchTaken))
    metrics.emit(replace(batch, update=2))
    assert metrics.ledger(held=[14, 15]) == LedgerCounts(loaded=6, trained=4, lost=0, duplicated=2)
    assert metrics.samples == 6


@pytest.mark.parametrize("strategy", list(Strategy))
def test_figures_agree_with_the_engine_under_the_real_controller(strategy: Strategy):
    policy = ScriptedPolicy(longest=60, length_change=0.2, divergence=0.01)
    run = scripted_run(
        resolve_knobs(strategy, update_batch=8),
        policy=policy,
        slots=8,
        num_samples=128,
        update_s=5.0,
        fails=lambda request: 3 if request.sample % 7 == 0 else None,  # whatever it is given, it gives up in the end
    )
    assert run.controller.run()
    started = RunStarted(t=0.0, strategy=strategy, seed=0, slots=8, update_batch=8, total_samples=128)
    metrics, stats = folded([started, *run.events]), run.engine.stats()
    timing = run.controller.timing()
    assert metrics.generated_tokens == stats.decoded_tokens
    assert metrics.in_flight_tokens == 0
    assert metrics.trained_tokens == sum(sample.num_tokens for sample in run.trained)
    assert metrics.ledger(held=[]) == LedgerCounts(loaded=128, trained=128, lost=0, duplicated=0)
    assert metrics.occupancy.busy_slot_s == pytest.approx(stats.busy_slot_s)
    assert metrics.occupancy.wall_s == pytest.approx(timing.wall_s)
    # A token takes a second of a slot: what was trained is goodput, the rest of the busy time was discarded.
    assert metrics.goodput(timing) == pytest.approx(metrics.trained_tokens / (8 * timing.rollout_s))


def test_summary_round_trip_and_errors(tmp_path: Path):
    summary = summarize(folded(RUN), stats=STATS, timing=TIMING, held=[14, 15])
    path = tmp_path / "summary.json"
    summary.write(path)
    assert Summary.read(path) == summary
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "later_field": 1}))
    assert Summary.read(path) == summary
    path.write_text(json.dumps({**data, "schema_version": 99}))
    with pytest.raises(RunDirError, match="upgrade"):
        Summary.read(path)
    path.write_text(json.dumps({**data, "samples": "many"}))
    with pytest.raises(RunDirError, match="samples"):
        Summary.read(path)
    with pytest.raises(RunDirError, match="finished run"):
        Summary.read(tmp_path / "none.json")
    with pytest.raises(RunDirError, match="cannot write"):
        summary.write(tmp_path / "no" / "summary.json")


def test_summary_table_fits_100_columns():
    summary = summarize(folded(RUN), stats=STATS, timing=TIMING, held=[14, 15])
    big = summary.model_copy(
        update={
            "strategy": "sorted-on-policy",
            "samples": 819_200,
            "tokens_per_s": 123_456.7,
            "wall_s": 86_400.0,
            "seed": 1,
        }
    )
    out = io.StringIO()
    Console(file=out, width=100).print(summary_table([summary, big]))
    lines = out.getvalue().splitlines()
    assert max(len(line) for line in lines) <= 100
    assert "…" not in out.getvalue()
    row = next(line for line in lines if line.startswith(" sorted* "))
    assert row.split()[1:] == ["7", "0.250", "→", "0.500", "25.0%", "50.0%", "1", "1", "16.0", "0", "/", "0"]


def test_the_table_of_one_run_fits_80_columns():
    summary = summarize(folded(RUN), stats=STATS, timing=TIMING, held=[14, 15])
    update = {"strategy": "sorted-on-policy", "status": "complete", "tokens_per_s": 12_345.6, "wall_s": 3_600.0}
    out = io.StringIO()
    Console(file=out, width=80).print(summary_table([summary.model_copy(update=update)], width=80))
    assert "…" not in out.getvalue()
    assert "sorted-on-policy 0.250" in out.getvalue()


def test_slot_time_has_a_column_a_strategy_and_no_row_without_time():
    summary = summarize(folded(RUN), stats=STATS, timing=TIMING, held=[14, 15])
    other = summary.model_copy(update={"slot_time": {**SLOT_TIME, "tail": 0.0, "reward": 8 / 52}})
    sync = summary.model_copy(update={"strategy": "sync"})
    out = io.StringIO()
    table = slot_time_table(mean_slot_time([summary, other, sync]))
    assert table is not None
    Console(file=out, width=80).print(table)
    rows = {line.strip()[:30].strip(): line.split()[-2:] for line in out.getvalue().splitlines() if line.strip()}
    assert rows["idle: tail of the harvest"] == ["7.7%", "15.4%"]  # a mean of 8 / 52 and 0
    assert rows["waiting for rewards"] == ["7.7%", "0.0%"]
    assert "prefill of prompts" not in rows
    assert slot_time_table([("sync", None)]) is None


# ---- files ----------------------------------------------------------------------------------------------------------


def test_every_kind_survives_the_file(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    tools = [KINDS["ToolsCalled"](99.0, 0, 1, 0, 1), KINDS["ToolsReturned"](99.5, 0, 1, 0, 0.5, "fed", 3)]  # type: ignore[call-arg]
    told = [*RUN, *tools]
    assert {event.kind for event in told} == set(KINDS), "the run above should have every kind of event"
    sink = JsonlSink(path)
    for event in told:
        sink.emit(event)
    sink.close()
    assert list(read_events(path)) == told
    assert len(path.read_text().splitlines()) == len(told)


def test_file_is_on_disk_at_every_update(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    first_update = next(at for at, event in enumerate(RUN) if isinstance(event, UpdateDone))
    for event in RUN[: first_update + 1]:
        sink.emit(event)
    assert list(read_events(path)) == RUN[: first_update + 1]
    sink.emit(RUN[first_update + 1])
    assert list(read_events(path)) == RUN[: first_update + 1]
    sink.close()
    assert list(read_events(path)) == RUN[: first_update + 2]


def test_floats_that_are_not_finite_stay_strict_json(tmp_path: Path):
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    sink.emit(
        UpdateDone(
            t=1.0, update=0, version=1, optimizer_steps=1, seconds=math.inf, metrics={"loss": math.nan, "lr": 0.5}
        )
    )
    sink.close()

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (event,) = read_events(path)
    assert isinstance(event, UpdateDone)
    assert math.isnan(event.seconds)
    assert math.isnan(event.metrics["loss"])
    assert event.metrics["lr"] == 0.5


def write_lines(path: Path, *lines: str, end: str = "\n") -> Path:
    path.write_text("\n".join(lines) + end)
    return path


STARTED = json.dumps(RUN[0].as_dict())


def test_a_last_line_cut_short_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write_lines(tmp_path / "events.jsonl", STARTED, '{"kind":"RunEnd', end="")
    with caplog.at_level(logging.WARNING):
        assert list(read_events(path)) == RUN[:1]
    assert "line 2 was cut short" in caplog.text


def test_unknown_kinds_and_fields_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    later = json.dumps({**RUN[0].as_dict(), "later": [1]})
    path = write_lines(tmp_path / "events.jsonl", later, '{"kind":"Moon","t":1}', '{"kind":"Moon","t":2}')
    unknown: Counter[str] = Counter()
    with caplog.at_level(logging.WARNING):
        assert list(read_events(path, unknown=unknown)) == RUN[:1]
    assert unknown == {"Moon": 2}
    assert "2 events of unknown kind are left out: Moon" in caplog.text


def test_an_older_schema_is_named_with_what_it_lacks(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    older = json.dumps({**RUN[0].as_dict(), "schema_version": 1})
    path = write_lines(tmp_path / "events.jsonl", older)
    with caplog.at_level(logging.WARNING):
        assert list(read_events(path)) == [replace(RUN[0], schema_version=1)]
    assert "has event schema version 1, older than 2: it does not record slot time by cause" in caplog.text


def test_a_harvest_of_an_older_schema_counts_as_decoding(tmp_path: Path):
    batch = next(event for event in RUN if isinstance(event, BatchTaken)).as_dict()
    for name in ("busy_s", "prefill_s", "prompt_tokens", "recomputed_tokens"):
        del batch[name]
    (event,) = read_events(write_lines(tmp_path / "events.jsonl", json.dumps(batch)))
    assert isinstance(event, BatchTaken)
    assert event.busy_s is None


def test_a_file_longer_than_a_chunk_is_read_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("sortedrl.telemetry.event_file._CHUNK_BYTES", 100)
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path)
    for event in RUN * 3:
        sink.emit(event)
    sink.close()
    assert list(read_events(path)) == RUN * 3
    lines = path.read_text().splitlines()
    write_lines(path, *lines[:40], "{broken", *lines[40:])
    with caplog.at_level(logging.WARNING):
        assert list(read_events(path)) == RUN * 3
    assert "1 line is unreadable and left out (line 41: not JSON)" in caplog.text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [STARTED.replace('"schema_version": 2', '"schema_version": 99')],
            "schema version 99, but this",
        ),
        (["no json", "[1, 2]"], "line 1: not JSON"),
        (["[1, 2]"], "line 1: not an event, it has no kind"),
        (['{"kind":"RunEnded"}'], "line 1: an incomplete RunEnded"),
    ],
)
def test_a_file_that_is_no_event_file(tmp_path: Path, lines: list[str], message: str):
    path = write_lines(tmp_path / "events.jsonl", *lines)
    with pytest.raises(RunDirError, match=message):
        list(read_events(path))


BATCH = next(event for event in RUN if isinstance(event, BatchTaken)).as_dict()


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("no json", "not JSON"),
        ('{"kind":"RunEnded"}', "an incomplete RunEnded"),
        (json.dumps({**BATCH, "lengths": [1]}), "a BatchTaken whose lists differ in length"),
    ],
)
def test_damaged_lines_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: str, fault: str
):
    path = write_lines(tmp_path / "events.jsonl", STARTED, line, line)
    with caplog.at_level(logging.WARNING):
        assert list(read_events(path)) == RUN[:1]
    assert f"2 lines are unreadable and left out (line 2: {fault}" in caplog.text


def test_counts_after_a_gap_are_those_of_the_ledger():
    known = folded([event for event in RUN if not isinstance(event, RunResumed)])
    gap = RunResumed(
        t=13.0, version=2, lineage=1, gap="events.jsonl: a line is lost", updates=9, samples_trained=18, waiting=[4, 5]
    )
    metrics = folded([*(event for event in RUN if not isinstance(event, RunResumed)), gap])
    assert (metrics.updates, metrics.samples) == (9, 18)
    assert metrics.ledger([4, 5]).model_dump() == {"loaded": 20, "trained": 18, "lost": 0, "duplicated": 0}
    assert metrics.agrees_with(18, [4, 5])
    assert (metrics.mean_length, metrics.staleness_mean) == (known.mean_length, known.staleness_mean)


def test_a_missing_event_file(tmp_path: Path):
    with pytest.raises(RunDirError, match="not a file"):
        read_events(tmp_path / "events.jsonl")
    with pytest.raises(RunDirError, match="cannot write"):
        JsonlSink(tmp_path / "no" / "events.jsonl")


def test_metrics_file_has_a_line_per_update(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    metrics = RunMetrics()
    emit = Fanout([metrics, MetricsSink(path, metrics)])
    for event in RUN:
        emit(event)
    emit.close()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {
        "update": 0,
        "version": 1,
        "t": 7.0,
        "samples_trained": 2,
        "reward_mean": 0.5,
        "reward_recent": 0.5,
        "mean_length": 2.5,
        "staleness_mean": 0.0,
        "staleness_max": 0,
        "bubble_ratio": 0.25,  # 15 of 4 x 5 slot-seconds
        "idle_slot_steps": None,  # events do not tell
        "goodput": 0.25,  # 5 of 20
        "tokens_per_s": 5 / 7,
        "slot_time": {
            **dict.fromkeys(SLOT_TIME, 0.0),
            "trained": 5 / 28,  # of 4 x 7 slot-seconds
            "in_flight": 10 / 28,  # what 11 and 12 wrote
            "tail": 5 / 28,
            "update": 8 / 28,
        },
        "learner_wait_s": 5.0,
        "unscored_samples": 1,
        "alarms": ["the reward of 1 sample could not be computed"],
        "learner": {"loss": 0.5},
    }
    assert (second["samples_trained"], second["reward_mean"], second["staleness_max"]) == (4, 1.0, 1)
    assert second["reward_recent"] == 0.75  # of both updates
    assert (second["bubble_ratio"], second["goodput"], second["tokens_per_s"]) == (0.25, 0.5, 16 / 12)


def test_a_probe_takes_the_place_of_the_events_clock():
    metrics = RunMetrics(probe=lambda: (STATS, replace(TIMING, rollout_s=12.0, wall_s=32.0)))
    for event in RUN[:-5]:
        metrics.emit(event)
    done = RUN[-6]
    assert isinstance(done, UpdateDone)
    row = metrics.row(done)
    assert (row.bubble_ratio, row.goodput, row.tokens_per_s) == (0.5, 16 / 48, 0.5)
    assert row.idle_slot_steps == 0.375


class FailingSink:
    """A sink whose disk is full."""

    def emit(self, event: Event) -> None:
        raise OSError("no space left")

    def close(self) -> None:
        raise OSError("no space left")


def test_a_failing_sink_warns_once_and_stops_nothing(caplog: pytest.LogCaptureFixture):
    metrics = RunMetrics()
    emit = Fanout([FailingSink(), metrics])
    with caplog.at_level(logging.WARNING):
        for event in RUN:
            emit(event)
        emit.close()
    assert metrics.samples == 4
    assert emit.num_failures == {"FailingSink": len(RUN) + 1}
    (record,) = caplog.records
    assert "FailingSink failed on RunStarted (OSError: no space left)" in record.getMessage()


# ---- console --------------------------------------------------------------------------------------------------------


def shown(*, terminal: bool, quiet: bool = False, every_updates: int = 1) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, color_system=None, legacy_windows=False)
    metrics = RunMetrics()
    emit = Fanout([metrics, ConsoleSink(console, metrics, quiet=quiet, every_updates=every_updates, every_s=1e9)])
    for event in RUN:
        emit(event)
    emit.close()
    assert not emit.num_failures
    return out.getvalue()


def test_plain_lines_where_there_is_no_terminal():
    lines = shown(terminal=False).splitlines()
    assert lines[:2] == [
        "sorted: 8 samples, 2 an update, 4 slots, seed 7",
        "held-out accuracy after 0 samples: 0.250 sampled, 0.125 greedy, mean length 4.0, mean reward 0.312",
    ]
    first = "reward 0.500, length 2.5, staleness 0.00 (max 0), bubble 25.0%, goodput 25.0%, tokens/s 1"
    second = "reward 1.000, length 5.5, staleness 0.25 (max 1), bubble 25.0%, goodput 50.0%, tokens/s 1"
    assert lines[2:] == [
        f"update 1, 2/8 samples (25%): {first}, 0:21 left",  # 2 of 8 samples took 7 s: 6 more take 21 s
        f"update 2, 4/8 samples (50%): {second}, 0:12 left",
        "held-out accuracy after 4 samples: 0.500 sampled, 0.750 greedy, mean length 4.0, mean reward 0.562",
        "resumed at version 2",
        f"update 2, 4/8 samples (50%): {second}, 0:13 left",  # the last weights were published at 13 s
        "run stopped after 16.0 s",
    ]


def test_plain_lines_come_every_so_many_updates():
    assert sum(line.startswith("update") for line in shown(terminal=False, every_updates=2).splitlines()) == 2


def test_quiet_says_nothing():
    assert shown(terminal=False, quiet=True) == ""
    assert shown(terminal=True, quiet=True) == ""


def test_a_terminal_gets_a_live_panel():
    text = shown(terminal=True)
    assert "4/8 samples" in text
    assert "slots ····" in text
    assert "\x1b[" in text, "a live panel moves the cursor"
    assert not any(line.startswith("update ") for line in text.splitlines())


def test_slots_bar_and_time_left():
    metrics = folded(RUN[:6])
    assert slots_bar(metrics).plain.rstrip() == "slots ■■■· 3/4"
    assert slots_bar(metrics, is_ascii=True).plain.rstrip() == "slots ###. 3/4"
    assert time_left(metrics) == "–:––"


def test_the_group_line_names_each_group() -> None:
    groups = {"accuracy_by_group_before": {"2": 0.25, "3": 0.1}, "accuracy_by_group_after": {"2": 0.5}}
    assert group_line(Summary(strategy="sync", **groups)) == "accuracy by group  2: 0.250 → 0.500,  3: 0.100 → –"
    assert group_line(Summary(strategy="sync")) is None


def test_the_comparison_takes_means_and_speeds_against_the_first() -> None:
    runs = [
        Summary(strategy=name, seed=seed, tokens_per_s=speed, accuracy_after=accuracy)
        for name, seed, speed, accuracy in [("sync", 0, 100.0, 0.5), ("sync", 1, 300.0, 0.7), ("april", 0, 300.0, 0.4)]
    ]
    console = Console(width=140, file=io.StringIO())
    console.print(comparison_table(runs))
    text = console.file.getvalue()
    assert "0.600 (0.500-0.700)" in text
    assert "200" in text
    assert "1.50x" in text


def test_a_comparison_tells_updates_that_took_other_seconds_for_equal_work() -> None:
    def run(strategy: str, update_s: float, *, tokens: int = 1000, updates: int = 4) -> Summary:
        return Summary(
            strategy=strategy, seed=0, samples=64, updates=updates, trained_tokens=tokens, update_s=update_s, wall_s=9.0
        )

    sync = run("sync", 2.0)
    even, slow = run("april", 2.1), run("async", 3.3, tokens=1100)  # 1.05 and 1.5 times the seconds per token
    other = run("sync-large", 9.0, updates=1)  # other work
    assert uneven_updates([sync, even, slow, other]) == {"async": 1.5}
    assert uneven_updates([sync]) == {}
    console = Console(width=140, file=io.StringIO())
    console.print(comparison_table([sync, even, slow, other]))
    text = console.file.getvalue()
    assert "3.3!" in text
    assert "2.1!" not in text
    assert "other update seconds for equal work" in text
