"""Supervised fine-tuning: gives a model the basic skill before reinforcement learning starts (cold start).

`tasks/tiny.py` calls it to build the embedded checkpoint, and `run/sft_run.py` to fine-tune any causal model, from a
stream of (prompt, answer) token lists. Muon trains the matrices and AdamW the rest, or AdamW trains all. Batches hold
answers of similar length. They are padded, or packed as in reinforcement learning; packing suits large vocabularies,
because logits are then computed only where an answer token is predicted.

Guarantees: the loss covers answer tokens only; the batches depend only on the arguments, and so do the weights on one
machine with one thread.

Shapes: n batch row, l position, g matrix of a group of one shape, r its shorter side, c its longer side, v vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sortedrl.errors import DataError, RunDirError
from sortedrl.learner.logprobs import LogprobScorer
from sortedrl.learner.pack import pack, packed_attention
from sortedrl.records import Prompt, Sample, Segment

Example = tuple[Sequence[int], Sequence[int]]
"""Tokens of a prompt and of its answer, with the end token."""

OnStep = Callable[[int, float], None]
"""Called after each step with the number of steps so far and the loss."""

_IGNORED = -100  # the label of a position without loss
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Muon's quintic: moves singular values to about 1 in five rounds
_NEWTON_SCHULZ_ROUNDS = 5


@dataclass(slots=True, kw_only=True, frozen=True)
class SftResult:
    steps: int
    num_tokens: int  # answer tokens trained on
    loss: float  # mean over the last tenth of the steps


@dataclass(slots=True, kw_only=True, frozen=True)
class SftRates:
    """Peak rates, and the schedule of both optimizers: linear warm-up, then linear decay.

    If `muon` is None, AdamW trains the matrices too.
    """

    muon: float | None = 8e-3
    adamw: float = 3e-3
    warmup_steps: int = 20
    final_share: float = 0.05

    def scale(self, step: int, steps: int) -> float:
        warmup = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return warmup * (1.0 - (1.0 - self.final_share) * step / steps)


def cold_start(
    out_dir: Path | str,
    *,
    model: Any,
    tokenizer: Any,
    examples: Iterable[Example],
    steps: int,
    seed: int,
    batch_tokens: int = 1024,
    rates: SftRates | None = None,
    on_step: OnStep | None = None,
) -> SftResult:
    """Train a Hugging Face model and save it with its tokenizer (safetensors)."""
    try:  # before training, because transformers only logs that it cannot save
        Path(out_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(f"cannot write the model folder {out_dir}: {error.strerror}; choose another") from error
    result = finetune(
        model, examples, steps=steps, seed=seed, batch_tokens=batch_tokens, rates=rates or SftRates(), on_step=on_step
    )
    model.save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    return result


def finetune(
    model: nn.Module,
    examples: Iterable[Example],
    *,
    steps: int,
    seed: int,
    batch_tokens: int,
    rates: SftRates,
    is_packed: bool = False,
    on_step: OnStep | None = None,
) -> SftResult:
    """Train for `steps` batches. Raises DataError if the stream has too few examples."""
    muon, adamw = _optimizers(model, has_muon=rates.muon is not None)
    losses: list[float] = []
    num_tokens = 0
    model.train()
    for batch in islice(length_batches(examples, batch_tokens=batch_tokens, seed=seed), steps):
        with packed_attention(model) if is_packed else nullcontext():
            loss = packed_loss(model, batch) if is_packed else answer_loss(model, *pad_batch(batch))
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = rates.scale(len(losses), steps)
        muon.step((rates.muon or 0.0) * scale)
        for group in adamw.param_groups:
            group["lr"] = rates.adamw * scale
        adamw.step()
        model.zero_grad()
        losses.append(loss.item())
        num_tokens += sum(len(answer) for _, answer in batch)
        if on_step is not None:
            on_step(len(losses), losses[-1])
    if len(losses) < steps:
        raise DataError(f"the examples lasted for {len(losses)} of {steps} steps; give more examples or fewer steps")
    model.eval()
    tail = losses[-max(1, steps // 10) :]
    return SftResult(steps=steps, num_tokens=num_tokens, loss=sum(tail) / len(tail))


def length_batches(
    examples: Iterable[Example], *, batch_tokens: int, seed: int, pool_size: int = 256
) -> Iterator[list[Example]]:
    """Batches of at most `batch_tokens` padded tokens. Each pool is sorted by length, split and shuffled."""
    rng = random.Random(seed)
    stream = iter(examples)
    while pool := list(islice(stream, pool_size)):
        batches: list[list[Example]] = [[]]
        for example in sorted(pool, key=_length):
            if _length(example) > batch_tokens:
                raise DataError(
                    f"an example has {_length(example)} tokens, more than a batch of {batch_tokens}; "
                    "leave it out or raise batch_tokens"
                )
            if _length(example) * (len(batches[-1]) + 1) > batch_tokens:
                batches.append([])
            batches[-1].append(example)
        rng.shuffle(batches)
        yield from batches


def _length(example: Example) -> int:
    return len(example[0]) + len(example[1])


def pad_batch(batch: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Tokens and labels, padded on the right, where causal attention keeps the padding out."""
    num_positions = max(_length(example) for example in batch)
    tokens_nl = torch.zeros(len(batch), num_positions, dtype=torch.long)
    labels_nl = torch.full_like(tokens_nl, _IGNORED)
    for n, (prompt, answer) in enumerate(batch):
        end = len(prompt) + len(answer)
        tokens_nl[n, :end] = torch.tensor([*prompt, *answer])
        labels_nl[n, len(prompt) : end] = torch.tensor(list(answer))
    return tokens_nl, labels_nl


