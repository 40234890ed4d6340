"""Resuming: a complete run and a refused setting are told before torch is imported; the start folder is found again."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify
from sortedrl.run.saved_run import saved_settings
from sortedrl.telemetry.summary import Summary

SAMPLES = 16
CONFIG = f"""
[run]
name = "brief"
samples = {SAMPLES}
report = false
[task]
name = "dataset"
path = "data/rows.jsonl"
reward = "brief_rewards:brevity"
eval_share = 0.0
[schedule]
update_batch = 16
[engine]
slots = 16
max_new_tokens = 16
[learner]
group_size = 4
[eval]
prompts = 0
"""
REWARDS = """
from pathlib import Path


def brevity(completions):
    return [float(Path("scale.txt").read_text()) * -len(text) for text in completions]
"""
# Runs the command line in a process that cannot import torch.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from sortedrl.cli import main
sys.argv = ["sortedrl", *sys.argv[1:]]
main()
"""


@pytest.fixture
def run_dir(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A complete run, started in a folder that holds its rows, its reward module and a file that this one reads."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "data").mkdir(parents=True)
    elsewhere.mkdir()
    rows = [{"prompt": "Ann says Bob-knave . Bob says Ann-knight . ?"}] * 4
    (project / "data" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project / "brief_rewards.py").write_text(REWARDS)
    (project / "scale.txt").write_text("0.5")
    (project / "run.toml").write_text(CONFIG)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(project)
    code, _, err = call("train", "run.toml", "--json")
    assert code == 0, err
    monkeypatch.chdir(elsewhere)
    sys.path.remove(str(project))
    sys.modules.pop("brief_rewards", None)
    return project / "runs" / "brief"


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_complete_run_a_refused_key_a_changed_number_and_a_run_that_goes_on_elsewhere(
    run_dir: Path, call: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One run for four cases, because each needs one that was trained."""
    left = run_dir / ".0123456789abcdef.part"  # as a kill leaves it while a file is written
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    left.touch()
    done = without_torch("train", "--resume", str(run_dir))
    assert done.returncode == 0, done.stderr
    more = f"sortedrl train --resume {run_dir} run.samples={2 * SAMPLES}"
    assert done.stderr.splitlines()[0] == (
        f"{run_dir} is complete: {SAMPLES} samples are trained; to train further, raise run.samples: {more}"
    )
    refused = without_torch("train", "--resume", str(run_dir), "engine.slots=8", "learner.lr=1e-5", "schedule=sync")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == (
        "error: schedule.strategy was 'sorted-replay' when the run was saved and is 'sync' here; engine.slots was 16 "
        "when the run was saved and is 8 here: set them back, or start a new run\n"
    )
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before

    connection = sqlite3.connect(run_dir / "ledger.sqlite")
    connection.execute("UPDATE samples SET budget = budget + 4 WHERE id = 3")
    connection.commit()
    connection.close()
    code, out, err = call("train", "--resume", str(run_dir), "--json")
    assert code == 0, err
    assert "table samples differs from the copy" in caplog.text
    (result,) = json.loads(out)["runs"]
    assert (result["status"], result["samples"]) == ("complete", SAMPLES)
    assert (run_dir / "ledger.sqlite.damaged1").is_file()
    with Ledger(run_dir) as ledger:
        assert verify(ledger).num_violations == 0

    left.touch()
    code, out, err = call("train", "--resume", str(run_dir), f"run.samples={2 * SAMPLES}", "--json")
    assert code == 0, err
    assert not left.exists()
    (result,) = json.loads(out)["runs"]
    assert (result["status"], result["samples"]) == ("complete", 2 * SAMPLES)
    assert Path.cwd() == run_dir.parent.parent  # where the reward function finds its file
    assert SortedConfig.load(run_dir / "config.toml").run.started_in == str(run_dir.parent.parent)


def test_a_folder_that_is_gone_is_told(
    run_dir: Path, call: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moved = (tmp_path / "project").rename(tmp_path / "moved") / "runs" / "brief"
    code, _, err = call("train", "--resume", str(moved), f"run.samples={2 * SAMPLES}", "--json")
    assert code == 2
    assert f"the run was started in {tmp_path / 'project'} (No such file or directory)" in caplog.text
    assert "name another with run.started_in=FOLDER" in caplog.text
    assert "there is no module brief_rewards in" in err
    code, _, err = call(
        "train", "--resume", str(moved), f"run.samples={2 * SAMPLES}", f"run.started_in={tmp_path / 'moved'}", "--json"
    )
    assert code == 0, err


# ---- settings -------------------------------------------------------------------------------------------------------


def test_settings_come_from_the_newest_checkpoint_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(SortedConfig(run={"seed": 1}).to_toml())
    assert saved_settings(tmp_path, SortedConfig())["run"]["seed"] == 1
    for version, text in (("9", '{"schema_version": 1, "extra": {"config": {"run": {"seed": 2}}}}'), ("10", "{")):
        (tmp_path / "checkpoints" / version).mkdir(parents=True)
        (tmp_path / "checkpoints" / version / "learner_state.json").write_text(text)
    assert saved_settings(tmp_path, SortedConfig()) == {"run": {"seed": 2}}


def test_many_changed_settings_are_counted() -> None:
    saved = SortedConfig().resolved()
    values = {"slots": 8, "top_k": 1, "top_p": 0.5, "min_p": 0.1, "max_new_tokens": 9, "temperature": 0.5}
    with pytest.raises(
        ConfigError, match=r"engine\.slots was 32 .* \(and 1 more\): set them back, or start a new run$"
    ):
        SortedConfig(engine=values).check_resumable(saved)


def test_recorded_values_count_where_nothing_is_set() -> None:
    saved = SortedConfig(run={"started_in": "/there"}, engine={"stop_tokens": [1, 2]}).resolved()
    silent = SortedConfig(engine={"slots": 8}).continuing(saved)
    assert (silent.run.started_in, silent.engine.stop_tokens, silent.engine.slots) == ("/there", (1, 2), 8)
    assert "temperature" not in silent.engine.model_fields_set
    explicit = SortedConfig(engine={"stop_tokens": [3]}).continuing(saved)
    assert explicit.engine.stop_tokens == (3,)
    assert SortedConfig().continuing({}).resolved() == SortedConfig().resolved()  # a run of an older version


def test_a_model_chosen_later_brings_its_own_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(SortedConfig(engine={"stop_tokens": [7]}).to_toml())
    assert SortedConfig.load(tmp_path / "config.toml").engine.stop_tokens == (7,)
    assert SortedConfig.load(tmp_path / "config.toml", ["model.path=other"]).engine.stop_tokens is None
    assert SortedConfig.load(tmp_path / "config.toml", ["model=other"]).with_model("other").model.path == "other"
    assert SortedConfig.load(tmp_path / "config.toml").with_model("knights-tiny").engine.stop_tokens == (7,)


def test_a_summary_of_a_stopped_or_shorter_run_is_no_result(tmp_path: Path) -> None:
    from sortedrl.run.saved_run import find_result

    config = SortedConfig(run={"samples": 64})
    assert find_result(tmp_path, config) is None
    for status, samples, is_result in (("stopped", 64, False), ("complete", 32, False), ("complete", 64, True)):
        Summary(strategy="sync", status=status, samples=samples).write(tmp_path / "summary.json")
        assert (find_result(tmp_path, config) is not None) == is_result
    (tmp_path / "summary.json").write_text("{")
    assert find_result(tmp_path, config) is None


def test_a_result_whose_last_checkpoint_has_a_changed_bit_is_none(tmp_path: Path) -> None:
    from sortedrl.run.manifest import write_manifest
    from sortedrl.run.saved_run import find_result

    checkpoint = tmp_path / "checkpoints" / "8"
    checkpoint.mkdir(parents=True)
    (checkpoint / "learner_state.json").write_text("{}")
    (checkpoint / "model.safetensors").write_bytes(b"\x00\x01")
    write_manifest(checkpoint)
    Summary(strategy="sync", status="complete", samples=64).write(tmp_path / "summary.json")
    assert find_result(tmp_path, SortedConfig(run={"samples": 64})) is not None
    (checkpoint / "model.safetensors").write_bytes(b"\x00\x03")  # of the same size
    assert find_result(tmp_path, SortedConfig(run={"samples": 64})) is None
