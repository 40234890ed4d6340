"""Weights that leave a run directory: a folder that `from_pretrained` loads, with a model card.

`sortedrl export` copies them from a checkpoint with `export_run`; `SortedTrainer` writes those in memory with
`save_weights`. Guarantees: a folder of `export_run` is complete or absent, and replaces another only if that is asked
for and the other holds a model too; damaged checkpoints are refused.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError, RunDirError
from sortedrl.learner.finite_weights import check_weights
from sortedrl.learner.lora import ADAPTER_FOLDER
from sortedrl.learner.model import has_shards, load_model
from sortedrl.run.atomic_folder import written_whole
from sortedrl.run.checkpoint_folder import Checkpoints, load_state
from sortedrl.run.manifest import MANIFEST_FILE, find_damage
from sortedrl.run.model_card import CARD_FILE, RunFacts, write_card
from sortedrl.telemetry.summary import Summary
from sortedrl.weights import is_adapted, merged_copy, no_progress_bars

_MODEL_FILES = ("config.json", "adapter_config.json")  # a folder with one of them holds a model or adapters
_WEIGHT_FILES = ("config.json", "generation_config.json", "model*")  # all others are the tokenizer's
_STATE_FILES = ("optimizer*", "learner_state.json", "ledger.sqlite*", MANIFEST_FILE, CARD_FILE)


@dataclass(slots=True, kw_only=True, frozen=True)
class Exported:
    folder: Path
    version: int
    is_adapter: bool
    files: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.folder),
            "version": self.version,
            "weights": "adapter" if self.is_adapter else "whole",
            "files": self.files,
        }


def export_run(
    run_dir: Path, to: Path, *, version: int | None = None, is_adapter: bool = False, overwrite: bool = False
) -> Exported:
    """Copy the weights and the tokenizer of a run's checkpoint (the last, or that of `version`) to the folder `to`."""
    checkpoint = _find_checkpoint(run_dir, version)
    if is_adapter and not (checkpoint / ADAPTER_FOLDER).is_dir():
        raise ConfigError(f"the run in {run_dir} trained all weights and has no adapters: leave out --adapter")
    _check_target(to, run_dir, overwrite=overwrite)
    facts = _read_facts(run_dir, checkpoint)
    try:
        with written_whole(to.resolve()) as temporary:
            left_out = (*_STATE_FILES, *(_WEIGHT_FILES if is_adapter else ()))
            for path in checkpoint.iterdir():
                if path.is_file() and not any(path.match(pattern) for pattern in left_out):
                    shutil.copyfile(path, temporary / path.name)
            if has_shards(checkpoint):
                with no_progress_bars():
                    load_model(checkpoint)[0].save_pretrained(temporary)
            if is_adapter:
                for path in (checkpoint / ADAPTER_FOLDER).iterdir():
                    shutil.copyfile(path, temporary / path.name)
            write_card(temporary, facts, is_adapter=is_adapter)
            files = sorted(path.name for path in temporary.iterdir())
    except OSError as error:
        if not checkpoint.is_dir():
            raise RunDirError(f"the run has removed checkpoint {checkpoint} meanwhile: export again") from error
        raise RunDirError(
            f"{to} cannot be written: {error.strerror or error}; free some space or choose another folder"
        ) from error
    return Exported(folder=to, version=facts.version, is_adapter=is_adapter, files=files)


def save_weights(model: Any, tokenizer: Any, folder: Path, facts: RunFacts, *, merge: bool) -> None:
    """Save a model in memory, its tokenizer and a card to a folder; of a model with adapters only those, or `merge`."""
    check_weights(f"the weights to save as {folder}", model.named_parameters())
    is_adapter = is_adapted(model) and not merge
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with no_progress_bars():
            if is_adapter:
                model.save_pretrained(folder, safe_serialization=True, save_embedding_layers=False)
            else:
                (merged_copy(model) if is_adapted(model) else model).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_card(folder, facts, is_adapter=is_adapter)
    except OSError as error:
        raise RunDirError(
            f"{folder} cannot be written: {error.strerror or error}; free some space or choose another folder"
        ) from error


def _find_checkpoint(run_dir: Path, version: int | None) -> Path:
    if not (run_dir / "config.toml").is_file():
        raise RunDirError(f"{run_dir} is not the directory of a run: it has no config.toml")
    checkpoints = Checkpoints(run_dir / "checkpoints")
    if version is None:
        latest = checkpoints.latest()
        if latest is None:
            raise RunDirError(f"the run in {run_dir} has no checkpoint yet: let it save one (checkpoint.every_updates)")
        return latest
    there = checkpoints.versions()
    if version not in there:
        known = ", ".join(map(str, there)) or "none"
        raise RunDirError(
            f"the run in {run_dir} has no checkpoint {version}: it has {known}; checkpoint.keep keeps more"
        )
    folder = checkpoints.folder / str(version)
    if damage := find_damage(folder):
        raise RunDirError(f"checkpoint {folder} is damaged ({damage}): export another version")
    return folder


def _check_target(to: Path, run_dir: Path, *, overwrite: bool) -> None:
    """Refuse a target that exists, unless it is empty, or holds a model and may be overwritten."""
    if to.resolve() == run_dir.resolve() or to.resolve() in run_dir.resolve().parents:
        raise ConfigError(f"{to} holds the run: choose another folder")
    if to.exists() and not to.is_dir():
        raise ConfigError(f"{to} is a file: choose another folder")
    if not to.is_dir() or not any(to.iterdir()):
        return
    if not overwrite:
        raise ConfigError(f"{to} is not empty: choose another folder, or replace it with --overwrite")
    if not any((to / name).is_file() for name in _MODEL_FILES):
        raise ConfigError(f"{to} holds no model, so it is not replaced: choose another folder")


def _read_facts(run_dir: Path, checkpoint: Path) -> RunFacts:
    state = load_state(checkpoint)
    try:
        config = SortedConfig(**state["config"])
        summary = run_dir / "summary.json"
        return RunFacts(
            config=config,
            summary=Summary.read(summary) if summary.is_file() else None,
            version=int(state["version"]),
            base_model=state.get("base_model", config.model.path),
            commits=state.get("hub_commits", {}),
            from_python=tuple(state.get("from_python", ())),
        )
    except (KeyError, TypeError, ValueError, json.JSONDecodeError) as error:
        raise RunDirError(f"the state of {checkpoint} cannot be read ({error}): export another version") from error
