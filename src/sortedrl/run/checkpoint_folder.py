"""Checkpoints: model folders that transformers can load, with the further state that training needs.

`RunSaver` saves through `Checkpoints`, which keeps one folder per version; supervised fine-tuning calls
`save_checkpoint`. Tensors are safetensors files and all else is JSON, so that loading a checkpoint runs no code of it.
A model with adapters is saved twice: merged, as any other model, and the adapters alone in a folder beside it. Ranks
write weights and optimizer state as shards instead (`sharded_checkpoint.py`); all functions here read both layouts.

Guarantees: a folder appears under its name only when it is complete, because it is written under another name,
described by a manifest, synced to disk and then renamed; if the process is killed at any moment, `latest` still finds
a whole checkpoint if there was one before; weights that are not finite are never saved. Only the process that holds
the run's lock may write.
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
from typing import Any, Protocol, runtime_checkable

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sortedrl.errors import ConfigError, RunDirError, SortedRLError
from sortedrl.learner.finite_weights import check_weights
from sortedrl.learner.lora import save_adapted
from sortedrl.learner.model import load_model, no_progress_bars
from sortedrl.learner.sharded.shard_files import OPTIMIZER, SHARDS_FOLDER, read_shards
from sortedrl.run.atomic_folder import parse_temporary, remove, written_whole
from sortedrl.run.manifest import find_damage, num_bytes, write_manifest
from sortedrl.run.saved_run import SCHEMA_VERSION, SHARDED, STATE_FILE, WHOLE, read_state
from sortedrl.weights import is_adapted

__all__ = ["Checkpoints", "HasState", "load_model", "load_state", "save_checkpoint"]

OPTIMIZER_FILE = "optimizer.safetensors"

log = logging.getLogger(__name__)


class HasState(Protocol):
    """A learner whose state has tensors by name under "optimizer", and JSON values under all other keys."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class _LoadsShards(Protocol):
    """A learner whose ranks each read their own shards."""

    def load_shards(self, folder: Path, state: dict[str, Any], /) -> None: ...


def save_checkpoint(
    folder: str | Path,
    model: Any,
    tokenizer: Any,
    *,
    learner: HasState | None = None,
    extra: dict[str, Any] | None = None,
    add: Callable[[Path], object] | None = None,
) -> Path:
    """Write model, tokenizer, optimiser and `extra` (JSON values) to `folder`, replacing an existing checkpoint.

    `add` is called with the temporary folder, and may write further files to it. Raises LearnerError before anything is
    written if the trained weights are not finite.
    """
    folder = Path(folder)
    check_weights(f"the weights to save as {folder}", model.named_parameters())
    with writing(folder), written_whole(folder) as temporary:
        with no_progress_bars():
            if is_adapted(model):
                save_adapted(model, temporary)
            else:
                model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        write_state(temporary, learner.state_dict() if learner is not None else {}, extra or {})
        if add is not None:
            add(temporary)
        write_manifest(temporary)
    return folder


def load_state(folder: str | Path, learner: HasState | None = None) -> dict[str, Any]:
    """Load a checkpoint's state into a learner, if one is given, and return its `extra`."""
    folder = Path(folder)
    _require(folder, STATE_FILE)
    try:
        state = read_state(folder)
        is_sharded = state["layout"] == SHARDED
        if learner is not None and not is_sharded:
            _require(folder, OPTIMIZER_FILE)
            learner.load_state_dict({"optimizer": load_file(folder / OPTIMIZER_FILE), **state["learner"]})
        elif isinstance(learner, _LoadsShards):
            learner.load_shards(folder / SHARDS_FOLDER, state["learner"])
        elif learner is not None:
            tensors = read_shards(folder / SHARDS_FOLDER, OPTIMIZER)
            learner.load_state_dict({"optimizer": tensors, **state["learner"]})
        return state["extra"]
    except (json.JSONDecodeError, SafetensorError, KeyError, TypeError) as error:
        raise RunDirError(f"the state in {folder} is damaged ({error}): resume from another checkpoint") from error


def _require(folder: Path, name: str) -> None:
    if not (folder / name).is_file():
        raise RunDirError(f"{folder} has no {name}: give a folder that save_checkpoint wrote for a learner")


