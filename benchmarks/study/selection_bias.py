"""What choosing batches by length does to the gradient, at fixed weights of the embedded model.

    python -m benchmarks.study.selection_bias [--samples 384] [--seeds 3] [--json]
    python -m benchmarks.study.selection_bias --read        # the table from benchmarks/results/selection_bias.json

The weights are frozen, so every schedule writes the same answers: arms differ only in which answers share an update.
For each arm the script computes the gradient of every update batch with REINFORCE++ and compares it with the gradient
of all answers as one unselected batch:

- cosine and norm of a single update's gradient: what one step sees. `sync` shows what 16 unselected answers give.
- cosine and relative error of the mean over the epoch: the bias that stays however many updates there are.
- the weight of a token of the longest 5 % of the answers against one of a median answer.

Policies: the shipped model, and the same after 512 samples of training with `sync`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from benchmarks.record import QUICKSTART, load, make_parser, save
from benchmarks.schedule.schedules import FrozenUpdate
from benchmarks.study.claims import interval, short
from benchmarks.study.intervals import student
from sortedrl.buffer import Buffer
from sortedrl.clock import WallClock
from sortedrl.config import SortedConfig
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Batch, Sample
from sortedrl.run.builders.loop import build_loop
from sortedrl.run.builders.parts import build_parts
from sortedrl.trainer import SortedTrainer

ARMS: Mapping[str, tuple[str, ...]] = {
    "sync": ("schedule.strategy=sync", "schedule.lookahead=0"),
    **{
        f"sorted-replay, lookahead {lookahead}": (
            "schedule.strategy=sorted-replay",
            "schedule.cohort_batches=4",
            f"schedule.lookahead={lookahead}",
        )
        for lookahead in (0, 2, 4)
    },
    "fully sorted, cohort 16": (
        "schedule.strategy=sync-large",
        "schedule.cohort_batches=16",
        "schedule.lookahead=0",
        "schedule.order=shortest-first",
    ),
}
# How advantages are normalised and the loss is averaged. The first is the default.
NORMALISATIONS: Mapping[str, tuple[str, str]] = {
    "batch, token mean": ("batch", "token"),
    "running, token mean": ("running", "token"),
    "batch, sequence mean": ("batch", "sequence"),
    "batch, constant": ("batch", "constant"),
}
LONGEST, MEDIAN = 0.05, (0.45, 0.55)
TRAINED_SAMPLES = 512


@dataclass(slots=True, kw_only=True)
class Collector:
    """A learner that keeps the batches and does not change the weights."""

    source: Any
    batches: list[Batch] = field(default_factory=list)

    def start(self, batch: Batch) -> FrozenUpdate:
        self.batches.append(batch)
        return FrozenUpdate()


class GradientProbe(TorchLearner):
    """A learner that computes an update's gradient and does not take the step."""

    gradient: torch.Tensor | None = None

    def of(self, batch: Batch) -> np.ndarray:
        """The gradient of a batch, 0 if all its rewards are equal."""
        self.gradient = None
        self.start(batch).result()
        count = sum(parameter.numel() for parameter in self._parameters().values())
        return np.zeros(count) if self.gradient is None else self.gradient.numpy().astype(np.float64)

    def _move_weights(self) -> None:
        grads = [p.grad.flatten() for p in self._parameters().values() if p.grad is not None]
        self.gradient = torch.cat(grads).clone()


def config_of(arm: str, model: str, seed: int, samples: int, *more: str) -> SortedConfig:
    fixed = [f"run.seed={seed}", f"run.samples={samples}", "eval.prompts=0", f"model.path={model}"]
    fixed += ["run.on_no_signal=warn", "schedule.exact_batch=true", "learner.grad_clip=1e30", "reward.grace_s=600"]
    return SortedConfig.load(QUICKSTART, [*fixed, *ARMS[arm], *more])


def collect(config: SortedConfig) -> list[Batch]:
    """The batches that a schedule takes while the weights do not change."""
    parts = build_parts(config)
    try:
        controller = build_loop(
            config, parts, Buffer(grouped=config.is_grouped), emit=lambda event: None, clock=WallClock()
        )
        collector = Collector(source=parts.learner.source)
        controller.learner = collector
        controller.run()
    finally:
        parts.close()
    return collector.batches


