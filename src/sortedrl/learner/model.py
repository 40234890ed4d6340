"""Model folders: loading a causal language model and its tokenizer, without running code of the folder's.

`build` loads the model to train with it, and resuming loads a checkpoint's. Weights in pickle and models with code of
their own are refused, and nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from sortedrl.errors import ModelError
from sortedrl.weights import no_progress_bars


def check_model_folder(path: str | Path) -> Path:
    """Refuse what cannot be a model's folder, before anything large is read."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(
            f"model.path {str(path)!r} is no folder: give one that from_pretrained loads, knights-tiny or smollm2-135m"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is no model folder: config.json is missing")
    if not any(folder.glob("*.safetensors")):
        remedy = "convert its pickled weights to safetensors" if any(folder.glob("*.bin")) else "save the weights there"
        raise ModelError(f"{folder} has no weights in safetensors: {remedy}")
    return folder


def read_window(folder: Path) -> int | None:
    """The number of positions that a model has by its config.json; None where that does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        window = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return None  # loading will say what is wrong
    return window if isinstance(window, int) else None


def load_model(path: str | Path, *, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The causal language model and tokenizer of a folder, in eval mode. Nothing is downloaded, no code is run."""
    folder = check_model_folder(path)
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
        raise ModelError(f"the model in {folder} cannot be loaded: {_first_line(error)}") from error
    model, info = loaded
    absent = sorted(map(str, info["missing_keys"])) + sorted(map(str, info["mismatched_keys"]))
    if absent:
        raise ModelError(
            f"the weights in {folder} do not fit config.json: {absent[0]} and {len(absent) - 1} more are off"
        )
    return model.eval(), load_tokenizer(folder)


def load_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exceptions on damaged files
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
