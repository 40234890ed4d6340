"""Verification of cached tokens in stock vLLM's V2 model runner, under Triton's interpreter.

The prompts are read in chunks that cut through the cached answers, some requests are preempted, and planted wrong
tokens must be found: each of them, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from sortedrl.engine.attempt import Attempt
from sortedrl.engine.base import Request, Sampling, Span
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.vllm.request import ReplayTurn, VllmRequest
from sortedrl.engine.vllm.verify_rows import CachedRows, VerifiedRows, verify_rows, verify_rows_with_torch
from sortedrl.learner.model import load_model
from sortedrl.records import Mode
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.testing import Answer, Caller
from tests.engine.vllm.test_stock_v2 import BLOCK_BYTES, start_vllm
from tests.support.interpreted_vllm import MARKS

pytestmark = MARKS
EXTENSION = "sortedrl.engine.vllm.worker.SortedWorker"
NUM_TOKENS = 40
VOCAB = 40  # prompts and planted tokens are below it
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=2.0, top_k=4),
    Sampling(temperature=2.0, min_p=0.1),
    Sampling(temperature=0.0),
    Sampling(temperature=1.5, top_p=0.8),
]


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(knights_tiny_path())[0]


@pytest.fixture(scope="module")
def answers(model: Any) -> list[tuple[Request, Answer]]:
    """Six prompts, one for each way to sample, and the local engine's answers."""
    requests = [
        Request(
            sample=index,
            attempt=0,
            prompt=[5 + (3 * index + place) % 35 for place in range(9 + 11 * index)],
            budget=NUM_TOKENS,
            seed=(1 << 62) + index,
            sampling=sampling,
        )
        for index, sampling in enumerate(SAMPLINGS)
    ]
    served = Caller(LocalEngine(model, slots=len(requests), max_length=128)).serve(requests)
    return [(request, served[request.sample]) for request in requests]


def verify(llm: Any, requests: Sequence[tuple[Request, list[int]]], **changes: Any) -> list[ReplayTurn]:
    """Send each request with the cached answer given, as the engine does."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    attempts = [
        Attempt.begin(
            replace(request, mode=Mode.REPLAY, cached=tuple(cached), spans=(Span(0, len(cached)),), **changes), None
        )
        for request, cached in requests
    ]
    params = [
        VllmRequest.begin(attempt).sampling_params(SamplingParams, RequestOutputKind.FINAL_ONLY, is_stock=True)
        for attempt in attempts
    ]
    prompts = [{"prompt_token_ids": VllmRequest.begin(attempt).tokens()} for attempt in attempts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [
        ReplayTurn.read(cached, output.prompt_logprobs[len(request.prompt) :], [False] * len(cached))
        for (request, cached), output in zip(requests, outputs, strict=True)
    ]


def check_replays(llm: Any, answers: list[tuple[Request, Answer]]) -> None:
    whole = verify(llm, [(request, answer.tokens) for request, answer in answers])
    for turn, (_, answer) in zip(whole, answers, strict=True):
        assert turn.accepted == NUM_TOKENS, "a token was rejected that the same weights have drawn"
        assert turn.logprobs == pytest.approx(answer.logprobs, abs=1e-3)
    wrong, places = [], []
    for index, (request, answer) in enumerate(answers):
        place = (7 * index + 3) % NUM_TOKENS
        other = (answer.tokens[place] + 1) % VOCAB
        wrong.append((request, [*answer.tokens[:place], other, *answer.tokens[place + 1 :]]))
        places.append(place)
    for turn, place, (_, answer) in zip(verify(llm, wrong), places, answers, strict=True):
        assert turn.accepted == place
        assert turn.drawn is not None
        assert turn.drawn[0] == answer.tokens[place]
        assert turn.drawn[1] == pytest.approx(answer.logprobs[place], abs=1e-3)
    for turn in verify(llm, wrong, replay_tolerance=1e9)[:2]:  # of rows without filters
        assert turn.accepted == NUM_TOKENS


@pytest.fixture(scope="module")
def chunked() -> Iterator[Any]:
    """A step reads 32 tokens, so that prompts of 49 to 104 tokens take several; memory for four of them."""
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "kv_cache_memory_bytes": 17 * BLOCK_BYTES}
    with start_vllm(worker_extension_cls=EXTENSION, logprobs_mode="processed_logprobs", **options) as llm:
        (report,) = llm.collective_rpc("sorted_prepare", args=("",))
        assert report["is_v2"]
        yield llm


def test_the_sampler_stays_vllms_own(chunked: Any) -> None:
    runner = chunked.llm_engine.model_executor.driver_worker.worker.model_runner
    assert type(runner.sampler).__module__ == "vllm.v1.worker.gpu.sample.sampler"
    assert type(runner.prompt_logprobs_worker).__module__ == "sortedrl.engine.vllm.verify_hook"


def test_replays_in_chunks(chunked: Any, answers: list[tuple[Request, Answer]]) -> None:
    check_replays(chunked, answers)


def test_the_number_of_chunks_depends_on_the_schedule_alone(
    chunked: Any, answers: list[tuple[Request, Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of tensor parallelism must compute logits equally often, whatever is rejected."""
    from sortedrl.engine.vllm import verify_hook

    monkeypatch.setattr(verify_hook, "CHUNK_SIZE", 16)
    sizes: list[int] = []

    def count(given: CachedRows) -> VerifiedRows:
        sizes.append(len(given.cached_r))
        return verify_rows(given)

    monkeypatch.setattr(verify_hook, "verify_rows", count)
    chunks: list[list[int]] = []
    for change in (0, 1):
        sizes.clear()
        verify(chunked, [(r, [(token + change) % VOCAB for token in a.tokens]) for r, a in answers[:2]])
        chunks.append(list(sizes))
    assert chunks[0] == chunks[1]
    assert sum(chunks[0]) == 2 * NUM_TOKENS
    assert max(chunks[0]) <= 16


def test_torch_verifies_like_the_kernel(
    chunked: Any, answers: list[tuple[Request, Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sortedrl.engine.vllm import verify_hook

    monkeypatch.setattr(verify_hook, "verify_rows", verify_rows_with_torch)
    (turn,) = verify(chunked, [(answers[1][0], answers[1][1].tokens)])
    assert turn.accepted == NUM_TOKENS
    assert torch.tensor(turn.logprobs).isfinite().all()


def test_tensor_parallel(answers: list[tuple[Request, Answer]]) -> None:
    """The last test: vLLM's clean-up at its end takes the process groups from `chunked` too."""
    with start_vllm(
        worker_extension_cls=EXTENSION, logprobs_mode="processed_logprobs", max_num_seqs=6, tensor_parallel_size=2
    ) as llm:
        reports = llm.collective_rpc("sorted_prepare", args=("",))
        assert [report["tensor_parallel"] for report in reports] == [2, 2]
        check_replays(llm, answers)
