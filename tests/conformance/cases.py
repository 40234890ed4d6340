"""The engines that this project ships, as cases of the conformance suite."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from sortedrl.clock import VirtualClock
from sortedrl.engine.base import EngineEvent, Request
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.sim.engine import SimEngine
from sortedrl.testing import Check, EngineCase
from tests.support.scripted_runs import ScriptedPolicy
from tests.support.tiny_models import VOCAB, add_noise, source, teacher_forced, tiny_model

SLOTS = 4
MAX_LENGTH = 256
# The second is longer than a block of vLLM's KV cache, so that its prefix is found there again.
PROMPTS = [[3, 1, 4], [(7 * i) % VOCAB for i in range(70)], [2, 7, 1, 8, 2, 8], [5] * 11]


def keep_promise(check: Check, case: EngineCase) -> None:
    """Run a check on an engine that others share; whatever comes of it, nothing is left running."""
    if why := check.why_not(case):
        pytest.skip(f"not promised by this engine: {why}")
    try:
        check.run(case)
    finally:
        case.engine.interrupt()
    assert case.engine.stats().running == 0


@contextmanager
def local_ray() -> Iterator[None]:
    """A Ray of our own, whose actors find the modules of the tests."""
    from sortedrl.engine.pool.ray_cluster import connect, disconnect

    with pytest.MonkeyPatch.context() as patch:
        root = Path(__file__).parents[2]
        paths = [str(root), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        connect()
    try:
        yield
    finally:
        disconnect()


def weights_of(model: Any) -> Callable[[int], Any]:
    """The model after so many publications, each a fixed step from the one before."""

    @cache
    def step(number: int) -> Any:
        if number == 0:
            return copy.deepcopy(model)
        moved = copy.deepcopy(step(number - 1))
        add_noise(moved, 0.02, seed=number)
        return moved

    return step


def letters(tokens: list[int]) -> str:
    """Text of tokens, a letter each, in which stop strings are looked for."""
    return "".join(chr(ord("a") + token) for token in tokens)


def model_case(engine: Any, model: Any, **changes: Any) -> EngineCase:
    """A case of an engine that was made of `model`."""
    step = weights_of(model)

    def logprobs(number: int, request: Request, tokens: Sequence[int]) -> list[float]:
        return teacher_forced(step(number), request, tokens)

    return EngineCase(
        **{
            "engine": engine,
            "prompts": PROMPTS,
            "source": lambda number: source(step(number)),
            "logprobs": logprobs,
            "decode": letters,
            "spoil": lambda request: replace(request, prompt=[0, VOCAB]),
        }
        | changes
    )


def local_case(path: str, dtype: torch.dtype | None = None, **changes: Any) -> EngineCase:
    model = tiny_model()
    engine = LocalEngine(
        copy.deepcopy(model),
        slots=SLOTS,
        max_length=MAX_LENGTH,
        path=path,  # type: ignore[arg-type]
        dtype=dtype,
        decode=letters,
    )
    return model_case(engine, model, advance=lambda: engine.poll(0), **changes)


def sim_case() -> EngineCase:
    policy, clock = ScriptedPolicy(longest=10**9, divergence=0.05), VirtualClock()
    spoiled: set[int] = set()
    engine = SimEngine(policy, slots=SLOTS, clock=clock, fails=lambda request: 3 if request.sample in spoiled else None)

    def advance() -> list[EngineEvent]:
        clock.set_timer(clock.now() + 1)
        return engine.poll()

    def spoil(request: Request) -> Request:
        spoiled.add(request.sample)
        return request

    def logprobs(version: int, request: Request, tokens: Sequence[int]) -> list[float]:
        return [policy.logprob(request.seed, position, version) for position in range(len(tokens))]

    return EngineCase(
        engine=engine,
        prompts=PROMPTS,
        source=lambda number: None,
        logprobs=logprobs,
        spoil=spoil,
        has_stop_tokens=False,
        advance=advance,
        clock=clock,
    )
