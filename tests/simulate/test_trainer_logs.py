"""Lengths from TRL's and verl's own logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sortedrl.errors import DataError
from sortedrl.simulate.traces import load_trace


def write_trl(folder: Path, step: int, prompts: list[Any], completions: list[Any]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({"step": [step] * len(prompts), "prompt": prompts, "completion": completions})
    parquet.write_table(table, folder / f"completions_{step:05d}.parquet")


def test_trls_completions_give_lengths_with_siblings(tmp_path: Path) -> None:
    write_trl(tmp_path / "completions", 10, ["b", "b"], ["x" * 9, ""])
    write_trl(tmp_path / "completions", 2, ["a", "a"], ["x" * 8, "x" * 40])
    trace = load_trace(tmp_path)
    assert (list(trace.lengths), list(trace.prompts)) == ([2, 10, 3, 1], [0, 0, 1, 1])
    assert "4 answers to 2 prompts from TRL's logs" in trace.note
    assert list(load_trace(tmp_path, group_size=2).lengths) == [2, 10, 3, 1]


def test_trls_chats_are_read(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "how"}]
    write_trl(tmp_path, 1, [prompt], [[{"role": "assistant", "content": "x" * 12}]])
    assert list(load_trace(tmp_path).lengths) == [3]


def test_verls_rollouts_are_read_in_the_order_of_steps(tmp_path: Path) -> None:
    for step, size in ((10, 8), (9, 4)):
        lines = [json.dumps({"input": f"q{step}", "output": "x" * size, "step": step})] * 2
        (tmp_path / f"{step}.jsonl").write_text("\n".join(lines) + "\n")
    trace = load_trace(tmp_path)
    assert list(trace.lengths) == [1, 1, 2, 2]
    assert "from verl's logs" in trace.note


def test_damaged_logs_are_named(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"input": "q"}\n')
    with pytest.raises(DataError, match=r"line 1 of .*1\.jsonl is no rollout of verl"):
        load_trace(tmp_path)
    with pytest.raises(DataError, match="cannot read the trace"):
        load_trace(tmp_path / "none" if (tmp_path / "none").mkdir() is None else "")
