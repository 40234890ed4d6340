"""The rehearsal without GPUs and the acceptance on GPUs: what they run, how they judge, what they report."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sortedrl.config import SortedConfig
from sortedrl.config.placement import Cluster, Demand, plan_placement
from sortedrl.config.shipped import shipped_path
from sortedrl.engine.replay_probe import ReplayEvidence
from sortedrl.run.builders.engine import pool_transfer
from tests.engine.vllm.test_vllm_promises import ON_CPU, ON_GPU
from tools import gpu_acceptance, gpu_checks, rehearsal
from tools.command_steps import Fate, Step, run_steps

ROOT = Path(__file__).parents[2]


def python(name: str, code: str, **settings: Any) -> Step:
    return Step(name=name, command=[sys.executable, "-c", code], **settings)


def test_every_step_gets_a_result(tmp_path: Path) -> None:
    steps = [
        python("good", "print('noise'); print('{\"speed\": 3}'); print('{not json')"),
        python("bad", "import sys; sys.exit(3)"),
        python("environment", "import os, sys; sys.exit(os.environ['ASKED'] != 'yes')", environment={"ASKED": "yes"}),
        Step(name="absent", command=["/no/such/program"]),
        python("skipped", "", missing="it needs two GPUs"),
    ]
    results = run_steps(steps, root=tmp_path, out=tmp_path / "out", limit_s=60.0, at_once=2)
    fates = {result.step.name: result.fate for result in results}
    assert fates == {
        "good": Fate.PASSED,
        "bad": Fate.FAILED,
        "environment": Fate.PASSED,
        "absent": Fate.FAILED,
        "skipped": Fate.NOT_RUN,
    }
    assert results[0].figures == {"speed": 3}
    assert results[1].why == "exit code 3"
    assert (tmp_path / "out" / "good.log").read_text(encoding="utf-8").startswith("noise")


def test_the_time_of_all_steps_is_limited(tmp_path: Path) -> None:
    steps = [python("hangs", "import time; time.sleep(600)"), python("late", "")]
    hangs, late = run_steps(steps, root=tmp_path, out=tmp_path, limit_s=0.3)
    assert (hangs.fate, late.fate) == (Fate.FAILED, Fate.NOT_RUN)
    assert "time was up" in hangs.why
    assert "time was up" in late.why


def test_a_rehearsal_names_tests_that_exist_and_what_they_cannot_show() -> None:
    names = [part.name for part in rehearsal.PARTS]
    assert len(set(names)) == len(names)
    for part in rehearsal.PARTS:
        assert part.stands_for
        assert part.cannot_show
        assert all((ROOT / test).is_file() for test in part.tests), part.name
        assert part.tests or part.command
        command = rehearsal.make_step(part).command
        assert (command[0] == str(rehearsal.V2_PYTHON)) == part.needs_vllm


def test_the_table_of_a_rehearsal_tells_why_a_part_failed(tmp_path: Path) -> None:
    part = rehearsal.PARTS[0]
    step = replace(rehearsal.make_step(part), command=[sys.executable, "-c", "import sys; sys.exit(1)"])
    results = run_steps([step], root=tmp_path, out=tmp_path, limit_s=60.0)
    table = rehearsal.make_table(results, {part.name: part})
    assert list(table.columns[3].cells) == ["FAILED: exit code 1"]
    assert list(table.columns[2].cells) == [part.cannot_show]


def test_acceptance_on_one_gpu_leaves_out_what_needs_two() -> None:
    alone = {step.name: step for step in gpu_acceptance.make_steps(1, is_quick=False)}
    both = {step.name: step for step in gpu_acceptance.make_steps(2, is_quick=True)}
    assert {name for name, step in alone.items() if step.missing} == {"nccl", "tensor-parallel", "separate"}
    assert not any(step.missing for step in both.values())
    assert {"device", "graphs", "probe", "speed", "lora", "sleep", "conformance", "replay-bfloat16"} <= set(alone)
    assert "run.samples=256" in both["quickstart"].command


def test_the_runs_of_acceptance_are_valid_configurations() -> None:
    for step in gpu_acceptance.make_steps(2, is_quick=True):
        if "train" in step.command:
            changes = [word for word in step.command[3:] if "=" in word]
            config = SortedConfig.load(shipped_path("quickstart"), changes)
            assert config.engine.kind == "vllm"
            placement = plan_placement(Demand.of(config.in_older_keys()), Cluster(gpus=(2,)))
            if step.name == "separate":  # one engine and one rank with a GPU each
                assert (len(placement.engines), len(placement.ranks)) == (1, 1)
                assert pool_transfer(config, None) == "nccl"


def test_a_step_that_hangs_leaves_time_for_the_others(tmp_path: Path) -> None:
    steps = [python("hangs", "import time; time.sleep(600)"), python("next", "")]
    hangs, after = run_steps(steps, root=tmp_path, out=tmp_path, limit_s=60.0, step_limit_s=0.2)
    assert hangs.fate is Fate.FAILED
    assert after.step.name == "next"
    assert after.seconds > 0


def hang_on_rank(rank: int, figures: Any) -> None:
    if rank == 0:
        figures.put({"sum": 3.0})
    time.sleep(600)


def test_ranks_that_hang_are_ended() -> None:
    with pytest.raises(gpu_checks.BrokenPromise, match="did not meet within 0 s"):
        gpu_checks.run_ranks(hang_on_rank, 0.0)
    assert not multiprocessing.active_children()


def test_a_model_for_two_gpus_can_be_divided() -> None:
    with torch.device("meta"):
        config = gpu_checks.make_even_model().config
    assert (config.num_attention_heads % 2, config.num_key_value_heads % 2) == (0, 0)


def test_the_report_has_figures_and_failures(tmp_path: Path) -> None:
    run = {"tokens_per_s": 900.0, "publish_s": 3.0, "updates": 12, "samples": 256, "replay_law": "exact"}
    steps = [
        python("run", f"print({json.dumps(json.dumps({'runs': [run]}))})"),
        python("check", 'import sys; print(\'{"broken": "a worker computes on cpu"}\'); sys.exit(1)'),
        python("pool", "", missing="it needs two GPUs, and there is 1"),
    ]
    report = gpu_acceptance.make_report("1 x Fake", run_steps(steps, root=tmp_path, out=tmp_path, limit_s=60.0))
    assert "1 x Fake" in report
    assert '"s_per_publication": 0.25' in report
    assert "samples" not in report
    assert "| check | FAILED: exit code 1 |" in report
    assert "a worker computes on cpu" in report
    assert "| pool | not run: it needs two GPUs, and there is 1 |" in report
    assert "3 steps, 1 failed, 1 not run." in report


def test_without_a_gpu_acceptance_does_not_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(gpu_acceptance, "find_machine", lambda: (0, "no GPU found"))
    monkeypatch.setattr(sys, "argv", ["gpu_acceptance"])
    assert gpu_acceptance.main() == 2
    assert "make rehearsal" in capsys.readouterr().err


GIB = 1 << 30
EXACT, DIFFERENT = (ReplayEvidence(num_tokens=4096, num_differences=count) for count in (0, 2))
FEWER = ReplayEvidence(num_tokens=1536, num_differences=0)


@pytest.mark.parametrize(
    ("judge", "broken"),
    [
        (lambda: gpu_checks.judge_device([ON_GPU], GIB), None),
        (lambda: gpu_checks.judge_device([ON_GPU, ON_GPU], 2 * GIB), None),  # half of the weights each
        (lambda: gpu_checks.judge_device([ON_GPU], 2 * GIB), "less than its share"),
        (lambda: gpu_checks.judge_device([ON_CPU], 1), "computes on cpu"),
        (lambda: gpu_checks.judge_graphs([ON_GPU]), None),
        (lambda: gpu_checks.judge_graphs([replace(ON_GPU, graph_mode="NONE")]), "no CUDA graphs"),
        (lambda: gpu_checks.judge_graphs([replace(ON_GPU, is_async=False)]), "not asynchronous"),
        (lambda: gpu_checks.judge_graphs([replace(ON_GPU, is_v2=False)]), "V1"),
        (lambda: gpu_checks.judge_graphs([replace(ON_GPU, is_speculative=True)]), "speculates"),
        (lambda: gpu_checks.judge_probe([ON_GPU], EXACT), None),
        (lambda: gpu_checks.judge_probe([ON_GPU], DIFFERENT), "2 of 4096 tokens differed"),
        (lambda: gpu_checks.judge_probe([ON_GPU], FEWER), "1536 tokens were verified, and not 4096"),
        (lambda: gpu_checks.judge_probe([replace(ON_GPU, is_batch_invariant=False)], EXACT), "batch"),
        (lambda: gpu_checks.judge_speed(900.0, 1000.0), None),
        (lambda: gpu_checks.judge_speed(700.0, 1000.0), "stock vLLM has 1,000"),
        (lambda: gpu_checks.judge_same([[1, 2]], [[1, 2]], "x"), None),
        (lambda: gpu_checks.judge_same([[1, 2], [3]], [[1, 2], [4]], "between them"), "1 of 2 answers differ"),
    ],
)
def test_judgements(judge: Callable[[], dict[str, Any]], broken: str | None) -> None:
    if broken is None:
        json.dumps(judge())
        return
    with pytest.raises(gpu_checks.BrokenPromise, match=broken):
        judge()
