"""TRL's GRPOConfig becomes a SortedConfig: all fields of the installed version, values by hand, and one training."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from sortedrl.config.foreign_names import IGNORED, NEIGHBOURS, NO_EQUIVALENT
from sortedrl.config.trl_args import from_trl, is_trl_args
from sortedrl.errors import ConfigError

CONVERTED = {name for row in NEIGHBOURS for name in row.trl}


class GRPOConfig:
    """Stands in for TRL's class, whose import takes seconds; only what differs from the defaults is set."""

    __module__ = "trl.trainer.grpo_config"

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def real_args(**fields: Any) -> Any:
    trl = pytest.importorskip("trl")
    return trl.GRPOConfig(**{"output_dir": "out/brief", "use_cpu": True, "bf16": False, **fields})


# ---- the installed TRL ----------------------------------------------------------------------------------------------


def test_every_field_is_converted_ignored_or_named() -> None:
    trl = pytest.importorskip("trl")
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert fields - CONVERTED - IGNORED - set(NO_EQUIVALENT) == set()
    assert len(fields & CONVERTED) > 45
    config, notes = from_trl(real_args(), num_rows=100)
    assert notes == []  # TRL's defaults have equivalents
    assert config.run.samples == 3 * 100 * 8  # epochs x rows x answers


