"""Checkpoints: folders that transformers loads, with what training needs beside the model.

`save_checkpoint` is called between updates. A folder appears under its name complete or not at all: it is written
aside, described by a manifest, flushed to disk, then renamed. Tensors are safetensors and everything else is JSON, so
that loading runs no code of the file's.

A model with adapters is saved twice: merged, as any other, and the adapters alone in a folder of their own.

`Checkpoints` keeps those of one run, each in a folder named for its version. One process writes them, the holder of the
run's lock; whatever moment it is killed at, `latest` finds a whole one if there was one before.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sortedrl.errors import ConfigError, RunDirError, SortedRLError
from sortedrl.learner.lora import save_adapted
from sortedrl.learner.model import load_model, no_progress_bars
from sortedrl.run.atomic_folder import aside_of, remove, written_whole
from sortedrl.run.manifest import find_damage, num_bytes, write_manifest
from sortedrl.weights import is_adapted

__all__ = ["Checkpoints", "HasState", "load_model", "load_state", "save_checkpoint"]

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "learner_state.json"
SCHEMA_VERSION = 1

log = logging.getLogger(__name__)


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
    add: Callable[[Path], object] | None = None,
) -> Path:
    """Write model, tokenizer, optimiser and `extra` (JSON values) to `folder`; what was there is replaced.

    `add` is called with the folder that is being written, to put further files there.
    """
    folder = Path(folder)
    with _writing(folder), written_whole(folder) as aside:
        with no_progress_bars():
            if is_adapted(model):
                save_adapted(model, aside)
            else:
                model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        _write_state(aside, learner.state_dict() if learner is not None else {}, extra or {})
        if add is not None:
            add(aside)
        write_manifest(aside)
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


class Checkpoints:
    """The checkpoints of one run: `folder`/<version>/, of which the `keep` newest stay (None: all).

    `latest` only reads, so that others may ask while a run goes on.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"{keep} checkpoints cannot be kept: keep at least 1, or None for all")
        self.folder = Path(folder)
        self.keep = keep

    def save(
        self,
        version: int,
        model: Any,
        tokenizer: Any,
        *,
        learner: HasState | None = None,
        extra: dict[str, Any] | None = None,
        add: Callable[[Path], object] | None = None,
    ) -> Path:
        """Save as `save_checkpoint` does; once that is in place, remove those that are not to be kept.

        Versions count up. A later one that is there is of a line of training that was left, and is removed too: it
        would otherwise be taken for the newest.
        """
        assert version >= 0, f"version {version} is negative"
        folder = self.folder / str(version)
        with _writing(folder):
            self._clean()
            self._prune()  # fewer may be kept than before: they make room
            self._check_space(folder, model, has_learner=learner is not None)
        save_checkpoint(folder, model, tokenizer, learner=learner, extra=extra, add=add)
        self.drop_after(version)
        self._prune()
        return folder

    def versions(self) -> list[int]:
        """The versions that are there, whole or damaged, in ascending order."""
        return sorted(int(entry.name) for entry in self._entries() if _is_version(entry.name))

    def latest(self) -> Path | None:
        """The newest whole checkpoint; None where none was ever saved. Damaged ones are passed over with a warning."""
        damaged: list[str] = []
        for _, folder in self._candidates():
            damage = find_damage(folder, required=(STATE_FILE,))
            if damage is None:
                for what in damaged:
                    log.warning("checkpoint %s is damaged: using %s instead", what, folder)
                return folder
            if not os.path.lexists(folder):  # removed meanwhile, by a run that goes on and has a later one
                return self.latest()
            damaged.append(f"{folder} ({damage})")
        if damaged:
            raise RunDirError(
                f"no checkpoint is whole: {', '.join(damaged)}; bring one back from a copy, or start a new run"
            )
        return None

    def drop_after(self, version: int) -> None:
        """Forget later checkpoints: training goes on from `version`, and they are of a line that was left."""
        for later, folder in self._candidates():
            if later > version:
                log.info("checkpoint %s is of a line of training that was left: removed", folder)
                remove(folder)

    def _entries(self) -> list[Path]:
        if self.folder.is_symlink():
            raise RunDirError(f"{self.folder} is a symbolic link: use a folder, and run.dir=PATH for another disk")
        try:
            return list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunDirError(f"{self.folder} cannot be read ({error.strerror}): check its permissions") from error

    def _candidates(self) -> list[tuple[int, Path]]:
        """Versions and folders, newest first. One moved away to be replaced counts, behind what was to replace it."""
        found: list[tuple[int, bool, Path]] = []
        for entry in self._entries():
            if _is_version(entry.name):
                found.append((int(entry.name), True, entry))
            elif (aside := aside_of(entry)) and aside[1] == "replaced" and _is_version(aside[0]):
                found.append((int(aside[0]), False, entry))
        return [(version, entry) for version, _, entry in sorted(found, reverse=True)]

    def _prune(self) -> None:
        for old in self.versions()[: -self.keep] if self.keep is not None else []:
            remove(self.folder / str(old))

    def _clean(self) -> None:
        """Clear what killed processes left behind. One that was moved away, but never replaced, is put back."""
        for entry in self._entries():
            if (aside := aside_of(entry)) is None:
                continue
            name, why = aside
            if why == "replaced" and not (self.folder / name).exists():
                entry.rename(self.folder / name)
            else:
                remove(entry)

    def _check_space(self, folder: Path, model: Any, *, has_learner: bool) -> None:
        """Refuse before anything is written: a full disk stops others too."""
        weights = [(parameter.nbytes, parameter.requires_grad) for parameter in model.parameters()]
        # Adam keeps two moments of what is trained.
        needed = sum(size * (3 if has_learner and is_trained else 1) for size, is_trained in weights)
        if earlier := self.versions():
            needed = max(needed, num_bytes(self.folder / str(earlier[-1])))
        there = next(path for path in folder.absolute().parents if path.exists())
        free = shutil.disk_usage(there).free
        if free < needed:
            raise RunDirError(
                f"checkpoint {folder} needs about {_size(needed)} and the disk has {_size(free)} free: "
                "make room, lower checkpoint.keep, or use another disk with run.dir=PATH"
            )


def _is_version(name: str) -> bool:
    return re.fullmatch(r"0|[1-9][0-9]{0,17}", name) is not None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn what the libraries raise when they cannot write into the error that says what to do."""
    try:
        yield
    except SortedRLError:
        raise
    except Exception as error:
        # tokenizers raises bare Exceptions; anything else is a mistake in the program.
        if not isinstance(error, OSError | SafetensorError | sqlite3.Error) and type(error) is not Exception:
            raise
        why = " ".join(str(error).split())
        raise RunDirError(
            f"checkpoint {folder} cannot be written ({why}): make room or check permissions; earlier ones are untouched"
        ) from error


def _write_state(folder: Path, state: dict[str, Any], extra: dict[str, Any]) -> None:
    tensors: dict[str, Tensor] | None = state.pop("optimizer", None)
    if tensors is not None:
        save_file(
            {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, folder / OPTIMIZER_FILE
        )
    document = {"schema_version": SCHEMA_VERSION, "learner": state or None, "extra": extra}
    (folder / STATE_FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")


def _size(num: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num < 1000:
            return f"{num:.3g} {unit}"
        num /= 1000
    return f"{num:.3g} TB"
