"""Stock vLLM gives the local engine's answers: its V2 model runner and its own sampler, with nothing of ours in it.

Triton's interpreter runs vLLM's kernels: see tests/support/vllm_v2/sitecustomize.py. Both engines draw with the same
noise. So in float32 answers are equal token for token, unless the two best scores are a tie within the margin of
vLLM's noise.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sortedrl.engine.base import Request, Sampling
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.sampling.noise import KERNEL_MARGIN, SCHEME, gumbel_scalar
from sortedrl.learner.model import load_model
from sortedrl.tasks.knights import draw
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.testing import Caller
from tests.support.interpreted_vllm import MARKS

pytestmark = MARKS
VECTORS = Path(__file__).parents[1] / "sampling" / "vllm_noise_vectors.json"
NUM_TOKENS = 32
NUM_ANSWERS = 64
BLOCK_TOKENS = 32
BLOCK_BYTES = BLOCK_TOKENS * 1536  # keys and values of all layers in float32
TIE = KERNEL_MARGIN + 4e-5  # float32 logits of the two engines differ, too: log-probs by up to 2e-5


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(knights_tiny_path())[0]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Eight seeds for each of eight puzzles, among them the smallest and the largest seed."""
    tokenizer, rng = load_model(knights_tiny_path())[1], random.Random(0)
    prompts = [tokenizer.encode(draw(rng, 2 + index % 4).prompt) for index in range(8)]
    seeds = [0, 1, 2**31, 2**32, 2**63 - 1, *(rng.randrange(2**63) for _ in range(NUM_ANSWERS - 5))]
    return [
        Request(
            sample=index,
            attempt=0,
            prompt=prompts[index % 8],
            budget=NUM_TOKENS,
            seed=seed,
            sampling=Sampling(),
        )
        for index, seed in enumerate(seeds)
    ]


def local_answers(model: Any, requests: Sequence[Request]) -> dict[int, list[int]]:
    answers = Caller(LocalEngine(model, slots=len(requests), max_length=128)).serve(requests)
    return {sample: answer.tokens for sample, answer in answers.items()}


@pytest.fixture(scope="module")
def expected(model: Any, requests: list[Request]) -> dict[int, list[int]]:
    answers = local_answers(model, requests)
    assert len({tuple(tokens) for tokens in answers.values()}) > NUM_ANSWERS / 2, "seeds must matter"
    return answers


