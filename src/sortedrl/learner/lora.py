"""LoRA adapters through peft: only the adapters are trained, and the base model stays unchanged.

`run/builders/parts.py` adds them to a model, from the configuration's `lora` section or from the user's peft
configuration, and restores them from a checkpoint. `weights.py` explains how engines sample from base and adapters
together.
"""

from __future__ import annotations

import logging
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from safetensors import safe_open
from torch import allclose

from sortedrl.errors import ConfigError, ModelError, first_line
from sortedrl.external.extras import extra_message
from sortedrl.external.hub import shown
from sortedrl.weights import is_adapted, merged_copy

ADAPTER_FOLDER = "adapter"  # within a checkpoint
_WEIGHTS_FILE = "adapter_model.safetensors"

log = logging.getLogger(__name__)


class LoraSettings(Protocol):
    """The keys of the configuration's `lora` section that are read here."""

    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def target_modules(self) -> tuple[str, ...]: ...
    @property
    def last_layers(self) -> int: ...
    @property
    def base_dtype(self) -> str: ...


def import_peft() -> Any:
    try:
        return import_module("peft")
    except ImportError as error:
        raise ConfigError(
            f"{extra_message('LoRA', 'lora')}, or leave out lora.rank and peft_config ({error})"
        ) from error


def peft_config_of(settings: LoraSettings) -> Any | None:
    """The peft configuration that the settings describe, or None if all weights are trained."""
    if not settings.rank:
        return None
    return import_peft().LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.target_modules) or "all-linear",
    )


def limit_layers(peft_config: Any, model: Any, last_layers: int) -> None:
    """Let only the last so many layers of the model get adapters; 0 means all."""
    if not last_layers:
        return
    num_layers: int = model.config.get_text_config().num_hidden_layers
    if last_layers > num_layers:
        raise ConfigError(f"lora.last_layers is {last_layers}, and the model has {num_layers} layers: lower it")
    peft_config.layers_to_transform = list(range(num_layers - last_layers, num_layers))


def check_peft_config(peft_config: Any) -> None:
    """Raise ConfigError for a configuration that cannot be used, before a model is loaded."""
    peft = import_peft()
    if not isinstance(peft_config, peft.PeftConfig):
        raise ConfigError(
            f"peft_config is a {type(peft_config).__name__}: pass a configuration of peft, such as LoraConfig(r=16)"
        )
    if peft_config.is_prompt_learning:
        raise ConfigError(
            f"peft_config {type(peft_config).__name__} adds prompts, which cannot be merged into weights to sample "
            "from: use LoraConfig"
        )
    if getattr(peft_config, "lora_dropout", 0.0):
        log.warning("lora_dropout has no effect: answers are sampled and trained without dropout")


def read_peft_config(folder: Path) -> Any:
    """The peft configuration of saved adapters."""
    for name in ("adapter_config.json", _WEIGHTS_FILE):  # without these peft would look for a pickle, and online
        if not (folder / name).is_file():
            raise ModelError(
                f"lora.path {shown(folder)} has no {name}: give a folder or a repository that peft saved as safetensors"
            )
    try:
        return import_peft().PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the adapters in {shown(folder)} cannot be loaded: {first_line(error)}") from error


def adapt(model: Any, peft_config: Any, *, checkpoint: Path | None = None, start: Path | None = None) -> Any:
    """Add adapters to a model: new ones, those in the folder `start`, or those of a checkpoint.

    The base weights get no gradients.
    """
    peft = import_peft()
    if is_adapted(model):
        raise ConfigError(
            "the model has adapters already and peft_config asks for more: pass the base model, or no peft_config"
        )
    try:
        if checkpoint is None and start is None:
            return peft.get_peft_model(model, peft_config).eval()
        folder = start if checkpoint is None else checkpoint / ADAPTER_FOLDER
        assert folder is not None, "new adapters have no folder"
        if not (folder / _WEIGHTS_FILE).is_file():  # peft would look for a pickle next, and then online
            raise ModelError(
                f"{checkpoint} has no {ADAPTER_FOLDER}/{_WEIGHTS_FILE}, because its run had no adapters: leave out "
                "lora.rank and peft_config"
            )
        return peft.PeftModel.from_pretrained(model, str(folder), is_trainable=True, local_files_only=True).eval()
    except (ValueError, RuntimeError, KeyError) as error:
        if isinstance(error, ModelError):
            raise
        why = " ".join(str(error).split())[:200]
        remedy = (
            "correct lora.target_modules" if start is None else f"set model.path to the base model of {shown(start)}"
        )
        raise ModelError(f"the adapters do not fit the model ({why}): {remedy}") from error


def name_base(model: Any, name: str, commit: str) -> None:
    """Record the id of the base model, in place of its folder in the cache, where saved adapters look for it."""
    for settings in model.peft_config.values():
        settings.base_model_name_or_path, settings.revision = name, commit


def restore_adapters(model: Any, checkpoint: Path) -> None:
    """Load a checkpoint's adapters into a model that has adapters."""
    peft = import_peft()
    weights = peft.load_peft_weights(str(checkpoint / ADAPTER_FOLDER), device="cpu")
    peft.set_peft_model_state_dict(model, weights)


def check_base(model: Any, checkpoint: Path) -> None:
    """Raise ModelError if the checkpoint's adapters were trained on another base model."""
    merged = merged_copy(model).state_dict()
    for path in checkpoint.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                ours, saved = merged.get(name), file.get_tensor(name)
                # Up to rounding, because they may have been merged on another device.
                if ours is None or ours.shape != saved.shape or not allclose(ours.cpu(), saved, 1e-3, 1e-4):
                    raise ModelError(
                        f"base model and adapters do not give the weights of {checkpoint} (at {name}): resume with the "
                        "base model that the run was started with"
                    )


def save_adapted(model: Any, folder: Path) -> None:
    """Save the merged model for `from_pretrained`, and the adapters for `PeftModel.from_pretrained`."""
    merged_copy(model).save_pretrained(folder)
    model.save_pretrained(folder / ADAPTER_FOLDER, safe_serialization=True, save_embedding_layers=False)
