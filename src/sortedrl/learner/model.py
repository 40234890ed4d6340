"""Loads a causal language model and its tokenizer from a folder.

`run/builders` loads the model to train, after `external/hub.py` has fetched it if it is an id; resuming loads a
checkpoint's.
Guarantees: no code from the folder is run, pickled weights are refused, and nothing is downloaded here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.initialization import no_init_weights

from sortedrl.errors import ModelError, first_line
from sortedrl.external.hub import commit_of, shown
from sortedrl.learner.sharded.shard_files import SHARDS_FOLDER, WEIGHTS, read_shards
from sortedrl.weights import no_progress_bars


def check_model_folder(path: str | Path) -> Path:
    """Raise ModelError if the folder cannot hold a model, before anything large is read."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(
            f"model.path {str(path)!r} is not a folder: give a folder that from_pretrained loads, an id on the hub "
            "(owner/name), knights-tiny or smollm2-135m"
        )
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ModelError(
            f"{shown(folder)} holds adapters, not a model: name them in lora.path, and their base model in model.path"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{shown(folder)} is not a model folder: config.json is missing")
    if not any(folder.glob("*.safetensors")) and not has_shards(folder):
        raise ModelError(f"{shown(folder)} has no safetensors weights: {_remedy(folder)}")
    return folder


def _remedy(folder: Path) -> str:
    if any(folder.glob("*.bin")):
        return "convert its pickled weights to safetensors"
    if commit_of(folder):
        return "pickled weights (.bin) are never loaded; choose a repository or a revision that has them as safetensors"
    return "save its weights in that format"


def read_window(folder: Path) -> int | None:
    """The context window according to the folder's config.json, or None if it does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        window = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None  # loading the model will raise a better error
    return window if isinstance(window, int) else None


def load_model(path: str | Path, *, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Load the causal language model, in eval mode, and the tokenizer of a folder."""
    folder = check_model_folder(path)
    if has_shards(folder):
        return _load_sharded(folder, dtype), load_tokenizer(folder)
    try:
        with no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the model in {shown(folder)} cannot be loaded: {first_line(error)}") from error
    model, info = loaded
    absent = sorted(map(str, info["missing_keys"])) + sorted(map(str, info["mismatched_keys"]))
    if absent:
        raise ModelError(
            f"the weights in {shown(folder)} do not fit config.json: {absent[0]} and {len(absent) - 1} others are "
            "missing or have another shape; save the model again with save_pretrained"
        )
    return model.eval(), load_tokenizer(folder)


def has_shards(folder: Path) -> bool:
    """Whether a folder is a checkpoint whose weights are shards of several ranks."""
    return (folder / SHARDS_FOLDER).is_dir()


def _load_sharded(folder: Path, dtype: torch.dtype) -> Any:
    """Build the model from config.json and fill it with the shards of a checkpoint."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with no_init_weights():  # all of them are loaded
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        model.tie_weights()
        weights = read_shards(folder / SHARDS_FOLDER, WEIGHTS)
        parameters = dict(model.named_parameters())
        if absent := sorted(parameters.keys() ^ weights.keys()):
            raise ValueError(f"{absent[0]} and {len(absent) - 1} others are in only one of shards and model")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the model in {shown(folder)} cannot be loaded: {first_line(error)}") from error
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exceptions on damaged files
        raise ModelError(f"the tokenizer in {shown(folder)} cannot be loaded: {first_line(error)}") from error
