"""Real faults in a run: the error says what to do, the ledger stays complete, and the run can be resumed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sortedrl.config.config import CHANGEABLE, SortedConfig
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.errors import ConfigError, EngineError, LedgerError, RunDirError
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.store import Store
from sortedrl.ledger.verify import verify
from sortedrl.run.checkpoint_folder import Checkpoints
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import RunResumed
from sortedrl.telemetry.run_reader import RunReader
from sortedrl.telemetry.summary import Summary
from sortedrl.telemetry.trace import trace_run
from sortedrl.trainer import SortedTrainer
from tests.support.small_disk import mount_small_disk

UPDATES = 4
SAMPLES = 16 * UPDATES


def make_config(folder: Path, **sections: dict[str, Any]) -> SortedConfig:
    settings: dict[str, dict[str, Any]] = {
        "run": {"name": "faulty", "dir": str(folder), "samples": SAMPLES, "report": False},
        "engine": {"slots": 16, "max_new_tokens": 48},
        "schedule": {"update_batch": 16},
        "reward": {"grace_s": 60.0},  # batches do not depend on the speed of the reward workers
        "learner": {"algorithm": "reinforce++", "group_size": 1},
        "eval": {"prompts": 0},
        "checkpoint": {"every_updates": 1},
    }
    for section, values in sections.items():
        settings[section] = {**settings.get(section, {}), **values}
    return SortedConfig(**settings)


def train(config: SortedConfig, *, resume: bool = False) -> Summary:
    return SortedTrainer(args=config, quiet=True).train(resume=resume)


def check_file(config: SortedConfig) -> None:
    """Verify from the ledger file alone that no sample was lost or trained twice."""
    with Ledger(config.run_dir / "ledger.sqlite") as ledger:
        assert verify(ledger).violations == []


def check_goes_on(config: SortedConfig) -> None:
    """Resume the run; it must train all remaining samples."""
    check_file(config)
    summary = train(config, resume=True)
    assert summary.status == "complete"
    assert summary.ledger is not None
    assert summary.ledger.model_dump() == {"loaded": SAMPLES, "trained": SAMPLES, "lost": 0, "duplicated": 0}
    check_file(config)


@contextlib.contextmanager
def failing_after(num_polls: int, failure: Any) -> Iterator[None]:
    """Let the engine work for `num_polls` polls, then call `failure` in place of every poll."""
    poll, calls = LocalEngine.poll, itertools.count()

    def broken(self: LocalEngine, timeout: float | None = None) -> Any:
        return failure() if next(calls) >= num_polls else poll(self, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalEngine, "poll", broken)
        yield


# ---- engines --------------------------------------------------------------------------------------------------------


def test_an_engine_that_raises(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    def break_down() -> None:
        raise RuntimeError("device lost")

    with failing_after(40, break_down), pytest.raises(EngineError, match=r"failed in poll.*device lost") as caught:
        train(config)
    newest = Checkpoints(config.run_dir / "checkpoints").versions()[-1]
    assert caught.value.__notes__ == [
        f"continue from checkpoint {newest} with: sortedrl train --resume {config.run_dir}"
    ]
    check_goes_on(config)


def test_an_engine_that_hangs(tmp_path: Path) -> None:
    config = make_config(tmp_path, engine={"watchdog_s": 5.0})
    with failing_after(40, lambda: time.sleep(600)), pytest.raises(EngineError, match=r"did not answer for .* in poll"):
        train(config)
    check_goes_on(make_config(tmp_path))  # the limit may change between runs


# ---- processes ------------------------------------------------------------------------------------------------------


class KillWorker:
    """A sink that kills the reward workers once, in the middle of a run."""

    num_killed = 0

    def emit(self, event: Any) -> None:
        if event.kind != "UpdateDone" or self.num_killed:
            return
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("reward/worker" in part for part in child.cmdline()):
                    child.kill()
                    self.num_killed += 1

    def close(self) -> None:
        pass


def test_a_reward_worker_that_is_killed(tmp_path: Path) -> None:
    config, killer = make_config(tmp_path), KillWorker()
    summary = SortedTrainer(args=config, sinks=[killer], quiet=True).train()
    assert killer.num_killed >= 1
    assert summary.ledger is not None
    assert summary.ledger.model_dump() == {"loaded": SAMPLES, "trained": SAMPLES, "lost": 0, "duplicated": 0}
    check_file(config)


def test_two_processes_on_one_run(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    train(config)
    config = make_config(tmp_path, run={"samples": SAMPLES + 16})
    hold = "import sys; from sortedrl.ledger.run_lock import RunLock\nwith RunLock(sys.argv[1]): input()"
    with subprocess.Popen([sys.executable, "-c", hold, str(config.run_dir)], stdin=subprocess.PIPE) as holder:
        while not (config.run_dir / "lock").is_file() or not (config.run_dir / "lock").read_text():
            assert holder.poll() is None, "the process ended before it locked the run"
            time.sleep(0.01)
        for resume in (True, False):
            with pytest.raises(RunDirError, match=f"in use by process {holder.pid}"):
                train(config, resume=resume)
        holder.communicate(b"\n")
    assert train(config, resume=True).status == "complete"


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MB, which holds two checkpoints of the tiny model, but not three."""
    yield from mount_small_disk("6m", tmp_path)


