"""The learner when memory runs out, in a process with a limited address space, so that allocations really fail."""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from sortedrl.learner import logprobs
from sortedrl.learner.memory import is_out_of_memory
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Batch, FinishReason, Prompt, Sample, Segment
from tests.support.forked_process import ForkedProcess
from tests.support.learners import Settings

M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
VOCABULARY = 4096  # logits of n answer tokens take several times n x 16 KiB: they are what does not fit

Shape = tuple[int, int]  # tokens of a prompt and of its answer


def make_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    return LlamaForCausalLM(config).eval()


def make_batch(shapes: list[Shape]) -> Batch:
    """Answers that repeat one token; prompt, token and old log-prob differ between answers."""
    samples = [
        Sample(
            id=index,
            prompt=Prompt(id=str(index), tokens=(index + 1,) * prompt, content=""),
            index=0,
            epoch=0,
            cohort=0,
            seed=index,
            budget=length,
            segments=[Segment(version=0, tokens=[index + 100] * length, logprobs=[-8.0 - 0.1 * index] * length)],
            finish_reason=FinishReason.STOP,
            reward=float(index % 3),
        )
        for index, (prompt, length) in enumerate(shapes)
    ]
    return Batch(update=0, version=0, samples=tuple(samples), progress=0.0)


def limit_address_space(extra_mib: int) -> None:
    import resource

    with open("/proc/self/statm") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    limit = in_use + (extra_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def train(shapes: list[list[Shape]], *, micro_tokens: int, extra_mib: int = 0, **settings: Any) -> dict[str, Any]:
    """Run updates on batches of these shapes; returns their metrics and the resulting weights."""
    batches = [make_batch(batch) for batch in shapes]
    learner = TorchLearner(make_model(), Settings(micro_tokens=micro_tokens, **settings), temperature=1.0)
    if extra_mib:
        TorchLearner(make_model(), Settings(), temperature=1.0).start(
            make_batch([(2, 2)] * 2)
        ).result()  # allocate what is lazy
        # With a fixed threshold, freed large blocks go back to the system, so earlier allocations do not matter.
        assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1_000_000)
        limit_address_space(extra_mib)
    results = [learner.start(batch).result() for batch in batches]
    return {
        "weights": torch.cat([parameter.detach().flatten() for parameter in learner.model.parameters()]).tolist(),
        "steps": [result.optimizer_steps for result in results],
        "computed": [result.metrics["computed_tokens"] for result in results],
        "loss": [result.metrics["loss"] for result in results],
    }


HALVES = {
    # The sample with the long prompt is the longest and goes first, but needs little: only answers have logits.
    "shapes": [[(8, 100)] * 5 + [(2000, 20)] + [(8, 500)] * 4, [(8, 500)] * 8],
    "inner_steps": 2,
    "lr": 1e-3,
}
CASES: dict[str, dict[str, Any]] = {
    "halves": {**HALVES, "micro_tokens": 2100, "extra_mib": 125},
    "alone": {"shapes": [[(8, 4000), (8, 500)]], "micro_tokens": 100_000, "extra_mib": 200},
}


@dataclass(kw_only=True, frozen=True)
class Done:
    exit_code: int
    stderr: str
    result: Path


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """The result of each case, which runs in its own process."""
    return {name: run_case(name, tmp_path_factory.mktemp(name)) for name in CASES}


def run_case(name: str, folder: Path) -> Done:
    with ForkedProcess(folder, train_with_little_memory, name) as process:
        exit_code = process.wait()
    return Done(exit_code=exit_code, stderr=process.err, result=folder / "result.json")


def train_with_little_memory(name: str) -> None:
    logging.basicConfig(format="%(message)s")
    logprobs.WHOLE_ELEMENTS = 1 << 40  # logits in pieces would fit
    Path("result.json").write_text(json.dumps(train(**CASES[name])))


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and needs a kernel that keeps RLIMIT_AS")


@linux_only
def test_what_does_not_fit_is_done_in_halves(done: dict[str, Done]) -> None:
    """Memory runs out in the second step of an update, after the first of its two micro-batches.

    The first step must not be repeated, and the first micro-batch's gradients must not be counted twice.
    """
    halves = done["halves"]
    assert halves.exit_code == 0, halves.stderr
    # Four prompts of 8 tokens and answers of 500, of which the last token predicts nothing: 4 x 507 = 2028.
    assert halves.stderr.count("out of memory") == 1
    assert "out of memory in a micro-batch of 4 samples, 2028 tokens" in halves.stderr
    assert "can't allocate memory" in halves.stderr
    assert "learner.micro_tokens = 1014," in halves.stderr
    ours = json.loads(halves.result.read_text())
    theirs = train(micro_tokens=1014, **HALVES)
    assert ours["steps"] == theirs["steps"] == [2, 2]
    # Tokens of the failed attempt are not counted: 5 x 107 + 2019 + 4 x 507 tokens, then 8 x 507.
    assert ours["computed"] == theirs["computed"] == [4582, 4056]
    assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
    before = torch.cat([parameter.detach().flatten() for parameter in make_model().parameters()])
    assert float((torch.tensor(theirs["weights"]) - before).abs().max()) > 1e-3
    assert float((torch.tensor(ours["weights"]) - torch.tensor(theirs["weights"])).abs().max()) <= 1e-6


@linux_only
def test_a_sample_that_does_not_fit_alone_stops_the_run(done: dict[str, Done]) -> None:
    alone = done["alone"]
    assert alone.exit_code == 1
    assert "in a micro-batch of 2 samples, 4514 tokens" in alone.stderr
    message = alone.stderr.strip().splitlines()[-1]
    assert message.startswith(
        "sortedrl.errors.LearnerError: an update does not fit in memory even one sample at a time (4007 tokens: "
    )
    assert message.endswith("lower engine.max_new_tokens, or use a smaller model or a larger machine")
    assert not alone.result.exists()


def test_errors_of_memory_are_told_from_others() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(failed.value)
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA ran short"))
    assert is_out_of_memory(RuntimeError("could not create a primitive"))  # oneDNN, short of memory
    with pytest.raises(RuntimeError) as failed:
        torch.ones(2) @ torch.ones(3)
    assert not is_out_of_memory(failed.value)
    assert is_out_of_memory(RuntimeError("can't start new thread"))
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError("out of memory"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
