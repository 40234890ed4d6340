"""Converts the arguments of TRL's trainer, a `GRPOConfig`, into a `SortedConfig`.

`SortedTrainer` calls it when `args` is TRL's. TRL is not imported: the arguments are recognised by their class, and
fields that a version of TRL does not have are passed over. `foreign_names.py` says what becomes of each field.

Guarantees: every field is converted, changes nothing here, or is named in a note if it differs from its default.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sortedrl.config.config import SortedConfig
from sortedrl.config.foreign_names import IGNORED, NEIGHBOURS, NO_EQUIVALENT
from sortedrl.errors import ConfigError
from sortedrl.redact import redact

_LOSS_MEANS = {"grpo": "sequence", "dapo": "token", "bnpo": "token", "dr_grpo": "constant"}
_ALGORITHMS = {"group": "grpo", "none": "dr_grpo", "batch": "reinforce++-baseline", "True": "grpo", "False": "dr_grpo"}
_NO_LIMIT = 3e38  # of a ratio: about the largest number of float32
_LR_FINAL = {"linear": 0.0, "constant": 1.0, "constant_with_warmup": 1.0}
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
_TRACKERS = ("tensorboard", "wandb")
_PROMPT_TOKENS = 512  # where TRL sets no limit
_NO_CLIPPING = 1e9  # a gradient norm that is never reached
_CONVERTED = frozenset(name for row in NEIGHBOURS for name in row.trl)


def is_trl_args(args: Any) -> bool:
    """Whether these are arguments of TRL's GRPO trainer: a `GRPOConfig`, or an object of a class derived from it."""
    return any(
        kind.__name__ == "GRPOConfig" and kind.__module__.partition(".")[0] == "trl" for kind in type(args).__mro__
    )