def test_a_full_disk(small_disk: Path) -> None:
    config = make_config(small_disk, checkpoint={"keep": 4})
    with pytest.raises((RunDirError, LedgerError), match=r"free|space") as caught:
        train(config)
    assert "--resume" in "".join(caught.value.__notes__)
    roomy = make_config(small_disk, checkpoint={"keep": 1})
    check_goes_on(roomy)


def test_a_damaged_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(tmp_path)
    train(config)
    newest = config.run_dir / "checkpoints" / str(UPDATES)
    with (newest / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with caplog.at_level(logging.WARNING):
        check_goes_on(config)
    assert f"{newest} (model.safetensors" in caplog.text
    assert str(newest.with_name(str(UPDATES - 1))) in caplog.text


def test_checkpoints_that_are_all_damaged(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    train(config)
    for folder in (config.run_dir / "checkpoints").iterdir():
        (folder / "optimizer.safetensors").unlink()
    with pytest.raises(RunDirError, match=r"every checkpoint is damaged.*optimizer\.safetensors"):
        train(config, resume=True)


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "missing"])
def test_a_damaged_ledger(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(tmp_path)
    train(config)
    path = config.run_dir / "ledger.sqlite"
    if damage == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif damage == "overwritten":
        path.write_bytes(b"no ledger" * 1000)
    else:
        path.unlink()
    more = make_config(tmp_path, run={"samples": SAMPLES + 16})
    with caplog.at_level(logging.WARNING):
        summary = train(more, resume=True)
    assert "replaces it" in caplog.text
    assert summary.ledger is not None
    assert (summary.ledger.trained, summary.ledger.lost, summary.ledger.duplicated) == (SAMPLES + 16, 0, 0)
    check_file(more)
    if damage != "missing":
        assert (config.run_dir / "ledger.sqlite.damaged1").is_file()


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a complete run, to be copied."""
    folder = tmp_path_factory.mktemp("trained")
    train(make_config(folder))
    return folder


def flip_byte(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 0x40]) + data[position + 1 :]


def without_line(data: bytes, word: bytes) -> bytes:
    """The same lines without the first one that has `word`."""
    lines = data.splitlines(keepends=True)
    lines.remove(next(line for line in lines if word in line))
    return b"".join(lines)


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "end lost": ("events.jsonl", lambda data: data[:100]),
    "byte flipped": ("events.jsonl", lambda data: flip_byte(data, data.index(b'"BatchTaken"') - 1)),
    "first line flipped": ("events.jsonl", lambda data: flip_byte(data, 0)),
    "line of a batch lost": ("events.jsonl", lambda data: without_line(data, b'"BatchTaken"')),
    "line of a cohort lost": ("events.jsonl", lambda data: without_line(data, b'"CohortLoaded"')),
    "short line lost": ("events.jsonl", lambda data: without_line(data, b'"WeightsPublished"')),
    "all lost": ("events.jsonl", lambda data: b""),
    "another file": ("events.jsonl", lambda data: b"\xff" * 100 + b"\n" + b" " * len(data)),
    "metrics: end lost": ("metrics.jsonl", lambda data: data[:100]),
    "metrics: byte flipped": ("metrics.jsonl", lambda data: flip_byte(data, 0)),
    "metrics: line lost": ("metrics.jsonl", lambda data: without_line(data, b'"update":1')),
}


QUICK = ("end lost", "first line flipped", "line of a batch lost", "short line lost", "metrics: end lost")


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in DAMAGES]
)
def test_damaged_telemetry_does_not_stop_a_resume(
    damage: str, trained_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(trained_run, tmp_path / "run")
    config = make_config(tmp_path / "run", run={"samples": SAMPLES + 16})
    name, change = DAMAGES[damage]
    path = config.run_dir / name
    path.write_bytes(change(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        summary = train(config, resume=True)
    (warning,) = [record.getMessage() for record in caplog.records if "incomplete" in record.getMessage()]
    assert str(path) in warning
    assert "\n" not in warning
    assert (summary.status, summary.samples, summary.updates) == ("complete", SAMPLES + 16, UPDATES + 1)
    assert summary.ledger is not None
    everything = {"loaded": SAMPLES + 16, "trained": SAMPLES + 16, "lost": 0, "duplicated": 0}
    assert summary.ledger.model_dump() == everything
    assert summary.events_gap is not None
    assert name in summary.events_gap
    check_file(config)

    resumed = [event for event in read_events(config.run_dir / "events.jsonl") if isinstance(event, RunResumed)]
    assert [event.gap for event in resumed] == [summary.events_gap]
    assert any("incomplete" in note for note in trace_run(config.run_dir, perfetto=tmp_path / "trace.json").notes)
    reader = RunReader(config.run_dir)
    reader.read_all()
    reader.read_summary()
    assert any("incomplete" in remark for remark in reader.remarks())
    assert reader.view.metrics.samples == SAMPLES + 16


def test_a_run_with_a_gap_in_its_events_is_resumed_again(trained_run: Path, tmp_path: Path) -> None:
    shutil.copytree(trained_run, tmp_path / "run")
    path = make_config(tmp_path / "run").run_dir / "events.jsonl"
    os.truncate(path, 100)
    for samples in (SAMPLES + 16, SAMPLES + 32):
        summary = train(make_config(tmp_path / "run", run={"samples": samples}), resume=True)
        assert (summary.status, summary.samples) == ("complete", samples)
        assert summary.events_gap is not None
    assert len(path.read_bytes().splitlines()[0]) == 100  # kept as it was


def test_a_run_that_died_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    config = make_config(tmp_path)

    def break_down() -> None:
        raise RuntimeError("device lost")

    with failing_after(1, break_down), pytest.raises(EngineError) as caught:
        train(config)
    assert not hasattr(caught.value, "__notes__")
    check_goes_on(config)


# ---- settings -------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_with_the_settings_that_may_change_and_no_others(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    train(config)
    with pytest.raises(ConfigError, match=r"^engine\.slots was 16 .* and is 8 here: set it back, or start a new run$"):
        train(make_config(tmp_path, engine={"slots": 8}), resume=True)
    longer = train(make_config(tmp_path, run={"samples": SAMPLES + 32}, checkpoint={"every_updates": 0}), resume=True)
    assert longer.samples == SAMPLES + 32
    check_file(config)


def test_keys_that_may_change_are_keys() -> None:
    known = {f"{section}.{key}" for section, values in SortedConfig().resolved().items() for key in values}
    assert known >= CHANGEABLE


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="holds no run to resume"):
        train(make_config(tmp_path), resume=True)


def test_a_smaller_budget_ends_the_run_and_a_larger_one_repeats_nothing(tmp_path: Path) -> None:
    train(make_config(tmp_path))
    less = train(make_config(tmp_path, run={"samples": 32}), resume=True)
    assert (less.status, less.samples) == ("complete", SAMPLES)
    more = train(make_config(tmp_path, run={"samples": SAMPLES + 32}), resume=True)
    assert more.samples == SAMPLES + 32
    check_file(make_config(tmp_path))  # every prompt once per epoch


def test_settings_are_compared_with_the_checkpoint_not_with_a_file_that_may_be_edited(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    train(config)
    path = config.run_dir / "config.toml"
    path.write_text(path.read_text().replace("temperature = 1.0", "temperature = 0.5"))
    with pytest.raises(ConfigError, match=r"engine\.temperature was 1\.0 .* and is 0\.5 here"):
        train(SortedConfig.load(path), resume=True)
    path.write_text("")
    with pytest.raises(ConfigError, match="when the run was saved"):
        train(SortedConfig.load(path).moved(tmp_path, "faulty"), resume=True)


def test_a_run_that_ended_without_checkpoints_is_left_alone(tmp_path: Path) -> None:
    config = make_config(tmp_path, checkpoint={"save": False})
    train(config)
    before = (config.run_dir / "events.jsonl").read_bytes()
    assert train(config, resume=True).status == "complete"
    longer = make_config(tmp_path, run={"samples": SAMPLES + 32}, checkpoint={"save": False})
    with pytest.raises(RunDirError, match="has no checkpoint to continue from: start a new run"):
        train(longer, resume=True)
    assert (config.run_dir / "events.jsonl").read_bytes() == before


def test_the_time_to_start_is_not_part_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_s, skipped_s, init = 1e9, 0.0, LocalEngine.__init__

    def slow_init(*arguments: Any, **options: Any) -> None:
        nonlocal skipped_s
        skipped_s += start_s
        init(*arguments, **options)

    monkeypatch.setattr(LocalEngine, "__init__", slow_init)
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + skipped_s)
    monkeypatch.setattr("sortedrl.clock.time", clock)
    first = train(make_config(tmp_path))
    last = train(make_config(tmp_path, run={"samples": SAMPLES + 32}), resume=True)
    assert skipped_s == 2 * start_s
    assert first.wall_s is not None
    assert last.wall_s is not None
    assert 0 < first.wall_s < start_s
    assert 0 < last.wall_s < start_s
    assert (last.samples, last.status) == (SAMPLES + 32, "complete")


def test_a_trainer_can_be_stopped_and_go_on(tmp_path: Path) -> None:
    trainer = SortedTrainer(args=make_config(tmp_path), quiet=True)
    trainer.sinks = [StopAtOnce(trainer)]
    assert trainer.train().status == "stopped"
    trainer.sinks = []
    assert trainer.train(resume=True).status == "complete"


class StopAtOnce:
    def __init__(self, trainer: SortedTrainer) -> None:
        self.trainer = trainer

    def emit(self, event: Any) -> None:
        if event.kind == "UpdateDone":
            self.trainer.stop()

    def close(self) -> None:
        pass


def test_an_interrupt_in_the_middle_of_a_row_is_not_written(tmp_path: Path) -> None:
    config, add = make_config(tmp_path), Store._add
    rows = itertools.count()

    def interrupted(self: Store, table: str, *row: object) -> None:
        if table == "trained" and next(rows) == 20:
            raise KeyboardInterrupt
        add(self, table, *row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "_add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    check_goes_on(config)
