"""Speed and memory of an update on answers of very different lengths: packed, as in the learner, and padded.

`sortedrl bench learner` and benchmarks/learner/learner.py call `measure`. Both contenders use the same model, batch,
loss, optimizer and number of micro-batches. Every round runs in a new process (`learner_round.py`), so its peak memory
is not mixed with others. The first process samples the answers and their log-probs. Guarantees: rounds are interleaved,
the median counts, and gradients are compared, so both contenders are known to compute the same update.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sortedrl.errors import LearnerError
from sortedrl.learner.smollm2 import model_note
from sortedrl.run.builders.parts import named_model_path
from sortedrl.simulate.traces import load_trace
from sortedrl.testing.bench.learner_round import SAMPLING, UpdateRound

OURS = "packed"
PEER = "padded"
RECOMPUTED = "packed, recomputed"  # recomputes activations instead of keeping them; measured in one round only
LIKE_QWEN = "lognormal(370, 0.55, 4507)"  # similar to the published answers of Qwen2.5-Math on MATH


@dataclass(slots=True, kw_only=True, frozen=True)
class LearnerBench:
    model: str = "smollm2-135m"
    trace: str = LIKE_QWEN
    samples: int = 64
    scale: float = 0.125  # factor on the trace's lengths, so that a batch padded to the longest fits in memory
    prompt_tokens: int = 16
    passes: int = 4  # micro-batches of an update
    rounds: int = 1
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    has_recomputed: bool = True
    seed: int = 0


def measure(bench: LearnerBench, on_round: Callable[[str, int], None] = lambda name, total: None) -> dict[str, Any]:
    """The result of `sortedrl bench learner --json`. `on_round` gets a contender's name and the number of rounds."""
    lengths = spread_lengths(bench)
    folder = named_model_path(bench.model)
    names = (OURS, PEER, *((RECOMPUTED,) if bench.has_recomputed else ()))
    rounds: dict[str, list[UpdateRound]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="sortedrl-bench-") as scratch:
        shared = {
            "folder": str(folder),
            "lengths": lengths,
            "prompt_tokens": bench.prompt_tokens,
            "passes": bench.passes,
            "threads": bench.threads,
            "seed": bench.seed,
            "answers": str(Path(scratch) / "answers.safetensors"),
        }
        run_process({**shared, "contender": SAMPLING})
        for number in range(bench.rounds):
            for name in names if number == 0 else names[:2]:
                on_round(name, 2 * bench.rounds + bench.has_recomputed)
                job = {
                    **shared,
                    "contender": PEER if name == PEER else OURS,
                    "recompute": name == RECOMPUTED,
                    "gradients": str(Path(scratch) / f"{name}.safetensors") if number == 0 else None,
                }
                rounds[name].append(UpdateRound(**json.loads(run_process(job).splitlines()[-1])))
        errors = {name: gradient_error(Path(scratch), name) for name in names if name != PEER}
    return summarize(bench, lengths, rounds, errors)


def spread_lengths(bench: LearnerBench) -> list[int]:
    """Lengths at even quantiles of the trace, including its tail; the same for every seed."""
    ordered = sorted(load_trace(bench.trace).lengths)
    places = [(2 * number + 1) * len(ordered) // (2 * bench.samples) for number in range(bench.samples)]
    return [max(1, round(ordered[place] * bench.scale)) for place in places]


def run_process(job: dict[str, Any]) -> str:
    """Run one job of `learner_round.py` in a new process; returns what it prints."""
    command = [sys.executable, "-m", "sortedrl.testing.bench.learner_round", json.dumps(job)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(job["threads"])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}: out of memory?"])[-1]
        raise LearnerError(f"the {job['contender']} process failed ({why}): lower --samples or --scale")
    return done.stdout


def gradient_error(folder: Path, name: str) -> float:
    """The largest difference between a gradient and the padded one, relative to the largest gradient norm."""
    ours, theirs = (load_file(folder / f"{one}.safetensors") for one in (name, PEER))
    scale = max(float(torch.linalg.vector_norm(value)) for value in theirs.values())
    return max(float(torch.linalg.vector_norm(ours[key] - value)) for key, value in theirs.items()) / scale


def summarize(
    bench: LearnerBench, lengths: list[int], rounds: dict[str, list[UpdateRound]], errors: dict[str, float]
) -> dict[str, Any]:
    tokens = sum(lengths)

    def median(name: str, value: Callable[[UpdateRound], float]) -> float:
        return statistics.median(value(found) for found in rounds[name])

    results: list[dict[str, Any]] = [
        {
            "name": name,
            "tokens_per_s": median(name, lambda found: tokens / found.wall_s),
            "tokens_per_cpu_s": median(name, lambda found: tokens / found.cpu_s),
            "peak_gb": median(name, lambda found: found.peak_bytes / 1e9),
            "peak_above_start_gb": median(name, lambda found: (found.peak_bytes - found.start_bytes) / 1e9),
            "gradient_error": errors.get(name),
            "rounds": [asdict(found) for found in rounds[name]],
        }
        for name in rounds
    ]
    ours, peer = results[0], results[1]
    return {
        "results": results,
        "ratio": {PEER: ours["tokens_per_s"] / peer["tokens_per_s"]},
        "ratio_cpu": {PEER: ours["tokens_per_cpu_s"] / peer["tokens_per_cpu_s"]},
        "memory": {PEER: ours["peak_gb"] / peer["peak_gb"]},
        "memory_above_start": {PEER: ours["peak_above_start_gb"] / peer["peak_above_start_gb"]},
        "gradient_error": errors[OURS],
        "model": bench.model,
        "model_note": model_note(bench.model) or None,
        "trace": Path(bench.trace).name,
        "samples": bench.samples,
        "tokens": tokens,
        "longest": max(lengths),
        "prompt_tokens": bench.prompt_tokens,
        "passes": bench.passes,
        "threads": bench.threads,
        "seed": bench.seed,
    }