@contextmanager
def start_vllm(**options: Any) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    settings = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": NUM_ANSWERS,
        "block_size": BLOCK_TOKENS,
        "kv_cache_memory_bytes": 512 * BLOCK_BYTES,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "disable_log_stats": False,
    }
    llm = LLM(str(knights_tiny_path()), **(settings | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def vllm() -> Iterator[Any]:
    with start_vllm() as llm:
        yield llm


def vllm_answers(llm: Any, requests: Sequence[Request]) -> dict[int, list[int]]:
    """Whole answers, cached tokens included."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [*request.prompt, *request.cached]} for request in requests]
    params = [
        SamplingParams(
            seed=request.seed,
            max_tokens=request.budget - len(request.cached),
            temperature=request.sampling.temperature,
            top_k=request.sampling.top_k,
            top_p=request.sampling.top_p,
            min_p=request.sampling.min_p,
            ignore_eos=True,
            detokenize=False,
        )
        for request in requests
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {
        request.sample: [*request.cached, *output.outputs[0].token_ids]
        for request, output in zip(requests, outputs, strict=True)
    }


@torch.no_grad()
def score_gap(model: Any, request: Request, answer: Sequence[int], other: Sequence[int], index: int) -> float:
    """By how much the token of `answer` at `index` scores higher than that of `other`; before it they are equal."""
    logits_v = model(torch.tensor([[*request.prompt, *answer[:index]]])).logits[0, -1].double()
    position = len(request.prompt) + index - 1
    ours, theirs = (
        float(logits_v[token]) / request.sampling.temperature + gumbel_scalar(request.seed, position, token)
        for token in (answer[index], other[index])
    )
    return ours - theirs


def check_same(
    model: Any, requests: Sequence[Request], ours: Mapping[int, list[int]], theirs: Mapping[int, list[int]]
) -> None:
    """Fails on a difference that is not a tie, with its score gap, and on more than one tie."""
    gaps: dict[str, float] = {}
    for request in requests:
        answer, other = ours[request.sample], theirs[request.sample]
        assert len(answer) == len(other) == request.budget
        if answer != other:
            index = next(index for index in range(request.budget) if answer[index] != other[index])
            where = f"sample {request.sample}, token {index}: {answer[index]} here, {other[index]} in vLLM"
            gaps[where] = score_gap(model, request, answer, other, index)
    assert all(abs(gap) <= TIE for gap in gaps.values()), f"score gaps beyond {TIE:.1e}: {gaps}"
    assert len(gaps) <= 1, f"too many ties within {TIE:.1e}: {gaps}"


def test_the_runner_is_v2_with_its_own_sampler(vllm: Any) -> None:
    runner = vllm.llm_engine.model_executor.driver_worker.worker.model_runner
    assert type(runner).__module__.startswith("vllm.v1.worker.")
    assert type(runner.sampler).__module__ == "vllm.v1.worker.gpu.sample.sampler"


def test_answers_in_a_batch(vllm: Any, model: Any, requests: list[Request], expected: dict[int, list[int]]) -> None:
    check_same(model, requests, expected, vllm_answers(vllm, requests))


def test_answers_alone(vllm: Any, model: Any, requests: list[Request], expected: dict[int, list[int]]) -> None:
    for request in requests[3:6]:
        check_same(model, [request], expected, vllm_answers(vllm, [request]))


def test_answers_continued_with_the_same_seed(
    vllm: Any, model: Any, requests: list[Request], expected: dict[int, list[int]]
) -> None:
    """A prompt with the first tokens of its answer, sent again: the position counts from the prompt's start."""
    for kept in (1, 8, 21, 31):
        again = [replace(request, cached=expected[request.sample][:kept]) for request in requests[8:12]]
        check_same(model, again, expected, vllm_answers(vllm, again))


SAMPLINGS = [
    Sampling(temperature=2.0),
    Sampling(temperature=0.6),
    Sampling(temperature=2.0, min_p=0.1),
    Sampling(temperature=2.0, top_k=2),
    Sampling(temperature=2.0, top_p=0.7),
    Sampling(temperature=2.0, top_k=4, min_p=0.05),
    Sampling(temperature=2.0, top_k=4, top_p=0.8),
]


def test_temperature_and_filters(vllm: Any, model: Any, requests: list[Request]) -> None:
    """vLLM's own kernels for temperature, min-p, top-k and top-p, in one batch.

    Without min-p and top-p together, where the order matters: vLLM applies min-p first and this project last. Besides,
    vLLM's kernel for top-p drops the least likely of the tokens that min-p left, even if all of them are needed.
    """
    shaped = [
        replace(request, sample=index, budget=16, sampling=sampling)
        for index, (sampling, request) in enumerate(product(SAMPLINGS, requests[4:6]))
    ]
    ours = local_answers(model, shaped)
    hot = local_answers(model, [replace(request, sampling=SAMPLINGS[0]) for request in shaped])
    unchanged = [request.sampling for request in shaped if ours[request.sample] == hot[request.sample]]
    assert unchanged == 2 * SAMPLINGS[:1], "all others must change answers"
    check_same(model, shaped, ours, vllm_answers(vllm, shaped))


def test_prefill_in_chunks(model: Any, requests: list[Request], expected: dict[int, list[int]]) -> None:
    budget = 12
    chunked = [request for request in requests if len(request.prompt) > budget][:8]
    assert len(chunked) == 8, "prompts must be longer than a step"
    with start_vllm(max_num_seqs=4, max_num_batched_tokens=budget) as llm:
        check_same(model, chunked, expected, vllm_answers(llm, chunked))


def test_preemptions(model: Any, requests: list[Request], expected: dict[int, list[int]]) -> None:
    """Memory for half of the running requests, so that vLLM drops some and computes them again."""
    some = requests[:12]
    with start_vllm(max_num_seqs=12, kv_cache_memory_bytes=14 * BLOCK_BYTES) as llm:
        answers = vllm_answers(llm, some)
        preemptions = sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    assert preemptions > 0
    check_same(model, some, expected, answers)


def test_tensor_parallel(model: Any, requests: list[Request], expected: dict[int, list[int]]) -> None:
    with start_vllm(tensor_parallel_size=2) as llm:
        check_same(model, requests, expected, vllm_answers(llm, requests))


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return json.loads(VECTORS.read_text(encoding="utf-8"))


def test_the_stored_vectors_are_what_this_vllm_computes(stored: dict[str, Any]) -> None:
    from tools.noise_vectors import kernel_noise

    rows = stored["vectors"]
    bits, uniforms, noise = kernel_noise(*([row[name] for row in rows] for name in ("seed", "position", "token")))
    assert stored["scheme"] == SCHEME
    assert bits.tolist() == [row["bits"] for row in rows]
    assert [float(uniform).hex() for uniform in uniforms] == [row["uniform"] for row in rows]
    # The last bits of a logarithm depend on the processor.
    assert noise.tolist() == pytest.approx([row["noise"] for row in rows], rel=3e-7, abs=3e-7)


def test_the_kernels_noise_is_within_the_margin(stored: dict[str, Any]) -> None:
    """At the edges: the largest and smallest noise, and where the kernel changes from a polynomial to a logarithm."""
    from tools.noise_vectors import exact_noise, noise_of_bits

    near = np.arange(1 << 12)
    bits = np.concatenate([near, (1 << 30) - 2048 + near, (1 << 32) - 1 - near, near << 20])
    uniforms, noise = noise_of_bits(bits)
    assert uniforms.min() == 2.0**-33
    assert uniforms.max() == 1
    apart = noise - exact_noise(uniforms)
    bounds = stored["kernel_minus_exact"]
    assert bounds["lowest"] - 1e-6 <= apart.min() < apart.max() <= bounds["highest"] + 1e-6  # last bits, as above
    assert bounds["highest"] - bounds["lowest"] <= KERNEL_MARGIN
