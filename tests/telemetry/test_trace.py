"""`sortedrl trace`: cohorts, notes on unusual runs, and a trace that agrees with the summary."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sortedrl.cli import app
from sortedrl.config import SortedConfig
from sortedrl.errors import RunDirError
from sortedrl.schedule import Strategy
from sortedrl.simulate.costs import load_cost
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import load_trace
from sortedrl.telemetry import perfetto
from sortedrl.telemetry.cohorts import Spread
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import AttemptEnded, AttemptVerified, BatchTaken, CohortLoaded, Event, RunStarted
from sortedrl.telemetry.sinks import JsonlSink
from sortedrl.telemetry.summary import Summary
from sortedrl.telemetry.trace import trace_run
from sortedrl.telemetry.view import RunView
from sortedrl.trainer import SortedTrainer


def simulated(run_dir: Path, strategy: str = "sorted-replay", samples: int = 96, **more: Any) -> Summary:
    """A simulated run and its events, in a directory like that of any run."""
    run_dir.mkdir(parents=True)
    sink = JsonlSink(run_dir / "events.jsonl")
    summary = simulate(
        load_trace("lognormal(40, 1.0, 400)", samples=samples, seed=1),
        strategy=strategy,
        slots=8,
        update_batch=8,
        cost=load_cost("roofline", hardware="cpu", model="smollm2-135m"),
        divergence=0.01,
        emit=sink.emit,
        **more,
    )
    sink.close()
    summary.write(run_dir / "summary.json")
    return summary


def slices(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def busy_s(path: Path) -> float:
    return sum(event["dur"] for event in slices(path) if event["pid"] == perfetto.SLOTS) / 1e6


def check_format(path: Path) -> None:
    """What Chrome's trace event format asks for, and what Perfetto needs to draw slices as they are."""
    document = json.loads(path.read_text())
    named, last = set(), defaultdict(float)
    for event in document["traceEvents"]:
        assert event["ph"] in {"X", "M", "i", "C"}
        assert isinstance(event["pid"], int)
        assert event["name"]
        if event["ph"] == "M":
            named.add((event["pid"], event.get("tid")))
        else:
            assert event["ts"] >= 0.0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    for event in sorted(slices(path), key=lambda event: (event["ts"], event["ts"] + event["dur"])):
        track = event["pid"], event["tid"]
        assert track in named, "every track has a name"
        assert event["tid"] != 0
        assert event["ts"] >= last[track] - 0.0011, f"slices overlap on {track}"  # a nanosecond of rounding
        last[track] = max(last[track], event["ts"] + event["dur"])


@pytest.mark.parametrize("strategy", list(Strategy))
def test_slot_tracks_are_as_busy_as_the_summary_says(tmp_path: Path, strategy: Strategy):
    summary = simulated(tmp_path / "run", strategy)
    out = tmp_path / "trace.json"
    found = trace_run(tmp_path / "run", perfetto=out)
    check_format(out)
    busy = (1.0 - summary.bubble_ratio) * 8 * summary.rollout_s
    assert found.slot_s == pytest.approx(busy, rel=1e-6)
    assert busy_s(out) == pytest.approx(busy, rel=1e-4)
    updates = [event for event in slices(out) if event["pid"] == perfetto.LEARNER and "samples" in event["args"]]
    assert sum(event["args"]["samples"] for event in updates) == summary.samples
    assert sum(event["dur"] for event in updates) / 1e6 == pytest.approx(summary.update_s, rel=1e-4)
    assert found.slot_time == pytest.approx(summary.slot_time)
    assert found.notes == []


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    """A small run of the real engine, resumed in its slots rather than interrupted."""
    folder = tmp_path_factory.mktemp("runs")
    config = SortedConfig(
        run={"name": "live", "dir": str(folder), "samples": 32, "report": False},
        schedule={"strategy": "sorted-partial", "update_batch": 16, "cohort_batches": 2},
        engine={"slots": 8, "max_new_tokens": 64},
        learner={"group_size": 4},
        eval={"prompts": 0},
        checkpoint={"save": False},
    )
    return folder / "live", SortedTrainer(args=config, quiet=True).train()