class Checkpoints:
    """The checkpoints of one run in `folder`/<version>/. Keeps the newest `keep` of them (None: all).

    `latest` only reads, so other processes may call it while the run goes on.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(f"checkpoint.keep cannot be {keep}: keep at least 1, or None for all")
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
        """Save as `save_checkpoint` does; then remove older checkpoints beyond `keep`, and all later versions.

        Later versions come from training that was abandoned when the run was resumed from an earlier checkpoint.
        """
        folder = self.prepare(version, model, has_learner=learner is not None)
        save_checkpoint(folder, model, tokenizer, learner=learner, extra=extra, add=add)
        self.drop_others(version)
        return folder

    def prepare(self, version: int, model: Any, *, has_learner: bool) -> Path:
        """Make room for a checkpoint of this version; returns its folder, which is not made yet."""
        assert version >= 0, f"version {version} is negative"
        folder = self.folder / str(version)
        with writing(folder):
            self._clean()
            self._prune()  # `keep` may be smaller than before; this frees space
            self._check_space(folder, model, has_learner=has_learner)
        return folder

    def drop_others(self, version: int) -> None:
        """Now that `version` is saved, remove older checkpoints beyond `keep`, and all later versions."""
        self.drop_after(version)
        self._prune()

    def versions(self) -> list[int]:
        """All saved versions, whole or damaged, in ascending order."""
        return sorted(int(entry.name) for entry in self._entries() if _is_version(entry.name))

    def latest(self) -> Path | None:
        """The newest whole checkpoint; None if none was saved. Logs a warning for each damaged one that it skips."""
        damaged: list[str] = []
        for _, folder in self._candidates():
            damage = find_damage(folder, required=(STATE_FILE,))
            if damage is None:
                for what in damaged:
                    log.warning("checkpoint %s is damaged: using %s instead", what, folder)
                return folder
            if not os.path.lexists(folder):  # removed meanwhile by a running process, which has saved a later one
                return self.latest()
            damaged.append(f"{folder} ({damage})")
        if damaged:
            raise RunDirError(
                f"every checkpoint is damaged: {', '.join(damaged)}; restore one from a copy, or start a new run"
            )
        return None

    def drop_after(self, version: int) -> None:
        """Remove all checkpoints after `version`, from which training continues."""
        for later, folder in self._candidates():
            if later > version:
                log.info("removed checkpoint %s: training continues from an earlier one", folder)
                remove(folder)

    def _entries(self) -> list[Path]:
        if self.folder.is_symlink():
            raise RunDirError(f"{self.folder} is a symbolic link: use a folder, or another disk with run.dir=PATH")
        try:
            return list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunDirError(f"{self.folder} cannot be read ({error.strerror}): check its permissions") from error

    def _candidates(self) -> list[tuple[int, Path]]:
        """Versions and folders, newest first; a folder that was renamed to be replaced comes after its replacement."""
        found: list[tuple[int, bool, Path]] = []
        for entry in self._entries():
            if _is_version(entry.name):
                found.append((int(entry.name), True, entry))
            elif (temporary := parse_temporary(entry)) and temporary[1] == "replaced" and _is_version(temporary[0]):
                found.append((int(temporary[0]), False, entry))
        return [(version, entry) for version, _, entry in sorted(found, reverse=True)]

    def _prune(self) -> None:
        for old in self.versions()[: -self.keep] if self.keep is not None else []:
            remove(self.folder / str(old))

    def _clean(self) -> None:
        """Remove temporary folders of killed processes; one that was renamed but never replaced gets its name back."""
        for entry in self._entries():
            if (temporary := parse_temporary(entry)) is None:
                continue
            name, why = temporary
            if why == "replaced" and not (self.folder / name).exists():
                entry.rename(self.folder / name)
            else:
                remove(entry)

    def _check_space(self, folder: Path, model: Any, *, has_learner: bool) -> None:
        """Raise before anything is written if the disk is too small: a full disk would also stop other programs."""
        weights = [(parameter.nbytes, parameter.requires_grad) for parameter in model.parameters()]
        # Adam keeps two moments for each trained parameter.
        needed = sum(size * (3 if has_learner and is_trained else 1) for size, is_trained in weights)
        if earlier := self.versions():
            needed = max(needed, num_bytes(self.folder / str(earlier[-1])))
        there = next(path for path in folder.absolute().parents if path.exists())
        free = shutil.disk_usage(there).free
        if free < needed:
            raise RunDirError(
                f"checkpoint {folder} needs about {_size(needed)} and the disk has {_size(free)} free: "
                "free some space, lower checkpoint.keep, or use another disk with run.dir=PATH"
            )


def _is_version(name: str) -> bool:
    return re.fullmatch(r"0|[1-9][0-9]{0,17}", name) is not None


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn the libraries' write errors into a RunDirError that names the remedy."""
    try:
        yield
    except SortedRLError:
        raise
    except Exception as error:
        # The tokenizers library raises plain `Exception`; other types are programming errors.
        if not isinstance(error, OSError | SafetensorError | sqlite3.Error) and type(error) is not Exception:
            raise
        why = " ".join(str(error).split())
        raise RunDirError(
            f"checkpoint {folder} cannot be written ({why}): free some space or check permissions; others are intact"
        ) from error


def write_state(folder: Path, state: dict[str, Any], extra: dict[str, Any], layout: str = WHOLE) -> None:
    """Write the state of a learner, its tensors apart, and that of the run."""
    tensors: dict[str, Tensor] | None = state.pop("optimizer", None)
    if tensors is not None:
        save_file(
            {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, folder / OPTIMIZER_FILE
        )
    document = {"schema_version": SCHEMA_VERSION, "layout": layout, "learner": state or None, "extra": extra}
    (folder / STATE_FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")


def _size(num: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num < 1000:
            return f"{num:.3g} {unit}"
        num /= 1000
    return f"{num:.3g} TB"
