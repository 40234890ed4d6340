"""Every program in examples/ runs, with few samples; the one for GPUs says that it needs one."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.chdir(EXAMPLES)  # back to where it was, if an example changes it
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("quickstart.py", "engine steps"),
        ("own_reward.py", "over 64 samples"),
        ("own_dataset/train.py", "held-out reward"),
        ("own_tools.py", "lost: 0"),
        pytest.param(
            "lora.py",
            "adapters:",
            marks=pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed"),
        ),
    ],
)
def test_an_example_trains(
    name: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, name, "--samples", "64", "--out", str(tmp_path))
    assert output in capsys.readouterr().out
    assert len(list(tmp_path.glob("*/summary.json"))) == 1


def test_the_example_engine_passes_the_suite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "own_engine.py")
    out = capsys.readouterr().out
    assert not ended.value.code, out
    assert out.count("passed") > 15


def test_the_gpu_example_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="needs a GPU"):
        run(monkeypatch, "vllm_gpu.py", "model", "rows.parquet")


def test_every_example_is_listed() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    programs = [path for path in EXAMPLES.rglob("*.py") if path.name != "rewards.py"]
    assert [path.name for path in programs if f"`{path.relative_to(EXAMPLES).as_posix()}`" not in page] == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")
@pytest.mark.parametrize("arguments", [(), ("--async",)], ids=["grpo", "async"])
def test_the_trl_example_keeps_its_promises(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "trl_grpo.py", *arguments)
    assert ended.value.code == 0, capsys.readouterr().out