def from_trl(
    args: Any, *, num_rows: int | None = None, num_eval_rows: int | None = None, **sections: Mapping[str, Any]
) -> tuple[SortedConfig, list[str]]:
    """The configuration that means the same as TRL's arguments, and notes on what has no equivalent.

    The numbers of rows are those of the datasets; None if there is none. Keys of `sections` replace converted ones, as
    in `schedule={"strategy": "sync"}`.
    """
    reader = _Reader(args=args, num_rows=num_rows)
    if reader.update_batch % reader.group_size:
        raise ConfigError(
            f"TRL's batch of {reader.update_batch} samples (per_device_train_batch_size x devices x steps) is "
            f"no multiple of num_generations {reader.group_size}: change one of them"
        )
    converted: dict[str, dict[str, Any]] = {
        "run": _run(reader),
        "task": {"max_prompt_tokens": reader.get("max_prompt_length", _PROMPT_TOKENS)},
        "schedule": {"update_batch": reader.update_batch},
        "engine": _engine(reader),
        "reward": {"weights": tuple(reader.get("reward_weights", ()))},
        "learner": {**_objective(reader), **_optimizer(reader)},
        "eval": _evaluation(reader, num_eval_rows),
        "checkpoint": _checkpoints(reader),
        "track": _trackers(reader),
    }
    for name, values in sections.items():
        converted[name] = {**converted.get(name, {}), **values}
    try:
        config = SortedConfig(**converted)
    except ConfigError as error:
        raise ConfigError(f"TRL's {type(args).__name__} cannot be converted: {error}") from None
    return config, [*_without_equivalent(args), *reader.notes]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Reader:
    """Reads TRL's arguments, and collects notes on values that have no equivalent."""

    args: Any
    num_rows: int | None
    notes: list[str] = dataclasses.field(default_factory=list)

    def get(self, name: str, default: Any = None) -> Any:
        """A field's value; `default` if it is None, or if this version of TRL has no such field."""
        value = getattr(self.args, name, None)
        return default if value is None else value

    def text(self, name: str, default: str) -> str:
        """A field that is a text or a member of an enumeration of texts."""
        value = self.get(name, default)
        return str(getattr(value, "value", value))

    @property
    def update_batch(self) -> int:
        """Samples that TRL generates before a step: all that it generates at once, or what a step accumulates."""
        return self._generated * max(1, self._accumulated // self._steps_per_generation)

    @property
    def inner_steps(self) -> int:
        """Optimizer steps in one pass over what was generated together."""
        return max(1, self._steps_per_generation // self._accumulated)

    @property
    def _generated(self) -> int:
        if (size := self.get("generation_batch_size")) is not None:
            return size
        per_device = self.get("per_device_train_batch_size", 8)
        return per_device * self.get("world_size", 1) * self._steps_per_generation

    @property
    def _accumulated(self) -> int:
        return self.get("gradient_accumulation_steps", 1)

    @property
    def _steps_per_generation(self) -> int:
        return self.get("steps_per_generation", self._accumulated)

    @property
    def steps_per_update(self) -> int:
        return self.inner_steps * self.get("num_iterations", 1)

    @property
    def group_size(self) -> int:
        return self.get("num_generations", 8)

    @property
    def samples(self) -> int | None:
        """Samples of the whole run; None if neither steps nor rows are known."""
        if (steps := self.get("max_steps", -1)) > 0:
            return math.ceil(steps / self.steps_per_update) * self.update_batch
        if self.num_rows is None:
            return None
        prompts = math.ceil(self.get("num_train_epochs", 3.0) * self.num_rows)
        return max(prompts * self.group_size, self.update_batch)

    def updates(self, steps: float) -> int:
        """Updates that take so many optimizer steps; a number below 1 is a share of the run."""
        if 0 < steps < 1:
            steps *= (self.samples or 0) / self.update_batch * self.steps_per_update
        return max(1, round(steps / self.steps_per_update))


def _run(reader: _Reader) -> dict[str, Any]:
    """The run directory is TRL's output_dir."""
    section: dict[str, Any] = {"seed": reader.get("seed", 42)}
    if output := reader.get("output_dir"):
        folder = Path(output) if Path(output).name not in ("", "..") else Path(output).resolve()
        section |= {"dir": str(folder.parent), "name": folder.name}
    if reader.samples is None:
        reader.notes.append("num_train_epochs needs a dataset: run.samples has its default")
    else:
        section["samples"] = reader.samples
    return section


def _engine(reader: _Reader) -> dict[str, Any]:
    """As many slots as TRL generates at once, so that memory is no more than there."""
    section: dict[str, Any] = {
        "kind": "vllm" if reader.get("use_vllm") else "local",
        "slots": reader.update_batch,
        "temperature": reader.get("temperature", 1.0),
        "top_p": reader.get("top_p", 1.0),
        "top_k": max(0, reader.get("top_k", 0)),
        "min_p": reader.get("min_p", 0.0),
    }
    whole = {"top_p": 1, "top_k": 0, "min_p": 0}
    if cuts := [f"{key}={section[key]:g}" for key, value in whole.items() if section[key] != value]:
        reader.notes.append(f"{', '.join(cuts)} (answers are cut so, but the learner scores the whole distribution)")
    if (longest := reader.get("max_completion_length")) is not None:
        section["max_new_tokens"] = longest
    return section


def _objective(reader: _Reader) -> dict[str, Any]:
    loss, scale = reader.text("loss_type", "dapo"), reader.text("scale_rewards", "group")
    level = reader.text("importance_sampling_level", "token")
    if loss not in _LOSS_MEANS:
        raise ConfigError(f"TRL's loss_type {loss!r} has no equivalent: choose from {', '.join(_LOSS_MEANS)}")
    if scale not in _ALGORITHMS:
        raise ConfigError(f"TRL's scale_rewards {scale!r} has no equivalent: choose from group, batch, none")
    if scale == "batch":
        reader.notes.append("scale_rewards='batch' (learner.algorithm reinforce++-baseline is the nearest)")
    if level not in ("token", "sequence"):
        raise ConfigError(f"TRL's importance_sampling_level {level!r} has no equivalent: choose token or sequence")
    low = reader.get("epsilon", 0.2)
    return {
        "algorithm": _ALGORITHMS[scale],
        "group_size": reader.group_size,
        "loss_mean": _LOSS_MEANS[loss],
        "ratio": level,
        "clip_low": low,
        "clip_high": reader.get("epsilon_high", low),
        "overlong": "mask" if reader.get("mask_truncated_completions") else "keep",
        "kl_coef": reader.get("beta", 0.0),
        "kl_weighted": bool(reader.get("use_bias_correction_kl", False)),
        "entropy_coef": reader.get("entropy_coef", 0.0),
        **_importance(reader),
    }


def _importance(reader: _Reader) -> dict[str, Any]:
    """TRL weights the tokens of vLLM by default, and limits the weights: it truncates them or masks tokens."""
    if not (reader.get("use_vllm") and reader.get("vllm_importance_sampling_correction", True)):
        return {}
    mode = reader.text("vllm_importance_sampling_mode", "token_truncate")
    level, _, kind = mode.partition("_")
    if level not in ("token", "sequence") or kind not in ("truncate", "mask"):
        reader.notes.append(f"vllm_importance_sampling_mode={mode!r} (see learner.importance)")
        return {}
    cap = reader.get("vllm_importance_sampling_clip_max") or reader.get("vllm_importance_sampling_cap", "none")
    floor = reader.get("vllm_importance_sampling_clip_min") or 0.0
    if kind == "truncate":
        if floor:
            reader.notes.append(f"vllm_importance_sampling_clip_min={floor:g} (weights have no lower limit)")
        return {"importance": level, "importance_cap": cap}
    high = _NO_LIMIT if cap in (None, "none") else cap
    band = {"importance_mask": level, "importance_low": floor, "importance_high": high}
    return {"importance": level, "importance_cap": "none", **band}


def _optimizer(reader: _Reader) -> dict[str, Any]:
    schedule = reader.text("lr_scheduler_type", "linear")
    if schedule not in _LR_FINAL:
        reader.notes.append(f"lr_scheduler_type={schedule!r} (the rate falls linearly)")
    warmup = reader.get("warmup_steps", 0) or reader.get("warmup_ratio", 0.0)
    step_samples = reader.update_batch / reader.steps_per_update
    samples = warmup * (reader.samples or 0) if 0 < warmup < 1 else warmup * step_samples
    return {
        "lr": reader.get("learning_rate", 1e-6),
        "lr_final": _LR_FINAL.get(schedule, 0.0),
        "warmup_samples": round(samples),
        "weight_decay": reader.get("weight_decay", 0.0),
        "betas": (reader.get("adam_beta1", 0.9), reader.get("adam_beta2", 0.999)),
        "grad_clip": reader.get("max_grad_norm", 0.0) or _NO_CLIPPING,
        "inner_steps": reader.inner_steps,
        "inner_epochs": reader.get("num_iterations", 1),
        "recompute": bool(reader.get("gradient_checkpointing", False)),
        "dtype": "auto" if reader.get("bf16") else "float32",
    }


def _evaluation(reader: _Reader, num_rows: int | None) -> dict[str, Any]:
    when = reader.text("eval_strategy", "no")
    if when == "no":
        return {"prompts": 0}
    section: dict[str, Any] = {"samples": reader.get("num_generations_eval") or reader.group_size}
    if num_rows is not None:
        section["prompts"] = num_rows
    if when == "epoch" and reader.num_rows is not None:
        section["every_samples"] = reader.num_rows * reader.group_size
    elif when == "steps":
        steps = reader.get("eval_steps") or reader.get("logging_steps", 10)
        section["every_samples"] = reader.updates(steps) * reader.update_batch
    return section


def _checkpoints(reader: _Reader) -> dict[str, Any]:
    """A run is saved at its end in any case: its weights are kept nowhere else."""
    when, keep = reader.text("save_strategy", "steps"), reader.get("save_total_limit")
    section: dict[str, Any] = {} if keep is None else {"keep": max(1, keep)}
    match when:
        case "no":
            section["every_updates"] = 0
        case "epoch" if reader.num_rows is not None:
            section["every_updates"] = max(1, round(reader.num_rows * reader.group_size / reader.update_batch))
        case "best":
            reader.notes.append("save_strategy='best' (checkpoints are saved at intervals)")
        case _:
            section["every_updates"] = reader.updates(reader.get("save_steps", 500))
    return section


def _trackers(reader: _Reader) -> dict[str, Any]:
    named = reader.get("report_to", "none")
    names = [named] if isinstance(named, str) else list(named)
    if unknown := [name for name in names if name not in (*_TRACKERS, "none", "all")]:
        reader.notes.append(f"report_to={unknown} (track.to takes {' and '.join(_TRACKERS)})")
    section: dict[str, Any] = {"to": tuple(name for name in _TRACKERS if name in names)}
    if (project := reader.get("project")) not in (None, "huggingface"):
        section["project"] = project
    return section


# ---- what is left ----------------------------------------------------------------------------------------------------


def _without_equivalent(args: Any) -> list[str]:
    """Fields that differ from their default and cannot be carried out, each with what is done instead."""
    left: list[str] = []
    for name, default in _defaults(args).items():
        if name in _CONVERTED or name in IGNORED:
            continue
        value = getattr(args, name, default)
        value = getattr(value, "value", value)
        is_same = value == default or (not value and not default) or (name == "optim" and value in _ADAMW)
        if name == "run_name":  # older versions set it to output_dir
            is_same = not value or str(value) == str(getattr(args, "output_dir", ""))
        if name == "use_cpu":
            is_same = not (value and _has_gpu())
        if not is_same:
            instead = NO_EQUIVALENT.get(name)
            left.append(f"{name}{_shown(redact({name: value})[name])}{f' ({instead})' if instead else ''}")
    return left


def _has_gpu() -> bool:
    torch = sys.modules.get("torch")  # TRL has imported it
    return torch is not None and torch.cuda.is_available()


def _defaults(args: Any) -> dict[str, Any]:
    """All fields with their defaults."""
    if not dataclasses.is_dataclass(args):
        return {name: getattr(type(args), name, None) for name in vars(args)}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(args):
        has_factory = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if has_factory else field.default  # type: ignore[misc]
        found[field.name] = None if default is dataclasses.MISSING else default
    return found


def _shown(value: Any) -> str:
    """`=value` if the value is short, and the keys of a table."""
    if isinstance(value, Mapping):
        return f" with {', '.join(map(str, value))}"
    is_plain = isinstance(value, bool | int | float) or (isinstance(value, str) and len(value) <= 40)
    return f"={value!r}" if is_plain else ""
