"""One update of one contender of `bench learner` in its own process: its time, peak memory and gradients.

`learner.py` runs this module with a job as JSON; the module prints an `UpdateRound` as JSON. The first job is
`SAMPLING`: the model writes the answers that all other jobs read. The padded contender is written as other trainers
write it, without code of the learner: it pads all answers to the longest and computes a softmax over all logits.

Shapes: b rows of a pass, l positions, v vocabulary.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sortedrl.config import SortedConfig
from sortedrl.engine.base import Delta, Request, Sampling
from sortedrl.learner.model import load_model
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Batch, FinishReason, Prompt, Sample, Segment
from sortedrl.run.builders.parts import build_engine

SAMPLING = "sampling"
LR = 1e-6
CLIP = (0.2, 0.28)


@dataclass(slots=True, kw_only=True, frozen=True)
class UpdateRound:
    wall_s: float
    cpu_s: float
    peak_bytes: int
    start_bytes: int  # after loading the model, before the update


def write_answers(model: Any, job: dict[str, Any]) -> None:
    """Write answers of the given lengths, in random order, to prompts of random tokens, and their log-probs."""
    generator = torch.Generator().manual_seed(job["seed"])
    lengths = [job["lengths"][place] for place in torch.randperm(len(job["lengths"]), generator=generator).tolist()]
    size = model.config.vocab_size, (len(lengths), job["prompt_tokens"])
    prompts = torch.randint(0, *size, generator=generator).tolist()
    config = SortedConfig(
        task={"max_prompt_tokens": job["prompt_tokens"]},
        engine={"slots": len(lengths), "max_new_tokens": max(lengths), "dtype": "float32"},
        schedule={"strategy": "sorted-partial"},
    )
    longest = max(lengths) + job["prompt_tokens"] + 64
    model.config.max_position_embeddings = max(model.config.max_position_embeddings, longest)  # answers may be nonsense
    engine = build_engine(config, model, config.knobs)
    engine.submit(
        Request(sample=number, attempt=0, prompt=prompt, budget=length, seed=number, sampling=Sampling())
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    )
    written: list[tuple[list[int], list[float]]] = [([], []) for _ in lengths]
    while sum(len(tokens) for tokens, _ in written) < sum(lengths):
        for event in engine.poll():
            if isinstance(event, Delta):
                tokens, logprobs = written[event.sample]
                tokens += event.tokens
                logprobs += event.logprobs
    engine.close()
    answers = {}
    for number, (prompt, (tokens, logprobs)) in enumerate(zip(prompts, written, strict=True)):
        answers[f"{number}.prompt"], answers[f"{number}.tokens"] = torch.tensor(prompt), torch.tensor(tokens)
        answers[f"{number}.logprobs"] = torch.tensor(logprobs)
    save_file(answers, job["answers"])


def read_samples(job: dict[str, Any]) -> list[Sample]:
    """The answers as samples with different rewards."""
    answers = {name: value.tolist() for name, value in load_file(job["answers"]).items()}
    return [
        Sample(
            id=number,
            prompt=Prompt(id=str(number), tokens=tuple(answers[f"{number}.prompt"]), content=""),
            index=0,
            epoch=0,
            cohort=0,
            seed=number,
            budget=max(job["lengths"]),
            segments=[Segment(version=0, tokens=answers[f"{number}.tokens"], logprobs=answers[f"{number}.logprobs"])],
            finish_reason=FinishReason.STOP,
            reward=float(number % 3),
        )
        for number in range(len(job["lengths"]))
    ]


def packed_update(model: Any, samples: Sequence[Sample], job: dict[str, Any]) -> Callable[[], object]:
    num_tokens = sum(len(sample.prompt.tokens) + sample.num_tokens for sample in samples)
    longest = max(len(sample.prompt.tokens) + sample.num_tokens for sample in samples)
    config = SortedConfig(
        learner={
            "algorithm": "reinforce++",
            "group_size": 1,
            "lr": LR,
            "lr_final": 1.0,
            "clip_low": CLIP[0],
            "clip_high": CLIP[1],
            "grad_clip": 1e9,
            "micro_tokens": max(num_tokens // job["passes"] + 1, longest),
            "recompute": job["recompute"],
            "dtype": "float32",
        }
    )
    learner = TorchLearner(model, config.learner, temperature=1.0)
    batch = Batch(update=0, version=0, samples=tuple(samples))
    return lambda: learner.start(batch).result()


def padded_update(model: Any, samples: Sequence[Sample], job: dict[str, Any]) -> Callable[[], object]:
    num_prompt = job["prompt_tokens"]
    num_answer = max(sample.num_tokens for sample in samples)
    tokens_bl = torch.zeros(len(samples), num_prompt + num_answer, dtype=torch.long)
    mask_bl = torch.zeros_like(tokens_bl)
    behaviour_bl = torch.zeros(len(samples), num_answer)
    for row, sample in enumerate(samples):
        end = num_prompt + sample.num_tokens
        tokens_bl[row, :end] = torch.tensor([*sample.prompt.tokens, *sample.tokens])
        mask_bl[row, :end] = 1
        behaviour_bl[row, : sample.num_tokens] = torch.tensor(sample.logprobs)
    rewards_b = torch.tensor([sample.reward for sample in samples])
    advantages_b = (rewards_b - rewards_b.mean()) / rewards_b.std(correction=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    num_tokens = sum(sample.num_tokens for sample in samples)

    def update() -> None:
        for rows in torch.arange(len(samples)).chunk(job["passes"]):
            output = model(
                tokens_bl[rows], attention_mask=mask_bl[rows], use_cache=False, logits_to_keep=num_answer + 1
            )
            logprobs_blv = output.logits[:, :-1].log_softmax(-1)
            logprobs_bl = logprobs_blv.gather(-1, tokens_bl[rows, num_prompt:, None])[..., 0]
            ratio_bl = (logprobs_bl - behaviour_bl[rows]).exp()
            advantages_b1 = advantages_b[rows, None]
            clipped_bl = ratio_bl.clamp(1 - CLIP[0], 1 + CLIP[1])
            loss_bl = -torch.minimum(ratio_bl * advantages_b1, clipped_bl * advantages_b1)
            ((loss_bl * mask_bl[rows, num_prompt:]).sum() / num_tokens).backward()
        optimizer.step()

    return update


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    model, _ = load_model(job["folder"])
    if job["contender"] == SAMPLING:
        write_answers(model, job)
        return
    samples = read_samples(job)
    update = (packed_update if job["contender"] == "packed" else padded_update)(model, samples, job)
    gradients: dict[str, torch.Tensor] = {}

    def catch(*_: object) -> None:
        """Keep references, because copies would count as memory of the update."""
        gradients.update({name: value.grad for name, value in model.named_parameters() if value.grad is not None})

    handle = register_optimizer_step_pre_hook(catch)
    for parameter in model.parameters():
        parameter.detach().sum()  # read the weights, so that memory-mapped ones are counted before the update
    start_bytes = memory("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    update()
    found = UpdateRound(
        wall_s=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
        peak_bytes=memory("VmHWM"),
        start_bytes=start_bytes,
    )
    handle.remove()
    if job["gradients"] is not None:
        save_file(gradients, job["gradients"])
    sys.stdout.write(json.dumps(asdict(found)) + "\n")


def memory(field: str) -> int:
    """A memory field of /proc/self/status, in bytes; without /proc, the peak memory for every field."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


if __name__ == "__main__":
    main()
