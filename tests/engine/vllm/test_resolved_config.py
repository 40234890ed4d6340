"""What vLLM makes of this project's settings on NVIDIA GPUs, by vLLM's own code, on a machine without any."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.interpreted_vllm import MARKS
from tests.support.tiny_models import tiny_model

pytestmark = MARKS
PROGRAM = Path(__file__).parents[2] / "support" / "fake_cuda.py"
# vLLM inspects a model's class in one more process, which fails where there is no CUDA at all, and keeps what it found.
# So the class is inspected once without the fake platform: the cache of a fresh machine is empty.
INSPECT = """
from vllm.model_executor.models.registry import ModelRegistry
ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()
"""
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}


@pytest.fixture(scope="module")
def resolve(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(**SHAPE).to(torch.bfloat16).save_pretrained(folder)
    inspected = subprocess.run([sys.executable, "-c", INSPECT], capture_output=True, text=True, check=False)
    assert inspected.returncode == 0, inspected.stderr[-3000:]

    @cache
    def run(capability: str = "9.0", values: str = '{"dtype": "bfloat16"}', wishes: str = "{}") -> dict[str, Any]:
        command = [sys.executable, str(PROGRAM), str(folder), capability, values, wishes]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_a_gpu_gets_graphs_asynchronous_scheduling_and_v2(resolve: Any) -> None:
    found = resolve()
    assert found["device"] == "cuda"
    assert found["worker"] == "vllm.v1.worker.gpu_worker.Worker"
    assert found["is_v2"]
    assert found["is_async"]
    assert not found["is_eager"]
    assert found["graph_mode"] in ("FULL", "FULL_AND_PIECEWISE")
    assert found["logits_processors"] in (None, [])  # nothing of ours takes part in decoding
    assert not found["is_speculative"]
    assert (found["dtype"], found["slots"], found["batch_invariant"]) == ("bfloat16", 64, "0")


def test_replay_gets_batch_invariance_and_a_backend_that_has_it(resolve: Any) -> None:
    from sortedrl.engine.vllm.runner_choice import find_backend_fault

    found = resolve(wishes='{"needs_exact_replay": true}')
    assert found["batch_invariant"] == "1"
    assert find_backend_fault([found["attention"]]) is None
    assert found["is_v2"]
    assert found["graph_mode"] != "NONE"


def test_wishes_are_granted(resolve: Any) -> None:
    found = resolve(wishes='{"eager": true, "async_scheduling": false}')
    assert found["is_eager"]
    assert found["graph_mode"] == "NONE"
    assert not found["is_async"]
    assert found["is_v2"]


def test_an_older_device_gets_no_batch_invariance(resolve: Any) -> None:
    found = resolve("7.5", '{"dtype": "float16"}', '{"needs_exact_replay": true}')
    assert found["batch_invariant"] == "0"


def test_tensor_parallelism_is_as_asked(resolve: Any) -> None:
    found = resolve(values='{"dtype": "bfloat16", "tensor_parallel": 4, "kv_bytes": null, "memory_share": 0.8}')
    assert found["tensor_parallel"] == 4
    assert found["executor"] == "mp"
    assert found["memory_share"] == 0.8
    assert found["is_v2"]
    assert found["is_async"]


@pytest.mark.parametrize(("is_spread", "bundles"), [(False, [4]), (True, [1, 1, 1, 1])])
def test_an_engine_of_a_pool_starts_its_workers_where_its_gpus_are(
    resolve: Any, is_spread: bool, bundles: list[int]
) -> None:
    """In an actor with one bundle of four GPUs, vLLM's own choice would be an executor that refuses such a bundle."""
    values = {"dtype": "bfloat16", "tensor_parallel": 4, "is_spread": is_spread, "bundles": bundles}
    assert resolve(values=json.dumps(values))["executor"] == ("ray" if is_spread else "mp")
