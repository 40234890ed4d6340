"""`eval` and `sft CONFIG` by the shipped entry point: what they print and how they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import only_json

SMALL = ["--suite", "knights", "--limit", "4", "--max-tokens", "40", "--slots", "4"]


def test_eval_prints_one_json_object_or_a_table(call: Any, tmp_path: Path) -> None:
    code, out, err = call("eval", "knights-tiny", *SMALL, "--samples", "2", "--out", "answers.jsonl", "--json")
    assert code == 0, err
    found = only_json(out)
    assert found["suites"]["knights"]["num_problems"] == 4
    assert found["temperature"] == 0.6
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 8
    code, out, err = call("eval", "knights-tiny", *SMALL)
    assert code == 0, err
    assert "mean@1" in out
    assert "knights" in out
    assert "tokens in" in err


def test_eval_with_defaults_takes_as_many_tokens_as_the_model_has_positions_for(call: Any) -> None:
    from sortedrl.learner.model import read_window
    from sortedrl.tasks.tiny import knights_tiny_path

    code, out, err = call("eval", "knights-tiny", "--suite", "knights", "--limit", "2", "--json")
    assert code == 0, err
    window = read_window(knights_tiny_path())
    assert window is not None
    assert 900 < only_json(out)["max_tokens"] < window == 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["knights-tiny", "--suite", "gms8k"], "did you mean gsm8k"),
        (["nowhere", "--suite", "knights"], "is not a folder"),
        (["knights-tiny", "--suite", "gsm8k", "--data", "."], "has no suite gsm8k: put gsm8k there"),
        (["knights-tiny", "--suite", "knights", "--max-tokens", "5000"], "lower --max-tokens"),
        (["knights-tiny", *SMALL, "--engine", "warp"], "engine.kind"),
        (["knights-tiny", *SMALL, "--out", "no/where.jsonl"], "cannot write no/where.jsonl"),
    ],
)
def test_eval_refuses_in_one_line(call: Any, arguments: list[str], message: str) -> None:
    code, out, err = call("eval", *arguments, "--json")
    assert (code, out) == (2, "")
    assert message in err


def test_sft_as_a_configuration_says(call: Any, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nname = 'small'\n[sft]\nexamples = 8\nbatch_tokens = 512\n")
    code, out, err = call("sft", "run.toml", "sft.lr=1e-4", "--steps", "1", "--json")
    assert code == 0, err
    record = only_json(out)
    assert (record["path"], record["steps"]) == ("runs/small/sft", 1)
    code, out, err = call("eval", "runs/small/sft", *SMALL, "--json")
    assert code == 0, err
    code, _, err = call("sft", "folder", "sft.lr=1e-4")
    assert code == 2
    assert "go with a CONFIG" in err
