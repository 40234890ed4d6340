"""One update of one contender of `bench learner`, in a process of its own: its time, its peak memory, its gradients.

Run as a module with a job as JSON; it prints a `Round` as JSON. A job that is for `SCORING` comes first: it writes the
answers' log-probs, which all others read. The padded contender is written as trainers write it, without anything of the
learner's: all answers padded to the longest, logits of all of them, a softmax over those.

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
from sortedrl.learner.head import Scorer
from sortedrl.learner.model import load_model
from sortedrl.learner.pack import pack, packed_attention
from sortedrl.learner.terms import by_place, marks
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Batch, FinishReason, Prompt, Sample, Segment

SCORING = "scoring"
LR = 1e-6
CLIP = (0.2, 0.28)


@dataclass(slots=True, kw_only=True, frozen=True)
class Round:
    wall_s: float
    cpu_s: float
    peak_bytes: int
    start_bytes: int  # model loaded, before the update


def make_samples(vocabulary: int, job: dict[str, Any]) -> list[Sample]:
    """Answers of random tokens in random order, with varied rewards, and log-probs that are still missing."""
    generator = torch.Generator().manual_seed(job["seed"])
    lengths = job["lengths"]
    samples: list[Sample] = []
    for number, place in enumerate(torch.randperm(len(lengths), generator=generator).tolist()):
        prompt, answer = (
            torch.randint(0, vocabulary, (size,), generator=generator).tolist()
            for size in (job["prompt_tokens"], lengths[place])
        )
        samples.append(
            Sample(
                id=number,
                prompt=Prompt(id=str(number), tokens=tuple(prompt), content=""),
                index=0,
                epoch=0,
                cohort=0,
                seed=number,
                budget=max(lengths),
                segments=[Segment(version=0, tokens=answer, logprobs=[0.0] * len(answer))],
                finish_reason=FinishReason.STOP,
                reward=float(number % 3),
            )
        )
    return samples


@torch.no_grad()
def score(model: Any, samples: Sequence[Sample], job: dict[str, Any]) -> None:
    """Write the log-probs that the model gives the answers."""
    scorer, everyone = Scorer(1.0), marks(len(samples), range(len(samples)))
    found: dict[str, torch.Tensor] = {}
    with packed_attention(model):
        for micro in pack(samples, everyone, max(job["lengths"]) + job["prompt_tokens"]):
            scored = by_place(micro, scorer.score(model, micro).logprobs_a)
            found.update({str(place): logprobs.clone() for place, logprobs in scored.items()})
    save_file(found, job["logprobs"])


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
    samples = make_samples(model.config.vocab_size, job)
    if job["contender"] == SCORING:
        score(model, samples, job)
        return
    for place, logprobs in load_file(job["logprobs"]).items():
        samples[int(place)].segments[0].logprobs = logprobs.tolist()
    update = (packed_update if job["contender"] == "packed" else padded_update)(model, samples, job)
    gradients: dict[str, torch.Tensor] = {}

    def catch(*_: object) -> None:
        """References alone: a copy would count as memory of the update."""
        gradients.update({name: value.grad for name, value in model.named_parameters() if value.grad is not None})

    handle = register_optimizer_step_pre_hook(catch)
    for parameter in model.parameters():
        parameter.detach().sum()  # weights that are mapped from a file take memory once they are read
    start_bytes = memory("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    update()
    found = Round(
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
    """Memory of this process as Linux counts it; elsewhere the peak that the system reports stands for both."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


if __name__ == "__main__":
    main()
