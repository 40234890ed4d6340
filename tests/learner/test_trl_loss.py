"""The learner's loss and gradients compared with those of TRL's GRPOTrainer on the same batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sortedrl.learner.advantage import AdvantageEstimator
from sortedrl.learner.algorithms import ALGORITHMS
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Batch
from sortedrl.tasks.tiny import knights_tiny_path
from tests.support.learners import Settings, caught_gradients, logprobs_of, make_batch, make_model, weights

trl = pytest.importorskip("trl")

BUDGET = 16
LOSS_MEANS = {"grpo": "sequence", "dr_grpo": "constant", "dapo": "token", "bnpo": "token"}


def trl_trainer(folder: Path, **arguments: Any) -> Any:
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoTokenizer

    settings = trl.GRPOConfig(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        bf16=False,
        num_generations=2,
        per_device_train_batch_size=8,
        max_completion_length=BUDGET,
        gradient_checkpointing=False,
        **arguments,
    )
    trainer = trl.GRPOTrainer(
        model=make_model(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        # With an explicit fingerprint, datasets does not hash the table, which fails on some pyarrow objects.
        train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": ["a"] * 8}), fingerprint="prompts"),
        processing_class=AutoTokenizer.from_pretrained(knights_tiny_path()),
    )
    trainer.model.eval()
    return trainer


def padded(rows: list[list[float]], dtype: torch.dtype) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)


def trl_inputs(batch: Batch, advantages: list[float], reference: Any = None) -> dict[str, Tensor]:
    samples = batch.samples
    inputs = {
        "prompt_ids": torch.tensor([sample.prompt.tokens for sample in samples]),
        "prompt_mask": torch.ones(len(samples), 3, dtype=torch.long),
        "completion_ids": padded([sample.tokens for sample in samples], torch.long),
        "completion_mask": padded([[1] * sample.num_tokens for sample in samples], torch.long),
        "old_per_token_logps": padded([sample.logprobs for sample in samples], torch.float32),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(float(sum(sample.num_tokens for sample in samples))),
    }
    if reference is not None:
        with torch.no_grad():
            rows = [logprobs_of(reference, list(s.prompt.tokens), s.tokens).tolist() for s in samples]
        inputs["ref_per_token_logps"] = padded(rows, torch.float32)
    return inputs


def compare(trainer: Any, inputs: dict[str, Tensor], learner: TorchLearner, batch: Batch) -> None:
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    theirs = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    ours = caught_gradients(learner)
    metrics = learner.start(batch).result().metrics
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert abs(loss.item()) > 1e-3
    scale = max(float(value.norm()) for value in theirs.values())
    assert scale > 1e-3
    for name, value in theirs.items():
        assert float((ours[name] - value).norm()) <= 1e-6 * max(scale, 1), name


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", list(LOSS_MEANS))
@pytest.mark.parametrize("micro_tokens", [16384, 24])
def test_loss_and_gradients_equal_trl(tmp_path: Path, loss_type: str, level: str, micro_tokens: int) -> None:
    trainer = trl_trainer(
        tmp_path, loss_type=loss_type, importance_sampling_level=level, epsilon=0.1, epsilon_high=0.15, beta=0.0
    )
    model = make_model()
    assert all(torch.equal(value, weights(model)[name]) for name, value in weights(trainer.model).items())
    batch = make_batch(model, off_policy=0.6)
    algorithm = "dr_grpo" if loss_type == "dr_grpo" else "grpo"
    settings = Settings(
        algorithm=algorithm,
        clip_low=0.1,
        clip_high=0.15,
        ratio=level,
        loss_mean=LOSS_MEANS[loss_type],
        micro_tokens=micro_tokens,
    )
    advantages, _ = AdvantageEstimator(ALGORITHMS[algorithm].advantage).estimate(batch.samples)
    compare(trainer, trl_inputs(batch, advantages), TorchLearner(model, settings, temperature=1.0), batch)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(("loss_type", "level"), [("grpo", "token"), ("dapo", "token"), ("grpo", "sequence")])
def test_kl_and_entropy_equal_trl(tmp_path: Path, loss_type: str, level: str, is_weighted: bool) -> None:
    # Entropy, KL and clipped ratio at once; a group without signal is learned from for the first two.
    reference = make_model(seed=1)
    trainer = trl_trainer(
        tmp_path,
        loss_type=loss_type,
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        entropy_coef=0.05,
        importance_sampling_level=level,
        use_bias_correction_kl=is_weighted,
    )
    trainer.beta = 0.3  # set late: its own reference would be loaded from a path, ours is in the inputs
    model = make_model()
    batch = make_batch(model, off_policy=0.4)
    batch.samples[2].reward = batch.samples[3].reward = 1.0
    settings = Settings(
        algorithm="grpo",
        kl_coef=0.3,
        kl_weighted=is_weighted,
        entropy_coef=0.05,
        ratio=level,
        loss_mean=LOSS_MEANS[loss_type],
    )
    learner = TorchLearner(model, settings, temperature=1.0)
    learner.load_state_dict(
        learner.state_dict()
        | {"optimizer": {f"reference.{name}/value": value for name, value in weights(reference).items()}}
    )
    advantages, _ = AdvantageEstimator(ALGORITHMS["grpo"].advantage).estimate(batch.samples)
    assert advantages[2:4] == [0, 0]
    compare(trainer, trl_inputs(batch, advantages, reference), learner, batch)


def test_mean_baseline_equals_trl(tmp_path: Path) -> None:
    # From rewards to advantages, through TRL's own scoring of prepared answers.
    model = make_model()
    batch = make_batch(model)
    trainer = trl_trainer(tmp_path, scale_rewards="none", loss_type="dr_grpo", beta=0.0)
    trainer._calculate_rewards = lambda *_: torch.tensor([[sample.reward] for sample in batch.samples])
    answers = [sample.tokens for sample in batch.samples]
    prompts = [list(sample.prompt.tokens) for sample in batch.samples]
    generated = trainer._generate

    def prepared(given: list[Any]) -> Any:
        values = list(generated(given))
        values[:2] = prompts, answers
        return tuple(values)

    trainer._generate = prepared
    scored = trainer._generate_and_score_completions([{"prompt": "a"}] * 8)
    ours, _ = AdvantageEstimator(ALGORITHMS["dr_grpo"].advantage).estimate(batch.samples)
    assert scored["advantages"].tolist() == pytest.approx(ours, abs=1e-6)
