"""Models and learner state on disk: a folder that transformers loads, with what training needs beside it.

`save_checkpoint` is called between updates. A folder appears under its name complete or not at all: it is written
aside, flushed to disk, then renamed. Tensors are safetensors and everything else is JSON, so that loading runs no code
of the file's; weights in pickle and models with code of their own are refused.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from sortedrl.errors import ModelError, RunDirError

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "learner_state.json"
SCHEMA_VERSION = 1


class HasState(Protocol):
    """A learner whose state is tensors by name under "optimizer" and JSON values elsewhere."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def save_checkpoint(
    folder: str | Path,
    model: Any,
    tokenizer: Any,
    *,
    learner: HasState | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write model, tokenizer, optimiser and `extra` (JSON values) to `folder`; what was there is replaced."""
    folder = Path(folder)
    aside = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        with _quiet():
            model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        _write_state(aside, learner.state_dict() if learner is not None else {}, extra or {})
        _flush(aside)
        _rename(aside, folder)
    except OSError as error:
        raise RunDirError(f"checkpoint {folder} cannot be written ({error}): check space and permissions") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def load_state(folder: str | Path, learner: HasState | None = None) -> dict[str, Any]:
    """Give a learner the state saved with a checkpoint, and return its `extra`."""
    folder = Path(folder)
    for name in (STATE_FILE,) if learner is None else (STATE_FILE, OPTIMIZER_FILE):
        if not (folder / name).is_file():
            raise RunDirError(f"{folder} has no {name}: give a folder that save_checkpoint wrote, with its learner")
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if state["schema_version"] != SCHEMA_VERSION:
            raise RunDirError(
                f"{folder} has state of version {state['schema_version']}, this package reads {SCHEMA_VERSION}"
            )
        if learner is not None:
            learner.load_state_dict({"optimizer": load_file(folder / OPTIMIZER_FILE), **state["learner"]})
        return state["extra"]
    except (json.JSONDecodeError, SafetensorError, KeyError, TypeError) as error:
        raise RunDirError(f"the state in {folder} is damaged ({error}): go on from another checkpoint") from error


def load_model(path: str | Path, *, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The causal language model and tokenizer of a folder, in eval mode. Nothing is downloaded, no code is run."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"model.path {str(path)!r} is no folder: give one that from_pretrained loads, or knights-tiny")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} is no model folder: config.json is missing")
    if not any(folder.glob("*.safetensors")):
        remedy = "convert its pickled weights to safetensors" if any(folder.glob("*.bin")) else "save the weights there"
        raise ModelError(f"{folder} has no weights in safetensors: {remedy}")
    try:
        with _quiet():
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
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exceptions on damaged files
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {_first_line(error)}") from error
    return model.eval(), tokenizer


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars on the user's terminal."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _write_state(folder: Path, state: dict[str, Any], extra: dict[str, Any]) -> None:
    tensors: dict[str, Tensor] | None = state.pop("optimizer", None)
    if tensors is not None:
        save_file(
            {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, folder / OPTIMIZER_FILE
        )
    document = {"schema_version": SCHEMA_VERSION, "learner": state or None, "extra": extra}
    (folder / STATE_FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")


def _flush(folder: Path) -> None:
    """Have every file, then the folder's list of them, on disk before the name points there."""
    for path in [*(entry for entry in folder.rglob("*") if entry.is_file()), folder]:
        _sync(path)


def _rename(aside: Path, folder: Path) -> None:
    """Put the finished folder in place. A folder cannot be replaced in one step: an older one is moved away first."""
    replaced = folder.with_name(f".{folder.name}.replaced-{os.getpid()}")
    if folder.exists():
        folder.rename(replaced)
    try:
        aside.rename(folder)
    except OSError:
        if replaced.exists():
            replaced.rename(folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