def test_the_trace_of_a_live_run(live: tuple[Path, Summary], tmp_path: Path):
    run_dir, summary = live
    out = tmp_path / "trace.json"
    found = trace_run(run_dir, perfetto=out)
    check_format(out)
    assert busy_s(out) == pytest.approx(found.slot_s, rel=1e-3)
    # What the engine computed, and what the loop did between its steps, is the time in which slots worked.
    batches = [event for event in read_events(run_dir / "events.jsonl") if isinstance(event, BatchTaken)]
    computed_s = sum(event.busy_s for event in batches)
    assert computed_s == pytest.approx((1.0 - summary.bubble_ratio) * 8 * summary.rollout_s)
    working = sum(found.slot_time[cause] for cause in ("trained", "in_flight", "discarded", "recomputed", "prefill"))
    assert working + found.slot_time["overhead"] == pytest.approx(found.slot_s / (8 * found.seconds), abs=1e-6)
    calls = [event for event in slices(out) if event["pid"] == perfetto.REWARDS]
    assert sum(event["args"]["answers"] for event in calls) == 32


def test_the_trace_loads_in_trace_processor(live: tuple[Path, Summary], tmp_path: Path):
    pytest.importorskip("perfetto", reason="the package perfetto is not installed")
    binary = shutil.which("trace_processor_shell") or shutil.which("trace_processor")
    if binary is None:
        pytest.skip("trace_processor is fetched from the network at its first start; no copy is on the path")
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    out = tmp_path / "trace.json"
    found = trace_run(live[0], perfetto=out)
    with TraceProcessor(trace=str(out), config=TraceProcessorConfig(bin_path=binary)) as processor:
        query = (
            "SELECT SUM(dur) AS busy FROM slice JOIN thread_track ON slice.track_id = thread_track.id "
            "JOIN thread USING (utid) JOIN process USING (upid) WHERE process.name = 'slots'"
        )
        (row,) = processor.query(query)
        assert row.busy / 1e9 == pytest.approx(found.slot_s, rel=1e-3)


# ---- cohorts --------------------------------------------------------------------------------------------------------


def ended(sample: int, num_tokens: int) -> AttemptEnded:
    return AttemptEnded(t=1.0, sample=sample, attempt=1, outcome="stop", num_tokens=num_tokens, slot=0)


def test_distributions_by_cohort():
    view = RunView("toy", keep_cohorts=True)
    events: list[Event] = [
        CohortLoaded(t=0.0, cohort=0, update=0, samples=[0, 1, 2]),
        CohortLoaded(t=0.0, cohort=1, update=0, samples=[3, 4]),
        ended(0, 10),
        ended(1, 40),
        ended(2, 20),
        ended(3, 7),
        AttemptVerified(t=1.0, sample=1, attempt=2, cached=40, accepted=10),
        ended(1, 30),  # shorter than what it had written before
        BatchTaken(
            t=2.0,
            update=0,
            version=0,
            samples=[0, 3, 1, 2],
            lengths=[10, 7, 30, 20],
            rewards=[1.0, 0.5, 0.0, 0.5],
            staleness=[0, 1, 0, 3],
            staleness_token_sum=[0, 7, 0, 60],
            truncated=0,
            num_interrupted=0,
            slot_s=67.0,
        ),
    ]
    for event in events:
        view.emit(event)
    first, second = view.samples.cohort_figures()
    assert (first.loaded, first.trained, second.loaded, second.trained) == (3, 3, 2, 1)
    assert first.length == Spread(count=3, mean=20.0, least=10.0, p10=12.0, p50=20.0, p90=28.0, most=30.0)
    assert first.longest is not None
    assert (first.longest.mean, first.longest.most) == (pytest.approx(70 / 3), 40.0)
    assert first.reward is not None
    assert first.reward.mean == 0.5
    assert first.staleness is not None
    assert (first.staleness.p50, first.staleness.most) == (0.0, 3.0)
    assert first.accepted == Spread(count=1, mean=0.25, least=0.25, p10=0.25, p50=0.25, p90=0.25, most=0.25)
    assert second.accepted is None
    assert second.longest is not None
    assert second.longest.count == 1  # sample 4 has not run


