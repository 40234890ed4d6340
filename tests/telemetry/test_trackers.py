"""Trackers: what their files hold is what the run measured."""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path
from typing import Any

import pytest

from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError
from sortedrl.run.builders import trackers
from sortedrl.run.builders.trackers import check_trackers, open_trackers
from sortedrl.telemetry.events import BatchTaken, Evaluated, Event, RunResumed, RunStarted, UpdateDone
from sortedrl.telemetry.metrics import RunMetrics
from sortedrl.telemetry.sinks import Fanout
from sortedrl.telemetry.trackers import TensorBoardSink, TrackerSink, TrackSettings
from sortedrl.trainer import SortedTrainer

pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")


def tensorboard_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """By tag and step, as TensorBoard's own reader has them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: {point.step: point.value for point in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}


def wandb_history(path: Path) -> list[dict[str, Any]]:
    """The rows of an offline run: records of a LevelDB log, each a protocol buffer."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, rows, record = path.read_bytes(), 7, [], b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:  # a block ends with padding
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            parsed, record = Record.FromString(record), b""
            if parsed.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item for item in parsed.history.item}
                rows.append({key: json.loads(item.value_json) for key, item in items.items()})
    return rows


def batch(update: int) -> BatchTaken:
    return BatchTaken(
        t=float(update),
        update=update,
        version=update,
        samples=[2 * update, 2 * update + 1],
        lengths=[4, 8],
        rewards=[0.0, 1.0],
        staleness=[0, 1],
        staleness_token_sum=[0, 8],
        truncated=0,
        num_interrupted=0,
        slot_s=12.0,
    )


def done(update: int, loss: float) -> UpdateDone:
    metrics = {"loss": loss, "broken": float("nan")}
    return UpdateDone(
        t=update + 0.5, update=update, version=update + 1, optimizer_steps=1, seconds=0.5, metrics=metrics
    )


STARTED = RunStarted(t=0.0, strategy="sorted", seed=0, slots=4, update_batch=2, total_samples=8)


def feed(folder: Path, events: list[Event]) -> None:
    metrics = RunMetrics()
    emit = Fanout([metrics, TensorBoardSink(folder, metrics)])
    for event in events:
        emit(event)
    emit.close()
    assert not emit.num_failures


def test_tensorboard_holds_the_scalars_of_updates_and_evaluations(tmp_path: Path):
    evaluated = Evaluated(
        t=0.0,
        version=0,
        samples_trained=0,
        sampled_accuracy=0.25,
        greedy_accuracy=0.5,
        mean_length=6.0,
        by_group={"3": {"sampled_accuracy": 0.125}},
    )
    feed(tmp_path, [STARTED, evaluated, batch(0), done(0, 0.5), batch(1), done(1, 0.25)])
    found = tensorboard_scalars(tmp_path)
    assert found["batch/reward"] == {2: 0.5, 4: 0.5}
    assert found["batch/length"] == {2: 6.0, 4: 6.0}
    assert found["learner/loss"] == {2: 0.5, 4: 0.25}
    assert found["eval/accuracy"] == {0: 0.25}
    assert found["eval/3/sampled_accuracy"] == {0: 0.125}
    assert found["slot_time/update"] == {2: 1.0, 4: pytest.approx(1.0 / 1.5)}  # update 0 took the first 0.5 s
    assert "learner/broken" not in found


def test_a_resumed_run_takes_the_place_of_what_it_forgot(tmp_path: Path):
    feed(tmp_path, [STARTED, batch(0), done(0, 1.0), batch(1), done(1, 2.0)])
    feed(tmp_path, [STARTED, batch(0), RunResumed(t=1.0, version=1, lineage=1), batch(1), done(1, 4.0)])
    assert tensorboard_scalars(tmp_path)["learner/loss"] == {2: 1.0, 4: 4.0}


