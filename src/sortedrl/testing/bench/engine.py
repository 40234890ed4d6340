"""The speed of the local engine and of its peers on the same prompts, in tokens per second.

`sortedrl bench engine` and benchmarks/engine/engine.py call `measure`. Every contender samples `new_tokens` tokens for
each of `slots` prompts, at temperature 1, with a seed, with the log-prob of every token, and without stop tokens. All
have the same model and number of threads. Peers compute in the same precision. If the local engine computes in fixed
point, which no peer has, the peers compute in the faster of float32 and bfloat16 on this processor, and the local
engine is measured in that precision as well.

Guarantees: rounds are interleaved, so other load on the machine affects all contenders; the median counts. The limit is
the speed of the matrix products alone in the peers' precision, measured in the same rounds.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sortedrl.config import SortedConfig
from sortedrl.engine.local.decoder_choice import choose_dtype, fast_dtype
from sortedrl.engine.local.linear import has_fast_bfloat16, has_matrix_unit
from sortedrl.errors import ConfigError, SortedRLError
from sortedrl.learner.smollm2 import model_note
from sortedrl.native.kernel import has_wide_kernel
from sortedrl.run.builders.parts import build_task, model_path, prompt_stream
from sortedrl.run.checkpoint_folder import load_model
from sortedrl.run.gc_tuning import rare_collections
from sortedrl.testing.bench.contenders import (
    Contender,
    ContinuousContender,
    GenerateContender,
    LocalContender,
    RoundTiming,
    SamplingJob,
    VllmContender,
    find_vllm_python,
)
from sortedrl.testing.bench.matmul_limit import MatmulLimit

OURS = "sortedrl"
PEERS = ("hf", "hf-continuous", "vllm")


@dataclass(slots=True, kw_only=True, frozen=True)
class EngineBench:
    model: str = "smollm2-135m"
    slots: int = 64
    new_tokens: int = 128
    against: Sequence[str] = ("hf",)
    rounds: int = 3
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    dtype: str = "auto"
    seed: int = 0
    vllm_python: str | None = None  # Python of an environment with vLLM


def measure(bench: EngineBench, on_round: Callable[[str, int], None] = lambda name, total: None) -> dict[str, Any]:
    """The result of `sortedrl bench engine --json`. `on_round` gets a contender's name and the number of rounds."""
    unknown = sorted(set(bench.against) - set(PEERS))
    if unknown:
        raise ConfigError(f"--against {', '.join(unknown)} is unknown: the peers are {', '.join(PEERS)}")
    torch.set_num_threads(bench.threads)
    job = prepare_job(bench)
    limit = MatmulLimit(job)
    contenders, skipped = _start_contenders(bench, job)
    timings: dict[str, list[RoundTiming]] = {name: [] for name in (*contenders, "limit")}
    try:
        for contender in contenders.values():
            contender.run(bench.seed, min(4, bench.new_tokens))  # warm-up
        for number in range(bench.rounds):
            timings["limit"].append(limit.run())
            for name, contender in contenders.items():
                on_round(name, bench.rounds * len(contenders))
                with rare_collections():  # as in training, and as in vLLM's own process
                    timings[name].append(contender.run(bench.seed + number, bench.new_tokens))
        gaps = {
            name: contender.gap() for name, contender in contenders.items() if isinstance(contender, LocalContender)
        }
    finally:
        for contender in contenders.values():
            contender.close()
    return _summarize(bench, job, timings, gaps, skipped)


def prepare_job(bench: EngineBench) -> SamplingJob:
    config = SortedConfig(
        model={"path": bench.model},
        run={"seed": bench.seed},
        task={"max_prompt_tokens": 512, "people": {"2": 1}},  # short prompts, because decoding is measured
    )
    folder = model_path(config)
    model, tokenizer = load_model(folder)
    stream = prompt_stream(config, build_task(config), tokenizer)
    prompts = [list(prompt.tokens) for _, prompt in stream.take(bench.slots)]
    dtype = choose_dtype(model, bench.dtype, needs_exact_replay=False)
    return SamplingJob(
        folder=folder,
        model=model,
        prompts=prompts,
        new_tokens=bench.new_tokens,
        dtype=dtype,
        peer_dtype=fast_dtype(is_compiled=False) if dtype == torch.int16 else dtype,
        threads=bench.threads,
    )


