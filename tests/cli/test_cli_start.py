"""From install to a first run: `configs`, `init`, names of configurations, help, completion, extras and messages."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import sortedrl
from sortedrl.cli.messages import LineHandler, show_messages
from sortedrl.config import SortedConfig
from sortedrl.config.shipped import shipped_names, shipped_path
from sortedrl.external import extras
from tests.cli.test_cli import SCRIPT, SMALL, only_json

TINY = [*SMALL, "run.samples=16", "eval.prompts=0", "run.report=false", "--json"]


# ---- configs and names -----------------------------------------------------------------------------------------------


def test_configs_lists_and_prints_them(call: Any) -> None:
    code, out, err = call("configs")
    assert (code, err) == (0, "")
    assert all(name in out for name in shipped_names())
    assert "extras gym, math, smollm2" in out
    code, out, _ = call("configs", "--json")
    listed = {each["name"]: each for each in only_json(out)["configs"]}
    assert list(listed) == shipped_names()
    assert listed["scale-8gpu"]["hardware"] == "8 x h100"
    code, out, _ = call("configs", "quickstart")
    assert (code, out) == (0, shipped_path("quickstart").read_text())
    code, out, _ = call("configs", "quickstart", "--json")
    assert tomllib.loads(only_json(out)["toml"])["run"]["name"] == "quickstart"
    code, out, err = call("configs", "quikstart")
    assert (code, out) == (2, "")
    assert "did you mean quickstart?" in err


def test_commands_take_a_configuration_by_name(call: Any, tmp_path: Path) -> None:
    code, out, err = call("train", "quickstart", *TINY)
    assert code == 0, err
    assert only_json(out)["runs"][0]["samples"] == 16
    code, out, err = call("train", "configs/quickstart.toml", *TINY, "track.to=tensorboard")  # one name for a list
    assert code == 0, err
    assert SortedConfig.load(tmp_path / "runs" / "quickstart" / "config.toml").track.to == "tensorboard"
    code, out, err = call("sft", "quickstart", "sft.examples=8", "sft.batch_tokens=512", "--steps", "1", "--json")
    assert code == 0, err
    assert only_json(out)["path"] == "runs/quickstart/sft"
    code, out, err = call("compare", "quickstart", "--strategies", "nonsense")
    assert code == 2
    assert "unknown strategy" in err
    code, out, err = call("eval", "quickstart", "--suite", "knights")
    assert (code, out) == (2, "")
    assert "quickstart is a configuration, not a model: give its model knights-tiny" in err
    code, out, err = call("train", "runs/quickstart")
    assert code == 2
    assert "sortedrl train --resume runs/quickstart" in err


def test_an_earlier_run_is_announced(call: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "notes.txt").write_text("mine")
    code, _, err = call("train", "quickstart", *TINY)
    assert code == 0, err
    assert "an earlier run was in runs/quickstart: it is now in runs/quickstart.1" in caplog.text
    assert (tmp_path / "runs" / "quickstart.1" / "notes.txt").read_text() == "mine"


# ---- init ------------------------------------------------------------------------------------------------------------


def test_init_writes_a_run_that_trains(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    code, out, err = call("init", "first_try", "--json")
    assert code == 0, err
    names = ["first_try.toml", "first_try_rows.jsonl", "first_try_reward.py"]
    assert only_json(out) == {"files": names}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert "starter" not in (tmp_path / "first_try.toml").read_text()
    code, out, err = call("train", "first_try.toml", "run.samples=32", "run.report=false", "--json")
    assert code == 0, err
    (run,) = only_json(out)["runs"]
    assert (run["status"], run["samples"]) == ("complete", 32)
    assert run["accuracy_after"] is not None


def test_the_reward_of_init_marks_answers() -> None:
    from sortedrl.cli.starter.reward import is_right

    texts = ["try A=knave bad answer A=knight done", "answer A=knight", "try answer A=knave done", ""]
    assert is_right(["?"] * 4, texts, ["A=knight"] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_the_rows_of_init_are_puzzles_with_their_solutions() -> None:
    from sortedrl.tasks.knights import parse, solutions

    lines = (Path(sortedrl.__file__).parent / "cli" / "starter" / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({row["prompt"] for row in rows}) == len(rows) >= 40
    for row in rows:
        puzzle = parse(row["prompt"])
        assert row["answer"] == puzzle.write(*solutions(puzzle))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my-run", "such as my_run"),
        ("demo.toml", "such as demo"),
        ("../demo", "such as demo"),
        ("1", "begin with a letter"),
        ("", "begin with a letter"),
        ("a" * 100, "begin with a letter"),
        ("quickstart", "is the name of a shipped configuration"),
    ],
)
def test_init_refuses_bad_names(name: str, message: str, call: Any, tmp_path: Path) -> None:
    code, out, err = call("init", name)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["demo.toml", "demo_rows.jsonl", "demo_reward.py"])
def test_init_never_overwrites(file: str, call: Any, tmp_path: Path) -> None:
    (tmp_path / file).write_text("mine")
    code, _, err = call("init", "demo")
    assert code == 2
    assert f"{file} is already here" in err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


# ---- help, completion, extras ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ([], "sortedrl [OPTIONS] COMMAND [ARGS]..."),
        (["train"], "sortedrl train [OPTIONS] [CONFIG] [KEY=VALUE]..."),
        (["compare"], "sortedrl compare [OPTIONS] CONFIG [KEY=VALUE]..."),
        (["eval"], "sortedrl eval [OPTIONS] MODEL"),
        (["report"], "sortedrl report [OPTIONS] RUN..."),
        (["doctor"], "sortedrl doctor [OPTIONS] [CONFIG]"),
        (["bench", "engine"], "sortedrl bench engine [OPTIONS]"),
    ],
)
def test_h_is_help_and_usage_lines_are_plain(command: list[str], usage: str, call: Any) -> None:
    code, out, _ = call(*command, "-h")
    assert code == 0
    (line,) = (line.strip() for line in out.splitlines() if "Usage:" in line)
    assert line == f"Usage: {usage}"
    assert call(*command, "--help") == (0, out, "")


def test_help_names_the_extra_of_a_command(call: Any) -> None:
    for command, extra in ((["dashboard"], "dashboard"), (["bench", "engine"], "smollm2"), (["train"], "EXTRA")):
        assert f"'sortedrl[{extra}]'" in " ".join(call(*command, "-h")[1].split())


def test_the_shell_completes_names_of_configurations(tmp_path: Path) -> None:
    (tmp_path / "kk-mine.toml").write_text("")
    asked = {"_SORTEDRL_COMPLETE": "complete_bash", "COMP_WORDS": "sortedrl train kk", "COMP_CWORD": "2"}
    environment = {**os.environ, **asked}
    done = subprocess.run([SCRIPT], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["kk-llama3-8b", "kk-smollm2", "kk-mine.toml"]


EXTRAS = {
    "vllm": ["train", "quickstart", "engine=vllm"],
    "ray": ["compare", "quickstart", "engine.replicas=2"],
    "lora": ["sft", "quickstart", "lora.rank=4"],
    "wandb": ["train", "quickstart", "track.to=wandb"],
    "math": ["eval", "knights-tiny", "--suite", "gsm8k"],
    "dashboard": ["dashboard"],
    "smollm2": ["bench", "engine"],
    "gym": ["train", "add-smollm2", "model=knights-tiny", "task.reward=own:reward"],
}


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_extra_is_one_line(extra: str, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(extras, "has_extra", lambda asked: asked != extra)
    code, out, err = call(*EXTRAS[extra])
    assert (code, out) == (2, "")
    assert f"needs the extra {extra}: pip install 'sortedrl[{extra}]'" in err
    assert len(err.splitlines()) == 1


def test_a_missing_extra_is_found_before_torch_is_loaded(tmp_path: Path) -> None:
    code = """
