"""Benchmarks that need vLLM go on in the environment that has it, or say how to make one."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.engine.with_vllm import go_on_with_vllm

pytestmark = pytest.mark.skipif(find_spec("vllm") is not None, reason="this Python has vLLM")


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the Python with vLLM should be; the running command is a benchmark."""
    path = tmp_path / "python"
    monkeypatch.setenv("SORTEDRL_VLLM_PYTHON", str(path))
    monkeypatch.setattr(sys, "argv", ["publication.py", "--rounds", "2"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", find_spec("benchmarks.engine.publication"))
    return path


def test_the_command_goes_on_where_vllm_is(python: Path, capfd: pytest.CaptureFixture[str]) -> None:
    python.write_text('#!/usr/bin/env bash\necho "$@"\nexit 7\n')
    python.chmod(0o755)
    with pytest.raises(SystemExit) as ended:
        go_on_with_vllm()
    assert ended.value.code == 7
    assert capfd.readouterr().out == "-m benchmarks.engine.publication --rounds 2\n"


def test_without_vllm_anywhere_one_line_says_what_to_do(python: Path) -> None:
    with pytest.raises(SystemExit, match=r"this needs vLLM, which was not found .* run `make vllm`"):
        go_on_with_vllm()
