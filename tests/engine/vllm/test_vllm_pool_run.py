"""Training on a pool of two vLLM engines in Ray actors: all weights by transfer, or adapters alone."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sortedrl.config.shipped import shipped_path
from sortedrl.engine.vllm.core import vllm_version

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed here: make test-vllm"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="a pool needs Ray: make test-vllm"),
    pytest.mark.timeout(1200),
]
SMALL = ["run.samples=48", "eval.prompts=16", "engine.max_new_tokens=64", "run.report=false", "eval.every_samples=0"]
POOL = ["engine=vllm", "schedule=sorted-replay", "engine.replicas=2", "engine.slots=8", "engine.replica_cpus=0.5"]


@pytest.mark.parametrize("changes", [[], ["lora.rank=4"], ["learner.ranks=2", "learner.rank_cpus=0.25"]], ids=str)
def test_a_run_on_a_pool_of_vllm_trains_every_sample_once(tmp_path: Path, changes: list[str]) -> None:
    command = [Path(sys.executable).with_name("sortedrl"), "train", shipped_path("quickstart"), *POOL, *SMALL, *changes]
    command += [f"run.dir={tmp_path}", "--json"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)["runs"][0]
    assert run["ledger"] == {"loaded": 48, "trained": 48, "lost": 0, "duplicated": 0}
    assert run["staleness_max"] == 0
    assert "gone" not in done.stderr  # no engine was replaced
