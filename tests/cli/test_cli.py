"""The shipped commands: what they write and print, and how they refuse; test_cli_stop.py has how they stop.

Some run in a process of their own, by the console script; the rest call its entry point here, which is quicker.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sortedrl import __version__
from sortedrl.config import SortedConfig
from sortedrl.config.shipped import shipped_path
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.summary import Summary
from tests.support.forked_process import WAIT_S

QUICKSTART = shipped_path("quickstart")
SCRIPT = Path(sys.executable).parent / "sortedrl"
SMALL = [
    "run.samples=64",
    "schedule.update_batch=16",
    "engine.slots=16",
    "engine.max_new_tokens=64",
    "learner.group_size=4",
    "eval.prompts=8",
]


def script(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], cwd=cwd, capture_output=True, text=True, timeout=WAIT_S, check=False)


def only_json(text: str) -> dict[str, Any]:
    """The one JSON object that is all of stdout."""
    assert text.count("\n") == 1
    assert text.endswith("\n")
    record = json.loads(text)
    assert isinstance(record, dict)
    return record


def checkpoint_loads(run_dir: Path, version: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == [str(version)]
    folder = run_dir / "checkpoints" / str(version)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size


# ---- train ----------------------------------------------------------------------------------------------------------


def test_train_writes_the_run_directory(tmp_path: Path) -> None:
    done = script("train", str(QUICKSTART), *SMALL, "run.dir=out", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (run,) = only_json(done.stdout)["runs"]
    run_dir = tmp_path / "out" / "quickstart"
    written = {path.name for path in run_dir.iterdir()}
    assert written == {
        "config.toml",
        "events.jsonl",
        "metrics.jsonl",
        "ledger.sqlite",
        "summary.json",
        "report.html",
        "checkpoints",
    }
    assert run == json.loads((run_dir / "summary.json").read_text())
    assert (run["status"], run["strategy"], run["samples"]) == ("complete", "async-on-policy", 64)
    assert run["ledger"] == {"loaded": 64, "trained": 64, "lost": 0, "duplicated": 0}
    assert run["staleness_max"] == 0
    assert run["accuracy_before"] is not None
    assert run["accuracy_after"] is not None
    assert SortedConfig.load(run_dir / "config.toml").knobs == SortedConfig.load(QUICKSTART, SMALL).knobs
    kinds = [event.kind for event in read_events(run_dir / "events.jsonl")]
    assert (kinds[0], kinds[-1]) == ("RunStarted", "RunEnded")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == list(range(run["updates"]))
    assert "<html" in (run_dir / "report.html").read_text()[:1000].lower()
    checkpoint_loads(run_dir, run["updates"])


def test_train_prints_a_table_and_the_paths_written(call: Any, tmp_path: Path) -> None:
    code, out, err = call("train", str(QUICKSTART), *SMALL, "run.report=false")
    assert code == 0
    assert "async-on-policy" in out
    assert "0 / 0" in out
    last = err.strip().splitlines()[-1]
    assert last.startswith("done: ")
    assert str(Path("runs/quickstart/summary.json")) in last
    assert "report.html" not in last
    assert (tmp_path / "runs" / "quickstart" / "summary.json").is_file()


def test_a_run_of_the_same_name_is_moved_aside(call: Any, tmp_path: Path) -> None:
    small = [*SMALL, "run.report=false", "eval.prompts=0", "run.samples=16", "--json"]
    for seed in (1, 2):
        code, out, _ = call("train", str(QUICKSTART), *small, f"run.seed={seed}")
        assert code == 0
        assert only_json(out)["runs"][0]["seed"] == seed
    folders = {folder.name: folder for folder in (tmp_path / "runs").iterdir()}
    assert set(folders) == {"quickstart", "quickstart.1"}
    seeds = {name: Summary.read(folder / "summary.json").seed for name, folder in folders.items()}
    assert seeds == {"quickstart.1": 1, "quickstart": 2}
    for folder in folders.values():
        assert {path.name for path in folder.iterdir()} >= {"events.jsonl", "config.toml", "checkpoints"}


# ---- the other commands ---------------------------------------------------------------------------------------------


def test_compare_and_report(call: Any, tmp_path: Path) -> None:
    small = [*SMALL, "eval.prompts=0", "run.report=false"]
    code, out, err = call("compare", str(QUICKSTART), *small, "--strategies", "sync, sorted-replay", "--json")
    assert code == 0, err
    runs = only_json(out)["runs"]
    assert [run["strategy"] for run in runs] == ["sync", "sorted-replay"]
    for run in runs:
        assert (run["samples"], run["slots"], run["update_batch"], run["seed"]) == (64, 16, 16, 0)
        assert (run["ledger"]["lost"], run["ledger"]["duplicated"]) == (0, 0)
    assert (tmp_path / "runs" / "quickstart-compare.html").is_file()
    names = [f"runs/quickstart-{strategy}-seed0" for strategy in ("sync", "sorted-replay")]
    assert all((tmp_path / name / "summary.json").is_file() for name in names)

    code, out, _ = call("report", *names, "--out", "both.html", "--json")
    assert (code, only_json(out)) == (0, {"report": "both.html"})
    page = (tmp_path / "both.html").read_text()
    assert "sync" in page
    assert "sorted-replay" in page
    code, _, err = call("report", names[0])
    assert code == 0
    assert (tmp_path / names[0] / "report.html").is_file()
    assert "report.html" in err


def test_compare_refuses_before_it_trains(call: Any, tmp_path: Path) -> None:
    arguments = ["schedule.cohort_batches=1", "--strategies", "sync,tail-batching"]
    code, out, err = call("compare", str(QUICKSTART), *SMALL, *arguments)
    assert (code, out) == (2, "")
    assert "tail-last" in err
    assert not (tmp_path / "runs").exists()


def test_doctor(call: Any, tmp_path: Path) -> None:
    code, out, err = call("doctor")
    assert (code, err) == (0, "")
    assert "torch" in out
    code, out, _ = call("doctor", str(QUICKSTART), "--json")
    assert code == 0
    findings = {finding["name"]: finding for finding in only_json(out)["findings"]}
    assert findings["config"]["is_fine"]
    assert findings["model"]["is_fine"]
    (tmp_path / "broken.toml").write_text("[engine]\nslots = 0\n")
    code, out, _ = call("doctor", "broken.toml")
    assert code == 2
    assert "engine.slots" in out
    code, out, _ = call("doctor", "broken.toml", "--json")
    assert code == 2
    assert [f["name"] for f in only_json(out)["findings"] if not f["is_fine"]] == ["config"]


def test_sft(call: Any, tmp_path: Path) -> None:
    code, out, err = call("sft", "model", "--steps", "3", "--seed", "1", "--json")
    assert code == 0, err
    record = only_json(out)
    assert (record["path"], record["steps"]) == ("model", 3)
    assert record["loss"] > 0
    from sortedrl.run.checkpoint_folder import load_model

    load_model(tmp_path / "model")
    code, out, err = call("sft", "again", "--steps", "1")
    assert (code, out) == (0, "")
    assert "saved again: loss" in err


def test_help_and_usage(call: Any) -> None:
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    assert all(name in out for name in ("train", "compare", "sft", "report", "doctor"))
    code, out, err = call()
    assert (code, err) == (2, "")
    assert "train" in out
    assert call("--version") == (0, f"sortedrl {__version__}\n", "")


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> None:
    """What a model folder is not."""
    from sortedrl.tasks.tiny import knights_tiny_path

    (tmp_path / "file").write_text("no folder")
    (tmp_path / "empty").mkdir()
    (tmp_path / "config-only").mkdir()
    (tmp_path / "config-only" / "config.json").write_bytes((knights_tiny_path() / "config.json").read_bytes())
    (tmp_path / "garbage").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "garbage" / name).write_text("{}")
    (tmp_path / "broken.toml").write_text("[run\n")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")


TRAIN = ["train", str(QUICKSTART), *SMALL, "learner.algorithm=grpo"]  # small, should one not be refused
BAD_INPUT = {
    "unknown key": (
        [*TRAIN, "schedule.update_bach=8"],
        ["schedule.update_bach", "did you mean schedule.update_batch?"],
    ),
    "unknown section": ([*TRAIN, "enigne.slots=8"], ["enigne", "did you mean engine?"]),
    "wrong type": ([*TRAIN, "engine.slots=many"], ["engine.slots", "integer", "'many'"]),
    "U larger than the data": ([*TRAIN, "run.samples=8"], ["update_batch 16", "larger than run.samples 8"]),
    "U no multiple of k": ([*TRAIN, "schedule.update_batch=18"], ["update_batch 18", "multiple of learner.group_size"]),
    "no slots": ([*TRAIN, "engine.slots=0"], ["engine.slots", "greater than or equal to 1"]),
    "negative staleness": ([*TRAIN, "schedule.max_staleness=-1"], ["schedule.max_staleness", "equal to 0"]),
    "knobs that cannot be kept": (
        [*TRAIN, "schedule.strategy=async", "schedule.max_staleness=0"],
        ["cannot be kept", "set max_staleness >= 1"],
    ),
    "unknown strategy": ([*TRAIN, "schedule.strategy=sortd"], ["schedule.strategy", "'sortd'", "sorted-replay"]),
    "unknown task": ([*TRAIN, "task.name=chess"], ["'chess'", "choose from knights"]),
    "people": ([*TRAIN, "task.people={ 9 = 1 }"], ["task.people", "from 2 to 5"]),
    "no such model": ([*TRAIN, "model.path=nowhere"], ["'nowhere' is not a folder", "or give a folder"]),
    "model is a file": ([*TRAIN, "model.path=file"], ["'file' is not a folder", "from_pretrained"]),
    "model folder is empty": ([*TRAIN, "model.path=empty"], ["empty is not a model folder", "config.json is missing"]),
    "model without weights": ([*TRAIN, "model.path=config-only"], ["has no safetensors weights", "save its weights"]),
    "model is garbage": ([*TRAIN, "model.path=garbage"], ["in garbage cannot be loaded"]),
    "budget beyond the model": (
        [*TRAIN, "engine.max_new_tokens=9999"],
        ["engine.max_new_tokens 9999", "the 1024 positions of the model", "lower one of them"],
    ),
    "run directory below a file": (
        [*TRAIN, "run.dir=file/runs"],
        ["cannot write the run directory file/runs/quickstart", "run.dir=PATH"],
    ),
    "unknown strategy in compare": (
        ["compare", str(QUICKSTART), "--strategies", "sync,sortd"],
        ["unknown strategy 'sortd'", "choose from sync"],
    ),
    "no strategy in compare": (
        ["compare", str(QUICKSTART), "--strategies", " , "],
        ["--strategies", "choose from sync"],
    ),
    "no seed in compare": (["compare", str(QUICKSTART), "--seeds", "0"], ["--seeds", "equal to 1"]),
    "missing configuration": (["train", "none.toml"], ["none.toml", "No such file"]),
    "configuration is a folder": (["train", "empty"], ["cannot read the configuration empty"]),
    "configuration is no TOML": (["train", "broken.toml"], ["broken.toml is not valid TOML"]),
    "configuration is no text": (["train", "binary.toml"], ["binary.toml is not valid TOML"]),
    "override without =": ([*TRAIN, "run.seed"], ["'run.seed'", "write section.name=value"]),
    "override without a section": ([*TRAIN, "seed=1"], ["'seed'"]),
    "override of a section": ([*TRAIN, "run.seed.x=1"], ["run.seed"]),
    "missing argument": (["train"], ["CONFIG"]),
    "unknown command": (["trian"], ["trian"]),
    "unknown option": ([*TRAIN, "--fast"], ["--fast"]),
    "report of nothing": (["report", "nowhere"], ["nowhere is not a directory", "pass the directory of a run"]),
    "report of an empty folder": (["report", "empty"], ["empty"]),
    "sft into a file": (
        ["sft", "file", "--steps", "1", "--json"],
        ["cannot write the model folder file", "choose another"],
    ),
}


@pytest.mark.usefixtures("folders")
@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_in_one_line(case: str, call: Any) -> None:
    arguments, parts = BAD_INPUT[case]
    code, out, err = call(*arguments)
    assert (code, out) == (2, ""), err
    assert "Traceback" not in err
    (line,) = err.strip().splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line


def test_bad_input_ends_the_real_command_too(tmp_path: Path) -> None:
    done = script("train", str(QUICKSTART), "engine.slots=0", "--json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: engine.slots: input should be greater than or equal to 1, not 0\n"