# ---- the command, and what is no finished run -----------------------------------------------------------------------


def test_the_command_prints_tables_or_one_object(tmp_path: Path):
    summary = simulated(tmp_path / "run")
    out = tmp_path / "trace.json"
    shown = CliRunner().invoke(app, ["trace", str(tmp_path / "run")])
    assert shown.exit_code == 0
    assert "decoding tokens that were trained" in shown.output
    assert "longest seen" in shown.output
    result = CliRunner().invoke(app, ["trace", str(tmp_path / "run"), "--perfetto", str(out), "--json"])
    record = json.loads(result.stdout)
    assert record["trace"] == str(out)
    assert sum(cohort["trained"] for cohort in record["cohorts"]) == summary.samples == 96
    assert record["slot_time"] == pytest.approx(summary.slot_time)
    assert out.is_file()


FIRST_COHORT = {"kind": "CohortLoaded", "t": 0.0, "cohort": 0, "update": 0, "samples": [0]}


def started(**more: Any) -> dict[str, Any]:
    event = RunStarted(t=0.0, strategy="sync", seed=0, slots=2, update_batch=2, total_samples=8)
    return {**event.as_dict(), **more}


def write(run_dir: Path, text: str) -> Path:
    run_dir.mkdir()
    (run_dir / "events.jsonl").write_text(text)
    return run_dir


def test_a_directory_that_is_no_run(tmp_path: Path):
    with pytest.raises(RunDirError, match=r"no events\.jsonl"):
        trace_run(tmp_path)
    with pytest.raises(RunDirError, match="not a directory"):
        trace_run(tmp_path / "nowhere")
    with pytest.raises(RunDirError, match="has no RunStarted"):
        trace_run(write(tmp_path / "empty", ""))
    with pytest.raises(RunDirError, match="has no RunStarted"):
        trace_run(write(tmp_path / "without-start", json.dumps(FIRST_COHORT) + "\n"))


def test_a_run_that_is_being_written_and_has_no_update(tmp_path: Path):
    run_dir = write(tmp_path / "young", json.dumps(started()) + "\n" + '{"kind":"CohortL')
    found = trace_run(run_dir, perfetto=tmp_path / "t.json")
    end, updates, line = found.notes
    assert "has not ended" in end
    assert "no update" in updates
    assert "incomplete last line" in line
    assert (found.slot_time, found.cohorts) == (None, [])
    check_format(tmp_path / "t.json")


def test_a_run_cut_in_the_middle(tmp_path: Path):
    simulated(tmp_path / "run")
    path = tmp_path / "run" / "events.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[: len(lines) // 2]) + "\n")
    found = trace_run(tmp_path / "run", perfetto=tmp_path / "t.json")
    assert "has not ended" in found.notes[0]
    assert sum(found.slot_time.values()) == pytest.approx(1.0)
    assert busy_s(tmp_path / "t.json") == pytest.approx(found.slot_s, rel=1e-4)


def test_an_older_schema_is_named(tmp_path: Path):
    run_dir = write(tmp_path / "old", json.dumps(started(schema_version=1)) + "\n")
    found = trace_run(run_dir)
    assert any("event schema version 1, older than 2" in note for note in found.notes)
    assert found.slot_time is None


def test_a_place_where_no_trace_can_be_written(tmp_path: Path):
    simulated(tmp_path / "run", samples=16)
    with pytest.raises(RunDirError, match="cannot write"):
        trace_run(tmp_path / "run", perfetto=tmp_path / "no" / "trace.json")
