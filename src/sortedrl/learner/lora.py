"""Adapters in place of full fine-tuning, through peft: only they are trained, the base model stays as it is.

`build/parts.py` puts them on a model, by the configuration's `lora` section or a peft configuration of the user's, and
takes them back from a checkpoint. How engines come to sample from both together is told in `weights.py`.
"""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import allclose

from sortedrl.errors import ConfigError, ModelError
from sortedrl.weights import is_adapted, merged_copy

ADAPTER_FOLDER = "adapter"  # within a checkpoint
_WEIGHTS_FILE = "adapter_model.safetensors"

log = logging.getLogger(__name__)


class LoraSettings(Protocol):
    """What is read of the configuration's `lora` section."""

    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def target_modules(self) -> tuple[str, ...]: ...


def import_peft() -> Any:
    try:
        return import_module("peft")
    except ImportError as error:
        raise ConfigError(
            f"LoRA needs the package peft ({error}): pip install sortedrl[lora], or leave out lora.rank and peft_config"
        ) from error


def peft_config_of(settings: LoraSettings) -> Any | None:
    """The peft configuration that the settings describe; None when all weights are to be trained."""
    if not settings.rank:
        return None
    return import_peft().LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.target_modules) or "all-linear",
    )


def check_peft_config(peft_config: Any) -> None:
    """Refuse what cannot be trained and sampled from, before a model is loaded."""
    peft = import_peft()
    if not isinstance(peft_config, peft.PeftConfig):
        raise ConfigError(
            f"peft_config is a {type(peft_config).__name__}: pass one of peft's, such as LoraConfig(r=16)"
        )
    if peft_config.is_prompt_learning:
        raise ConfigError(
            f"peft_config {type(peft_config).__name__} adds prompts, which cannot be merged into weights to sample "
            "from: use LoraConfig"
        )
    if getattr(peft_config, "lora_dropout", 0.0):
        log.warning("lora_dropout has no effect: answers are sampled without it, and are learned from as sampled")


def adapt(model: Any, peft_config: Any, *, checkpoint: Path | None = None) -> Any:
    """Put adapters on a model: fresh ones, or those of a checkpoint. The model's own weights take no gradients."""
    peft = import_peft()
    if is_adapted(model):
        raise ConfigError(
            "the model has adapters and peft_config asks for others: pass the base model, or leave it out"
        )
    try:
        if checkpoint is None:
            return peft.get_peft_model(model, peft_config).eval()
        folder = checkpoint / ADAPTER_FOLDER
        if not (folder / _WEIGHTS_FILE).is_file():  # peft would go on to look for a pickle, and then online
            raise ModelError(f"{checkpoint} has no {ADAPTER_FOLDER}/{_WEIGHTS_FILE}: it is of a run without adapters")
        return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True, local_files_only=True).eval()
    except (ValueError, RuntimeError, KeyError) as error:
        if isinstance(error, ModelError):
            raise
        why = " ".join(str(error).split())[:200]
        raise ModelError(f"the adapters do not fit the model ({why}): see lora.target_modules") from error


def restore_adapters(model: Any, checkpoint: Path) -> None:
    """Give a model that came with adapters those of a checkpoint."""
    peft = import_peft()
    weights = peft.load_peft_weights(str(checkpoint / ADAPTER_FOLDER), device="cpu")
    peft.set_peft_model_state_dict(model, weights)


def check_base(model: Any, checkpoint: Path) -> None:
    """Refuse a base model that is not the one which a checkpoint's adapters were trained on."""
    merged = merged_copy(model).state_dict()
    for path in checkpoint.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (it is no dict)
                ours, saved = merged.get(name), file.get_tensor(name)
                # Up to rounding: they may have been merged on another device.
                if ours is None or ours.shape != saved.shape or not allclose(ours.cpu(), saved, 1e-3, 1e-4):
                    raise ModelError(
                        f"base model and adapters do not give the weights of {checkpoint} (at {name}): resume with the "
                        "base model that the run was started with"
                    )


def save_adapted(model: Any, folder: Path) -> None:
    """Write the merged model, for `from_pretrained`, and the adapters beside it, for `PeftModel.from_pretrained`."""
    merged_copy(model).save_pretrained(folder)
    model.save_pretrained(folder / ADAPTER_FOLDER, safe_serialization=True, save_embedding_layers=False)
