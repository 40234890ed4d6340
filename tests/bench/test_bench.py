"""`sortedrl bench engine`: what it prints, what it leaves out, and that it checks the work it times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sortedrl.cli import app
from sortedrl.engine.local import decoder_choice
from sortedrl.errors import ConfigError, EngineError
from sortedrl.testing.bench import contenders
from sortedrl.testing.bench.contenders import GenerateContender, find_vllm_python, timed
from sortedrl.testing.bench.engine import EngineBench, measure, prepare_job
from tests.support.tiny_models import needs_compiler

SMALL = [
    "--model",
    "knights-tiny",
    "--slots",
    "3",
    "--new-tokens",
    "5",
    "--rounds",
    "2",
    "--threads",
    "1",
    "--dtype",
    "float32",
]


def test_the_command_prints_one_object() -> None:
    run = CliRunner().invoke(
        app, ["bench", "engine", *SMALL, "--against", "hf,vllm", "--vllm-python", sys.executable, "--json"]
    )
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout)
    rows = {row["name"]: row for row in result["results"]}
    assert list(rows) == ["sortedrl", "hf", "limit", "vllm"]
    assert rows["vllm"]["tokens_per_s"] is None
    assert "vllm" in rows["vllm"]["skipped"].lower()
    assert result["ratio"].keys() == result["ratio_cpu"].keys() == {"hf"}
    assert result["ratio"]["hf"] == rows["sortedrl"]["tokens_per_s"] / rows["hf"]["tokens_per_s"]
    assert result["limit_fraction"] == rows["sortedrl"]["tokens_per_s"] / rows["limit"]["tokens_per_s"]
    assert len(rows["hf"]["rounds"]) == 2
    assert 0 < rows["sortedrl"]["logprob_gap"] < 1e-4
    assert rows["hf"]["logprob_gap"] is None
    assert result["ratio_same_dtype"] == result["ratio"]
    assert result["processor"][0] == torch.backends.cpu.get_cpu_capability()
    assert (result["slots"], result["new_tokens"], result["threads"], result["dtype"]) == (3, 5, 1, "float32")


@needs_compiler
def test_in_fixed_point_ours_is_measured_in_the_peers_precision_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_choice, "has_fast_bfloat16", lambda device: False)
    run = CliRunner().invoke(app, ["bench", "engine", *SMALL, "--dtype", "int16", "--against", "hf", "--json"])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout)
    rows = {row["name"]: row for row in result["results"]}
    assert {name: row["dtype"] for name, row in rows.items()} == {
        "sortedrl": "int16",
        "sortedrl-float32": "float32",
        "hf": "float32",
        "limit": "float32",
    }
    assert result["ratio"].keys() == {"sortedrl-float32", "hf"}
    same = rows["sortedrl-float32"]["tokens_per_s"] / rows["hf"]["tokens_per_s"]
    assert result["ratio_same_dtype"] == {"hf": same}
    assert 0 < rows["sortedrl-float32"]["logprob_gap"] < 1e-4
    assert 0 < rows["sortedrl"]["logprob_gap"] < 1e-2


@needs_compiler
def test_in_fixed_point_peers_take_the_precision_that_is_fast_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_fast, expected in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(decoder_choice, "has_fast_bfloat16", lambda device, is_fast=is_fast: is_fast)
        job = prepare_job(EngineBench(model="knights-tiny", slots=2, dtype="int16"))
        assert (job.dtype, job.peer_dtype) == (torch.int16, expected)


def test_the_environment_of_make_vllm_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A named Python comes first, then that of a complete .venv-vllm in the current folder or in the checkout."""
    monkeypatch.delenv("SORTEDRL_VLLM_PYTHON", raising=False)
    here, checkout = tmp_path / "here", tmp_path / "checkout"
    for folder in (here, checkout):
        (folder / ".venv-vllm").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr(contenders, "_CHECKOUT", checkout)
    assert find_vllm_python(None) is None, "an environment that is not complete"
    (checkout / ".venv-vllm" / ".ready").touch()
    assert find_vllm_python(None) == str(checkout / ".venv-vllm/bin/python")
    (here / ".venv-vllm" / ".ready").touch()
    assert find_vllm_python(None) == str(here / ".venv-vllm/bin/python")
    monkeypatch.setenv("SORTEDRL_VLLM_PYTHON", "/environment/python")
    assert find_vllm_python(None) == "/environment/python"
    assert find_vllm_python("/given/python") == "/given/python"


def test_the_default_checkout_is_this_one() -> None:
    assert (contenders._CHECKOUT / "Makefile").is_file()


def test_a_table_for_people() -> None:
    run = CliRunner().invoke(app, ["bench", "engine", *SMALL, "--against", "vllm", "--vllm-python", "/no/python"])
    assert run.exit_code == 0, run.output
    assert "matrix products alone" in " ".join(run.stdout.split())
    assert "SORTEDRL_VLLM_PYTHON" in run.stdout


def test_unknown_peers_are_refused() -> None:
    with pytest.raises(ConfigError, match="the peers are hf, hf-continuous, vllm"):
        measure(EngineBench(model="knights-tiny", against=("tgi",)))


def test_work_that_was_not_done_is_no_speed() -> None:
    with pytest.raises(EngineError, match="2 log-probs for 3 tokens"):
        timed(lambda: [[-1.0], [-2.0]], 3)
    with pytest.raises(EngineError):
        timed(lambda: [[-1.0], [float("nan")]], 2)


def test_generate_does_not_end_early() -> None:
    job = prepare_job(EngineBench(model="knights-tiny", slots=2, new_tokens=90, threads=1))
    assert GenerateContender(job).run(0, 90).tokens == 180  # an answer is about 30 tokens long


def test_log_probs_of_generate_are_those_of_its_tokens() -> None:
    job = prepare_job(EngineBench(model="knights-tiny", slots=2, new_tokens=4, threads=1))
    contender = GenerateContender(job)
    taken: list[torch.Tensor] = []
    generate = job.model.generate

    def noting(*arguments, **options):
        taken.append(generate(*arguments, **options))
        return taken[-1]

    contender._model.generate = noting
    try:
        logprobs = contender._sample(0, 4)
    finally:
        del contender._model.generate
    for row, prompt in enumerate(job.prompts):
        answer = taken[0][row, -4:].tolist()
        with torch.no_grad():
            logits = job.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer).unsqueeze(1)).flatten().tolist()
        assert logprobs[row] == pytest.approx(expected, abs=1e-4)