# A value other than the default for every field that is converted, with the key that must change.
OTHER_VALUES: dict[str, tuple[Any, str]] = {
    "output_dir": ("else/where", "run.name"),
    "seed": (7, "run.seed"),
    "max_steps": (5, "run.samples"),
    "num_train_epochs": (1.0, "run.samples"),
    "per_device_train_batch_size": (16, "schedule.update_batch"),
    "gradient_accumulation_steps": (2, "schedule.update_batch"),
    "generation_batch_size": (24, "schedule.update_batch"),
    "steps_per_generation": (4, "learner.inner_steps"),
    "num_iterations": (2, "learner.inner_epochs"),
    "use_vllm": (True, "engine.kind"),
    "max_completion_length": (99, "engine.max_new_tokens"),
    "temperature": (0.9, "engine.temperature"),
    "top_p": (0.9, "engine.top_p"),
    "top_k": (5, "engine.top_k"),
    "min_p": (0.1, "engine.min_p"),
    "num_generations": (4, "learner.group_size"),
    "scale_rewards": ("none", "learner.algorithm"),
    "loss_type": ("grpo", "learner.loss_mean"),
    "importance_sampling_level": ("sequence", "learner.ratio"),
    "epsilon": (0.1, "learner.clip_low"),
    "epsilon_high": (0.3, "learner.clip_high"),
    "beta": (0.04, "learner.kl_coef"),
    "use_bias_correction_kl": (False, "learner.kl_weighted"),
    "entropy_coef": (0.1, "learner.entropy_coef"),
    "mask_truncated_completions": (True, "learner.overlong"),
    "reward_weights": ([1.0, 2.0], "reward.weights"),
    "learning_rate": (3e-6, "learner.lr"),
    "lr_scheduler_type": ("constant", "learner.lr_final"),
    "warmup_steps": (3, "learner.warmup_samples"),
    "weight_decay": (0.1, "learner.weight_decay"),
    "adam_beta1": (0.8, "learner.betas"),
    "adam_beta2": (0.9, "learner.betas"),
    "max_grad_norm": (0.5, "learner.grad_clip"),
    "bf16": (True, "learner.dtype"),
    "gradient_checkpointing": (False, "learner.recompute"),
    "eval_strategy": ("epoch", "eval.every_samples"),
    "eval_steps": (3, "eval.every_samples"),
    "num_generations_eval": (2, "eval.samples"),
    "save_strategy": ("no", "checkpoint.every_updates"),
    "save_steps": (3, "checkpoint.every_updates"),
    "save_total_limit": (5, "checkpoint.keep"),
    "report_to": (["wandb"], "track.to"),
    "project": ("mine", "track.project"),
    "vllm_importance_sampling_mode": ("token_truncate", "learner.importance"),
    "vllm_importance_sampling_correction": (False, "learner.importance"),
    "vllm_importance_sampling_clip_max": (4.0, "learner.importance_cap"),
    "vllm_importance_sampling_cap": (4.0, "learner.importance_cap"),
    "vllm_importance_sampling_clip_min": (0.25, "learner.importance_low"),
}
# Fields that act only together with others.
CONTEXT: dict[str, dict[str, Any]] = {
    "eval_steps": {"eval_strategy": "steps"},
    "num_generations_eval": {"eval_strategy": "steps"},
    "vllm_importance_sampling_mode": {"use_vllm": True},
    "vllm_importance_sampling_clip_min": {"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"},
    **{
        f"vllm_importance_sampling_{name}": {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
        for name in ("correction", "clip_max", "cap")
    },
}


def test_every_converted_field_reaches_its_key() -> None:
    args = real_args()
    names = {field.name for field in dataclasses.fields(args)}
    assert names & CONVERTED == set(OTHER_VALUES)
    for name, (value, key) in OTHER_VALUES.items():
        context = CONTEXT.get(name, {})
        plain = changed(args, context)
        section, _, last = key.partition(".")
        before, after = (
            getattr(getattr(from_trl(given, num_rows=96, num_eval_rows=7)[0], section), last)
            for given in (plain, changed(args, {**context, name: value}))
        )
        assert before != after, name


def changed(args: Any, values: dict[str, Any]) -> GRPOConfig:
    """The fields of TRL's arguments with other values, without TRL's own checks, which need a GPU for some."""
    taken = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    if {"per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"} & set(values):
        taken |= {"generation_batch_size": None, "steps_per_generation": None}
    if "vllm_importance_sampling_cap" in values:
        taken["vllm_importance_sampling_clip_max"] = None
    return GRPOConfig(**{**taken, **values})


def test_a_script_of_trl_trains_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from sortedrl import SortedTrainer

    args = real_args(
        output_dir=str(tmp_path / "brief"),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=24,
        max_steps=2,
        learning_rate=1e-3,
        repetition_penalty=1.1,
        hub_token="hf_of_mine",
    )
    rows = [{"prompt": "Ann says Bob-knave . Bob says Ann-knight . ?"}] * 8
    with caplog.at_level(logging.WARNING):
        trainer = SortedTrainer(
            "knights-tiny", lambda completions: [float(len(text) % 3) for text in completions], args, rows, quiet=True
        )
    (line,) = caplog.messages
    assert line == "TRL's GRPOConfig has settings without an equivalent here: repetition_penalty=1.1"
    summary = trainer.train()
    assert (summary.status, summary.samples, summary.updates) == ("complete", 16, 2)
    assert trainer.run_dir == tmp_path / "brief"
    assert (tmp_path / "brief" / "summary.json").is_file()


# ---- without TRL ----------------------------------------------------------------------------------------------------


def test_masks_of_trl_are_converted() -> None:
    masked = GRPOConfig(use_vllm=True, vllm_importance_sampling_mode="sequence_mask", vllm_importance_sampling_cap=3.0)
    learner = from_trl(masked)[0].learner
    assert (learner.importance, learner.importance_cap, learner.importance_mask) == ("sequence", "none", "sequence")
    assert (learner.importance_low, learner.importance_high) == (0, 3)
    band = {"vllm_importance_sampling_clip_min": 0.5, "vllm_importance_sampling_clip_max": None}
    learner = from_trl(GRPOConfig(use_vllm=True, vllm_importance_sampling_mode="token_mask", **band))[0].learner
    assert (learner.importance, learner.importance_mask, learner.importance_low) == ("token", "token", 0.5)
    assert learner.importance_high > 1e38


def test_batches_and_steps_are_converted_to_samples() -> None:
    args = GRPOConfig(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=6,
        num_iterations=2,
        num_generations=8,
        max_steps=10,
        warmup_steps=3,
        save_steps=12,
        eval_strategy="steps",
        eval_steps=0.5,
    )
    config, _ = from_trl(args)
    assert config.schedule.update_batch == 24  # 4 x 6: what is generated at once
    assert (config.learner.inner_steps, config.learner.inner_epochs) == (3, 2)  # 6 / 2 steps, twice
    assert config.run.samples == 48  # 10 steps are 2 updates of 6
    assert config.learner.warmup_samples == 12  # 3 of 6 steps of an update
    assert config.checkpoint.every_updates == 2
    assert config.eval.every_samples == 24  # half of the run
    accumulating = GRPOConfig(per_device_train_batch_size=4, gradient_accumulation_steps=4, steps_per_generation=2)
    assert from_trl(accumulating)[0].schedule.update_batch == 16  # a step takes two generations


def test_what_cannot_be_converted_is_named() -> None:
    args = GRPOConfig(
        deepspeed="zero3.json", optim="adafactor", generation_kwargs={"stop": "x"}, new_field=3, new_token="s3"
    )
    _, notes = from_trl(args, num_rows=8)
    assert notes == [
        "deepspeed='zero3.json' (learner.ranks shards the learner)",
        "optim='adafactor' (AdamW is used)",
        "generation_kwargs with stop (engine has temperature, top_k, top_p, min_p, stop and stop_tokens)",
        "new_field=3",
        "new_token='<redacted>'",
    ]
    _, notes = from_trl(GRPOConfig(report_to=["wandb", "mlflow"], lr_scheduler_type="cosine"))
    assert notes == [
        "num_train_epochs needs a dataset: run.samples has its default",
        "lr_scheduler_type='cosine' (the rate falls linearly)",
        "report_to=['mlflow'] (track.to takes tensorboard and wandb)",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_generations": 3},
            r"^TRL's batch of 8 samples .* is no multiple of num_generations 3: change one of them$",
        ),
        ({"loss_type": "sapo"}, "^TRL's loss_type 'sapo' has no equivalent: choose from grpo, dapo, bnpo, dr_grpo$"),
        ({"learning_rate": 0.0}, r"^TRL's GRPOConfig cannot be converted: learner\.lr: .* greater than 0, not 0\.0$"),
    ],
)
def test_contradictions_get_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_trl(GRPOConfig(**fields), num_rows=8)


def test_only_arguments_of_trl_are_taken() -> None:
    from sortedrl import SortedTrainer

    class Derived(GRPOConfig):
        pass

    assert is_trl_args(Derived())
    assert not is_trl_args(dataclasses.make_dataclass("GRPOConfig", [])())
    with pytest.raises(ConfigError, match="args must be a SortedConfig or TRL's GRPOConfig, not dict"):
        SortedTrainer(args={"run": {}})


def test_sections_replace_what_was_converted() -> None:
    config, _ = from_trl(GRPOConfig(temperature=0.9), num_rows=8, engine={"slots": 64}, schedule={"strategy": "sync"})
    assert (config.engine.slots, config.engine.temperature, config.schedule.strategy) == (64, 0.9, "sync")
