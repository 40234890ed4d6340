"""vLLM as the engine inside TRL's trainers: in process, and behind the server that `trl vllm-serve` starts."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sortedrl.engine.vllm import server as vllm_server
from sortedrl.engine.vllm.core import vllm_version
from sortedrl.engine.vllm.process import ENVIRONMENT
from sortedrl.tasks.tiny import knights_tiny_path
from tests.conformance.process_cases import free_port

pytest.importorskip("trl", reason="TRL is an optional package: pip install 'sortedrl[trl]'")

from sortedrl.adapters.trl import sorted_rollouts
from sortedrl.adapters.trl.on_cpu import trl_on_cpu
from tests.adapters.test_trl import BATCH, STEPS, assert_proven, async_grpo, grpo, tokenizer, watch_logprobs

__all__ = ["tokenizer"]  # a fixture

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed here: make test-vllm"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(900),
]
VLLM = {"kind": "vllm", "dtype": "float32"}
LENGTH = 552  # max_prompt_tokens and the budget of test_trl


def test_grpo_trains_on_vllm_in_process(tmp_path: Path, tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    rollouts = sorted_rollouts("sorted-replay", lookahead=1, engine=VLLM)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = grpo(tmp_path, tokenizer, rollouts, peft_config=lora, learning_rate=1e-2)
    assert_trains_on_policy(tmp_path, trainer, rollouts)


def test_async_grpo_trains_on_vllm_in_process(tmp_path: Path) -> None:
    with trl_on_cpu():
        trainer, worker = async_grpo(tmp_path, "async-on-policy", engine=VLLM)
        trainer.train()
    assert worker.summary.staleness_max == 0
    assert_proven(tmp_path / "sortedrl", STEPS * BATCH)
    ratios = [entry["ratio"] for entry in trainer.state.log_history if "ratio" in entry]
    assert ratios == pytest.approx([1.0] * STEPS, abs=1e-4)


@pytest.fixture
def trl_server() -> Iterator[str]:
    """The address of a server with the options of `trl vllm-serve`, and those that our guide adds."""
    from trl.scripts.vllm_serve import ScriptArguments, build_command

    port = free_port()
    added = ["--worker-extension-cls", "sortedrl.engine.vllm.worker.SortedWorker"]
    added += ["--logits-processors", "sortedrl.engine.vllm.worker:NoiseRows"]
    added += ["--no-async-scheduling", "--max-num-seqs", str(BATCH), "--kv-cache-memory-bytes", str(1 << 26)]
    arguments = ScriptArguments(
        model=str(knights_tiny_path()),
        host="127.0.0.1",
        port=port,
        dtype="float32",
        max_model_len=LENGTH,
        enforce_eager=True,
    )
    command = build_command(arguments, added)
    # Two things of TRL's command need a GPU: the front of vLLM's command line, and NCCL.
    assert command[1:4] == ["-m", "vllm.entrypoints.cli.main", "serve"]
    command[1:5] = [*vllm_server._ENTRY[1:], "--model", command[4]]
    place = command.index("--weight-transfer-config")
    del command[place : place + 2]
    process = subprocess.Popen(command, env=ENVIRONMENT | os.environ | {"VLLM_SERVER_DEV_MODE": "1"})
    yield f"http://127.0.0.1:{port}"
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def test_grpo_trains_on_the_server_that_trl_starts(
    trl_server: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "_CONNECT_S", 600.0)
    rollouts = sorted_rollouts("sorted-replay", engine={**VLLM, "address": trl_server})
    assert_trains_on_policy(tmp_path, grpo(tmp_path, tokenizer, rollouts), rollouts)


def assert_trains_on_policy(folder: Path, trainer: Any, rollouts: Any) -> None:
    seen = watch_logprobs(trainer, rollouts)
    trainer.train()
    assert rollouts.summary.staleness_max == 0
    assert_proven(folder / "sortedrl", STEPS * BATCH)
    assert len(seen) == STEPS
    assert max(seen) < 1e-3  # vLLM's log-probs are those of the weights that TRL trains