def test_both_trackers_of_a_live_run(tmp_path: Path):
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    config = SortedConfig(
        run={"name": "live", "dir": str(tmp_path), "samples": 32, "report": False},
        schedule={"update_batch": 16, "cohort_batches": 2},
        engine={"slots": 16, "max_new_tokens": 48},
        learner={"group_size": 4},
        eval={"prompts": 4},
        checkpoint={"save": False},
        track={"to": ["tensorboard", "wandb"]},
    )
    summary = SortedTrainer(args=config, quiet=True).train()
    rows = [json.loads(line) for line in (tmp_path / "live" / "metrics.jsonl").read_text().splitlines()]
    steps = [row["samples_trained"] for row in rows]
    board = tensorboard_scalars(tmp_path / "live" / "tensorboard")
    (path,) = (tmp_path / "live" / "wandb").glob("offline-run-*/*.wandb")
    history = wandb_history(path)
    updates = [row for row in history if "batch/reward" in row]
    assert [row["samples"] for row in updates] == steps
    for tag, name in (("batch/reward", "reward_mean"), ("batch/length", "mean_length"), ("run/seconds", "t")):
        expected = [row[name] for row in rows]
        assert [board[tag][step] for step in steps] == pytest.approx(expected)
        assert [row[tag] for row in updates] == pytest.approx(expected)
    assert [row["learner/loss"] for row in updates] == pytest.approx([row["learner"]["loss"] for row in rows])
    evaluations = {row["samples"]: row["eval/accuracy"] for row in history if "eval/accuracy" in row}
    assert evaluations == {0: summary.accuracy_before, 32: summary.accuracy_after}
    assert board["eval/accuracy"] == pytest.approx(evaluations)


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"track\.to = wandb needs the extra wandb: pip install 'sortedrl\[wandb\]'"):
        check_trackers(["wandb"])
    check_trackers([])


@pytest.mark.parametrize(
    ("to", "installed", "opened"),
    [
        ("tensorboard", ["tensorboard"], ["TensorBoardSink"]),
        (["tensorboard"], ["tensorboard"], ["TensorBoardSink"]),
        ("all", ["tensorboard"], ["TensorBoardSink"]),
        ("all", [], []),
        ("none", ["tensorboard", "wandb"], []),
        ([], ["tensorboard", "wandb"], []),
    ],
)
def test_trackers_are_named_as_in_report_to(
    to: Any, installed: list[str], opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trackers, "find_spec", lambda name: name if name in installed else None)
    config = SortedConfig(track={"to": to})
    check_trackers(config.track.trackers)
    found = open_trackers(config.track.trackers, tmp_path, RunMetrics(), TrackSettings(project="p", name="n"))
    assert [type(sink).__name__ for sink in found] == opened
    for sink in found:
        sink.close()
    (tmp_path / "run.toml").write_text(config.to_toml(), encoding="utf-8")
    assert SortedConfig.load(tmp_path / "run.toml").track == config.track


def test_a_tracker_that_cannot_start_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        opened = open_trackers(["tensorboard"], tmp_path, RunMetrics(), TrackSettings(project="p", name="n"))
    assert opened == []
    assert "tensorboard cannot start" in caplog.text


class FailingTracker(TrackerSink):
    def write(self, step: int, scalars: dict[str, float]) -> None:
        raise ConnectionError("no network")

    def go_back(self, step: int) -> None:
        raise ConnectionError("no network")

    def close(self) -> None:
        raise ConnectionError("no network")


def test_a_tracker_that_fails_later_warns_once(caplog: pytest.LogCaptureFixture):
    metrics = RunMetrics()
    emit = Fanout([metrics, FailingTracker(metrics)])
    with caplog.at_level(logging.WARNING):
        for event in [STARTED, batch(0), done(0, 1.0), batch(1), done(1, 2.0)]:
            emit(event)
        emit.close()
    assert len(caplog.records) == 1
    assert emit.num_failures == {"FailingTracker": 3}
    assert metrics.updates == 2


@pytest.mark.parametrize("section", [{"to": ["mlflow"]}, {"mode": "maybe"}, {"project": ""}])
def test_settings_that_cannot_be_kept(section: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"track\."):
        SortedConfig(track=section)