def answer_loss(model: nn.Module, tokens_nl: Tensor, labels_nl: Tensor) -> Tensor:
    """Mean negative log-likelihood of the labelled tokens."""
    logits_nlv = model(input_ids=tokens_nl).logits
    return nn.functional.cross_entropy(
        logits_nlv[:, :-1].flatten(0, 1), labels_nl[:, 1:].flatten(), ignore_index=_IGNORED
    )


def packed_loss(model: Any, batch: Sequence[Example]) -> Tensor:
    """The same loss without padding, with logits of answer tokens only. Call it within `packed_attention(model)`."""
    samples = [
        Sample(
            id=number,
            prompt=Prompt(id=str(number), tokens=tuple(prompt), content=""),
            index=0,
            epoch=0,
            cohort=0,
            seed=0,
            budget=len(answer),
            segments=[Segment(version=0, tokens=list(answer), logprobs=[0.0] * len(answer))],
        )
        for number, (prompt, answer) in enumerate(batch)
    ]
    (micro,) = pack(samples, range(len(samples)), sum(_length(example) for example in batch), model.device)
    return -LogprobScorer(1.0).score(model, micro).logprobs_a.mean()


def _optimizers(model: nn.Module, *, has_muon: bool) -> tuple[GroupedMuon, torch.optim.AdamW]:
    """Muon for the matrices inside the network if `has_muon`, AdamW for everything else."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings] if has_muon else []
    inner = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inner]
    return GroupedMuon(matrices), torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0)


class GroupedMuon:
    """Muon with Nesterov momentum, its step scaled to the RMS of AdamW's.

    It orthogonalises matrices of one shape together in float32. For a tiny model on a CPU that is many times faster
    than `torch.optim.Muon`, which takes them one by one in bfloat16.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], momentum: float = 0.95) -> None:
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for matrix in matrices:
            groups.setdefault(tuple(sorted(matrix.shape)), []).append(matrix)
        self._groups = [
            (shape, group, group[0].new_zeros(len(group), *shape).detach()) for shape, group in groups.items()
        ]
        self._momentum = momentum

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for shape, group, momentum_grc in self._groups:
            grad_grc = torch.stack([_short_side_first(_gradient(matrix)) for matrix in group])
            momentum_grc.lerp_(grad_grc, 1 - self._momentum)
            update_grc = orthogonalise(grad_grc.lerp(momentum_grc, self._momentum))
            for matrix, update_rc in zip(group, update_grc, strict=True):
                _short_side_first(matrix).add_(update_rc, alpha=-lr * 0.2 * shape[1] ** 0.5)


def _gradient(matrix: nn.Parameter) -> Tensor:
    assert matrix.grad is not None, "a matrix has no gradient, because the loss does not depend on it"
    return matrix.grad


def _short_side_first(matrix: Tensor) -> Tensor:
    """A view with the shorter side first."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def orthogonalise(matrices_grc: Tensor) -> Tensor:
    """Move singular values to about 1, by Newton-Schulz iterations."""
    a, b, c = _NEWTON_SCHULZ
    x_grc = matrices_grc / (matrices_grc.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_ROUNDS):
        gram_grr = x_grc @ x_grc.mT
        x_grc = a * x_grc + (b * gram_grr + c * gram_grr @ gram_grr) @ x_grc
    return x_grc
