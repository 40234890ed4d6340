"""The conformance suite on a pool of two vLLM engines, each in a Ray actor. `make test-vllm` runs it."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from cases import SLOTS, keep_promise, letters, local_ray, model_case
from test_conformance_vllm import HEADS

from sortedrl.engine.base import Engine
from sortedrl.engine.pool import Pool
from sortedrl.engine.vllm_core import vllm_version
from sortedrl.testing import CHECKS, Check, EngineCase
from tiny_models import tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed here: make test-vllm"),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="a pool needs Ray: make test-vllm"),
    pytest.mark.timeout(1800),
]
MAX_LENGTH = 384
ANSWER_TOKENS = 240  # answers are read and interrupted from afar: short ones would be over before


def make_engine() -> tuple[Engine, Any]:
    from sortedrl.engine.vllm import VllmEngine

    model = tiny_model(**HEADS)
    return VllmEngine(model, slots=SLOTS, max_length=MAX_LENGTH, decode=letters), model


@pytest.fixture(scope="module")
def case() -> Iterator[EngineCase]:
    with local_ray():
        from sortedrl.engine.ray_members import RayMembers

        members = RayMembers(make_engine, num_cpus=0.5, num_gpus=0, threads=1)
        pool = Pool(members, size=2, slots=SLOTS, exact_replay=True, keep_kv=True, health_s=300, start_s=900)

        def kill() -> None:
            for member in pool.stats().extra["members"]:
                if member:
                    os.kill(member["pid"], signal.SIGKILL)

        yield model_case(pool, tiny_model(**HEADS), kill=kill, answer_tokens=ANSWER_TOKENS)
        pool.close()


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_pool_of_vllm(check: Check, case: EngineCase) -> None:
    keep_promise(check, case)