def token_weight(batches: Sequence[Batch]) -> float:
    """The weight of a token of the longest answers against one of median answers, in a mean over a batch's tokens."""
    weights: list[tuple[int, float]] = []
    for batch in batches:
        num_tokens = sum(sample.num_tokens for sample in batch.samples)
        weights += [(sample.num_tokens, 1 / num_tokens) for sample in batch.samples]
    ranked = [weight for _, weight in sorted(weights)]
    num = len(ranked)
    middle = ranked[int(MEDIAN[0] * num) : int(MEDIAN[1] * num) + 1]
    return mean(ranked[int((1 - LONGEST) * num) :]) / mean(middle)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0


def compare(gradients: Sequence[np.ndarray], whole: np.ndarray) -> dict[str, float]:
    """Single gradients and their mean against the gradient of the whole."""
    moved = [gradient for gradient in gradients if gradient.any()]
    average = np.mean(gradients, axis=0)
    scale = float(average @ whole) / float(average @ average)  # Adam removes the length of a gradient
    return {
        "cosine": mean(cosine(gradient, whole) for gradient in moved),
        "norm": mean(float(np.linalg.norm(gradient)) for gradient in moved) / float(np.linalg.norm(whole)),
        "without_signal": 1 - len(moved) / len(gradients),
        "epoch_cosine": cosine(average, whole),
        "epoch_norm": float(np.linalg.norm(average) / np.linalg.norm(whole)),
        "epoch_error": float(np.linalg.norm(scale * average - whole) / np.linalg.norm(whole)),
    }


def measure(model: str, seed: int, samples: int) -> Iterator[dict[str, Any]]:
    """All arms and normalisations at one policy and seed."""
    taken = {arm: collect(config_of(arm, model, seed, samples)) for arm in ARMS}
    answers: tuple[Sample, ...] = tuple(sample for batch in taken["sync"] for sample in batch.samples)
    for name, (scope, average) in NORMALISATIONS.items():
        config = config_of(
            "sync", model, seed, samples, f"learner.advantage_scope={scope}", f"learner.loss_mean={average}"
        )
        parts = build_parts(config)
        try:
            whole = _probe(parts.model, config).of(Batch(update=0, version=0, samples=answers))
            for arm, batches in taken.items():
                probe = _probe(parts.model, config)  # anew, because running statistics remember
                found = compare([probe.of(replace(batch, version=0)) for batch in batches], whole)
                weight = token_weight(batches) if average == "token" else None
                yield {"arm": arm, "normalisation": name, "seed": seed, "token_weight": weight, **found}
        finally:
            parts.close()


def _probe(model: Any, config: SortedConfig) -> GradientProbe:
    return GradientProbe(model, config.learner, temperature=config.engine.temperature)


def trained_model(folder: Path) -> str:
    """The shipped model after some training with `sync`."""
    keys = [f"run.dir={folder}", f"run.samples={TRAINED_SAMPLES}", "run.seed=100", "eval.prompts=0", *ARMS["sync"]]
    config = SortedConfig.load(QUICKSTART, [*keys, "run.report=false", "checkpoint.save=false", "learner.lr=3e-4"])
    trainer = SortedTrainer(args=config, quiet=True)
    trainer.train()
    return str(trainer.save_model(folder / "model"))


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
    heads = ["policy", "normalisation", "arm", "cosine of a step", "norm of a step", "steps without signal"]
    heads += ["cosine of the epoch", "error of the epoch", "weight of a long answer's token"]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["policy"], record["normalisation"], record["arm"]), []).append(record)
    for key, found in groups.items():
        cells = list(key)
        cells.append(interval(student([record["cosine"] for record in found]), ".2f"))
        cells.append(short(mean(record["norm"] for record in found), ".2f"))
        cells.append(format(mean(record["without_signal"] for record in found), ".0%"))
        cells += [
            interval(student([record[name] for record in found]), ".2f") for name in ("epoch_cosine", "epoch_error")
        ]
        weights = [record["token_weight"] for record in found]
        cells.append("" if None in weights else short(mean(weights), ".2f"))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=384, help="answers in an epoch")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--read", action="store_true", help="compute nothing: show the result file")
    given = parser.parse_args()
    if given.read:
        print(markdown(load("selection_bias")["runs"]))
        return
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for policy, model in (("shipped", "knights-tiny"), ("trained", trained_model(Path(folder)))):
            for seed in range(given.seeds):
                records += [{"policy": policy, **found} for found in measure(model, seed, given.samples)]
    if given.json:
        print(json.dumps(records))
        return
    save("selection_bias", {"arguments": vars(given), "runs": records})
    print(markdown(records))


if __name__ == "__main__":
    main()
