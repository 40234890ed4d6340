"""Extreme values, names and files are refused in one line, with exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sortedrl.config import SortedConfig
from sortedrl.config.shipped import shipped_path
from sortedrl.errors import ConfigError, EngineError
from sortedrl.run.builders.engine import build_engine
from sortedrl.run.builders.parts import build_task, load_model
from sortedrl.tasks.tiny import knights_tiny_path

QUICKSTART = shipped_path("quickstart")
NUM_DEEP = 50_000
DIGITS = "1" * 5000
LONG_NAME = "x" * 300


@pytest.fixture
def files(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "arrays.toml").write_text("[task]\noptions = { a = " + "[" * NUM_DEEP + "]" * NUM_DEEP + " }\n")
    (tmp_path / "tables.toml").write_text("a = " + "{ a = " * NUM_DEEP + "1" + " }" * NUM_DEEP + "\n")
    (tmp_path / "dotted.toml").write_text("[task]\ncolumns." + "a." * NUM_DEEP + "b = 1\n")
    (tmp_path / "digits.toml").write_text(f"[run]\nseed = {DIGITS}\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")


def override(text: str) -> list[str]:
    return ["train", str(QUICKSTART), text]


EXTREME: dict[str, tuple[list[str], list[str]]] = {
    "nested arrays": (["train", "arrays.toml"], ["arrays.toml is nested too deeply"]),
    "nested tables": (["train", "tables.toml"], ["tables.toml is nested too deeply"]),
    "dotted key in a file": (["train", "dotted.toml"], ["dotted.toml is nested too deeply"]),
    "dotted key in a value": (
        override("task={" + "a . " * NUM_DEEP + "b=1}"),
        ["override task", "is nested too deeply"],
    ),
    "nested override": (
        override("task.options=" + "[" * NUM_DEEP + "]" * NUM_DEEP),
        ["override task.options", "is nested too deeply"],
    ),
    "digits in a file": (["train", "digits.toml"], ["digits.toml", "more digits than"]),
    "digits in an override": (override(f"run.seed={DIGITS}"), ["override run.seed", "more digits than"]),
    "hexadecimal digits": (override("run.seed=0x" + "f" * 5000), ["run.seed", "less than or equal to"]),
    "seed": (
        override(f"run.seed={2**70}"),
        ["run.seed: input should be less than or equal to 18446744073709551615, not 1180591620717411303424"],
    ),
    "seed of sft": (["sft", str(QUICKSTART), "--seed", str(2**70)], ["run.seed", "less than or equal to"]),
    "seed of the tiny model": (["sft", "out", "--seed", str(2**70)], ["run.seed", "less than or equal to"]),
    "last seed of compare": (
        ["compare", str(QUICKSTART), f"run.seed={2**64 - 1}", "--seeds", "2"],
        ["run.seed", "less than or equal to"],
    ),
    "integer": (override(f"learner.micro_tokens={2**63}"), ["learner.micro_tokens", "less than or equal to"]),
    "bound": (override(f"schedule.lookahead={2**63}"), ["schedule.lookahead", "less than or equal to"]),
    "threads": (override("run.threads=1000000"), ["run.threads", "less than or equal to"]),
    "workers": (override("reward.workers=100000"), ["reward.workers", "less than or equal to"]),
    "memory of workers": (override(f"reward.memory_mb={2**62}"), ["reward.memory_mb", "less than or equal to"]),
    "seconds": (override("reward.timeout_s=1e300"), ["reward.timeout_s", "less than or equal to"]),
    "grace": (override("reward.grace_s=1e300"), ["reward.grace_s", "less than or equal to"]),
    "clip": (override("learner.clip_high=1e300"), ["learner.clip_high", "less than or equal to"]),
    "value clip": (override("learner.value_clip=1e300"), ["learner.value_clip", "less than or equal to"]),
    "cap": (override("learner.importance_cap=1e300"), ["learner.importance_cap", "less than or equal to"]),
    "people": (override('task.people={"2"=1e308,"3"=1e308}'), ["task.people", "less than or equal to"]),
    "NUL in the name": (override(r'run.name="a\u0000b"'), ["run.name", "without NUL characters"]),
    "NUL in the folder": (override(r'run.dir="a\u0000b"'), ["run.dir", "without NUL characters"]),
    "NUL in a path": (override(r'task.path="a\u0000b"'), ["task.path", "without NUL characters"]),
    "NUL in the model": (override(r'model.path="a\u0000b"'), ["model.path", "without NUL characters"]),
    "NUL in the reward": (override(r'task.reward="a\u0000b:f"'), ["task.reward", "without NUL characters"]),
    "long name": (override(f"run.name={LONG_NAME}"), ["cannot write the run directory", "name too long"]),
    "long folder": (override(f"run.dir={LONG_NAME}"), ["cannot write the run directory", "name too long"]),
    "long model": (override(f"model.path={LONG_NAME}"), [LONG_NAME, "name too long", "choose a shorter name"]),
    "long run to resume": (["train", "--resume", LONG_NAME], [LONG_NAME, "name too long", "choose a shorter name"]),
    "slots": (
        override("engine.slots=1000000000"),
        ["engine.slots 1000000000", "key-value cache", "GiB", "lower engine.slots"],
    ),
    "most slots": (override(f"engine.slots={2**63 - 1}"), ["engine.slots", "lower engine.slots"]),
    "relative reward": (override('task.reward=".mod:f"'), ["task.reward '.mod:f'", "relative"]),
    "reward that raises": (
        override('task.reward="raises:f"'),
        ["task.reward 'raises:f' cannot be loaded", "ZeroDivisionError: division by zero"],
    ),
    "deep key": (
        override("task.columns." + "a." * NUM_DEEP + "b=1"),
        ["cannot set task.columns.a.a.", "at most 3 parts"],
    ),
    "long override": (override("a" * NUM_DEEP), ["cannot read the override 'aaaa", "write section.name=value"]),
}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("case", EXTREME)
def test_extreme_input_is_refused_in_one_short_line(case: str, call: Any) -> None:
    arguments, parts = EXTREME[case]
    code, out, err = call(*arguments)
    assert (code, out) == (2, ""), err
    (line,) = err.strip().splitlines()
    assert line.startswith("error: ")
    assert len(line) < 1000
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")]
)
def test_memory_that_runs_out_is_told_in_one_line(error: Exception, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(SortedConfig, "load", fail)
    code, out, err = call("train", str(QUICKSTART))
    assert (code, out) == (2, "")
    assert err.startswith("error: memory ran out: ")
    assert err.count("\n") == 1


def test_the_largest_seed_works() -> None:
    task = build_task(SortedConfig(run={"seed": 2**64 - 1}))
    assert task.train.row(0)["prompt"]


@pytest.mark.parametrize("address", ["", "http://127.0.0.1:9"])
def test_vllm_without_its_packages_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sortedrl.engine.vllm.core.vllm_version", lambda: None)
    monkeypatch.setitem(sys.modules, "httpx", None)
    for name in ("engine", "http", "server"):
        monkeypatch.delitem(sys.modules, f"sortedrl.engine.vllm.{name}", raising=False)
    config = SortedConfig(engine={"kind": "vllm", "address": address}, schedule={"strategy": "sync"})
    model, _ = load_model(knights_tiny_path())
    missing = "httpx, which is not installed" if address else "the extra vllm"
    with pytest.raises(EngineError, match=rf"needs {missing}: .*engine\.kind = local$"):
        build_engine(config, model, config.knobs)


def test_mistakes_of_python_callers_are_named_too() -> None:
    with pytest.raises(ConfigError, match=r"^run\.seed: .*less than or equal to.*, not a value that is too large"):
        SortedConfig(run={"seed": 16**5000})