def _start_contenders(bench: EngineBench, job: SamplingJob) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders that can run on this machine, and for each other one the reason."""
    same = _same_dtype_name(job)
    makers: dict[str, Callable[[], Contender]] = {
        OURS: lambda: LocalContender(job, job.dtype),
        same: lambda: LocalContender(job, job.peer_dtype),
        "hf": lambda: GenerateContender(job),
        "hf-continuous": lambda: ContinuousContender(job),
        "vllm": lambda: VllmContender(job, find_vllm_python(bench.vllm_python)),
    }
    started: dict[str, Contender] = {}
    skipped: dict[str, str] = {}
    for name in (OURS, *((same,) if job.peer_dtype != job.dtype else ()), *bench.against):
        try:
            started[name] = makers[name]()
        except SortedRLError as error:
            if name in (OURS, same):
                raise
            skipped[name] = str(error)
    return started, skipped


def processor_features() -> list[str]:
    """What of this processor decides the speed of matrix products: its vectors, and its 16-bit instructions."""
    cpu = torch.device("cpu")
    has = {"VNNI": has_wide_kernel(), "bfloat16": has_fast_bfloat16(cpu), "AMX": has_matrix_unit(cpu)}
    return [torch.backends.cpu.get_cpu_capability(), *(name for name, is_there in has.items() if is_there)]


def _same_dtype_name(job: SamplingJob) -> str:
    """The local engine in the peers' precision, which is measured if it computes in fixed point otherwise."""
    return f"{OURS}-{_dtype_name(job.peer_dtype)}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _summarize(
    bench: EngineBench,
    job: SamplingJob,
    timings: dict[str, list[RoundTiming]],
    gaps: dict[str, float],
    skipped: dict[str, str],
) -> dict[str, Any]:
    speeds = {name: statistics.median(t.tokens / t.wall_s for t in rounds) for name, rounds in timings.items()}
    per_cpu = {name: statistics.median(t.tokens / t.cpu_s for t in rounds) for name, rounds in timings.items()}
    results: list[dict[str, Any]] = [
        {
            "name": name,
            "dtype": _dtype_name(job.dtype if name == OURS else job.peer_dtype),
            "tokens_per_s": speeds[name],
            "tokens_per_cpu_s": per_cpu[name],
            "rounds": [t.tokens / t.wall_s for t in timings[name]],
            "logprob_gap": gaps.get(name),
        }
        for name in timings
    ]
    results += [{"name": name, "tokens_per_s": None, "skipped": reason} for name, reason in skipped.items()]
    peers = [name for name in timings if name not in (OURS, "limit")]
    same_dtype = _same_dtype_name(job)
    same = same_dtype if same_dtype in timings else OURS
    return {
        "results": results,
        "ratio": {name: speeds[OURS] / speeds[name] for name in peers},
        "ratio_same_dtype": {name: speeds[same] / speeds[name] for name in peers if name != same_dtype},
        "ratio_cpu": {name: per_cpu[OURS] / per_cpu[name] for name in peers},
        "limit_fraction": speeds[OURS] / speeds["limit"],
        "limit_fraction_cpu": per_cpu[OURS] / per_cpu["limit"],
        "model": bench.model,
        "model_note": model_note(bench.model) or None,
        "slots": bench.slots,
        "new_tokens": bench.new_tokens,
        "prompt_tokens": sum(map(len, job.prompts)),
        "dtype": _dtype_name(job.dtype),
        "threads": bench.threads,
        "processor": processor_features(),
        "seed": bench.seed,
    }