import sys
from sortedrl import cli
from sortedrl.external import extras
extras.has_extra = lambda extra: False
sys.argv[1:] = ["train", "quickstart", "engine.replicas=2"]
try:
    cli.main()
finally:
    print([name for name in ("torch", "transformers", "ray") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "[]\n"), done.stderr


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_verbose", [False, True])
def test_other_packages_are_heard_only_when_asked(is_verbose: bool, tmp_path: Path) -> None:
    code = f"""
import logging, warnings
from rich.console import Console
from sortedrl.cli.messages import show_messages
show_messages(Console(stderr=True), is_verbose={is_verbose})
warnings.warn("theirs 1")
logging.getLogger("transformers").warning("theirs 2")
logging.getLogger("sortedrl.run").info("ours 1")
logging.getLogger("sortedrl.run").warning("ours 2 " + "long " * 50)
logging.getLogger("other").error("their error")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    shown = [name for name in ("theirs 1", "theirs 2", "ours 1", "ours 2", "their error") if name in done.stderr]
    assert shown == (
        ["theirs 1", "theirs 2", "ours 1", "ours 2", "their error"] if is_verbose else ["ours 2", "their error"]
    )
    if not is_verbose:
        first, second = done.stderr.splitlines()
        assert first[8:].startswith(" warning: ours 2 long long")
        assert second[8:] == " error: their error"


def test_the_debug_variable_shows_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **given: seen.append(given))
    monkeypatch.setenv("SORTEDRL_DEBUG", "1")
    from rich.console import Console

    show_messages(Console(), is_verbose=False)
    assert seen[0]["level"] == logging.INFO
    (handler,) = seen[0]["handlers"]
    assert isinstance(handler, LineHandler)
    assert len(handler.filters) == 1, "secrets are removed, and nothing is left out"


def test_dir_shows_the_public_names() -> None:
    assert dir(sortedrl) == ["SortedConfig", "SortedTrainer", "__version__"]
    assert all(hasattr(sortedrl, name) for name in dir(sortedrl))
