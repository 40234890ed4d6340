"""What a run directory says about its run, read before anything is loaded.

The trainer asks first when it resumes, so that a finished run or a refused setting is told at once. `checkpoint_folder`
reads the state of a checkpoint through it. This module does not import torch.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from sortedrl.config import SortedConfig
from sortedrl.errors import RunDirError
from sortedrl.ledger.compare import is_as_copied
from sortedrl.ledger.reader import FILE_NAME as LEDGER_FILE
from sortedrl.run.manifest import find_damage
from sortedrl.telemetry.summary import Summary

STATE_FILE = "learner_state.json"
SCHEMA_VERSION = 2  # 1 had no `layout`: all its checkpoints are whole
WHOLE, SHARDED = "whole", "sharded"  # layouts of a checkpoint


def read_state(folder: Path) -> dict[str, Any]:
    """The JSON state of a checkpoint: that of the learner (`learner`) and of the run (`extra`), and its `layout`."""
    state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    version = state["schema_version"]
    if version == 1:
        state["layout"] = WHOLE
    elif version != SCHEMA_VERSION:
        raise RunDirError(
            f"{folder} has state of version {version}, this sortedrl reads 1 to {SCHEMA_VERSION}: use the version that "
            "wrote it"
        )
    if state["layout"] not in (WHOLE, SHARDED):
        raise RunDirError(f"{folder} has the unknown layout {state['layout']!r}: use the sortedrl that wrote it")
    return state


def saved_settings(run_dir: Path, given: SortedConfig) -> dict[str, dict[str, Any]]:
    """The settings of the newest checkpoint that can be read; without one, those of config.toml.

    The checkpoint comes first, because the file may have been edited since. `given` brings the objects that the file
    names.
    """
    path = run_dir / "config.toml"
    if not path.is_file():
        raise RunDirError(f"{run_dir} holds no run to resume: it has no config.toml")
    for folder in _checkpoints(run_dir):
        try:
            settings = read_state(folder)["extra"]["config"]
        except (OSError, ValueError, LookupError, TypeError):  # the checkpoints are examined when one is loaded
            continue
        if isinstance(settings, dict):
            return settings
    return SortedConfig.load(path, given=given).resolved()


def find_result(run_dir: Path, config: SortedConfig) -> Summary | None:
    """The summary of a run that has trained all samples of its configuration; None if it has not.

    A run whose last checkpoint or ledger is damaged is not complete: resuming repeats what was lost.
    """
    path, newest = run_dir / "summary.json", next(iter(_checkpoints(run_dir)), None)
    if not path.is_file() or (newest is not None and not _is_sound(run_dir, newest)):
        return None
    try:
        summary = Summary.read(path)
    except RunDirError:  # resuming writes it anew
        return None
    return summary if summary.status == "complete" and summary.samples >= config.run.samples else None


def _is_sound(run_dir: Path, checkpoint: Path) -> bool:
    """Whether a checkpoint is undamaged, and the ledger of its run too."""
    if find_damage(checkpoint, required=(STATE_FILE,)):
        return False
    copy = checkpoint / LEDGER_FILE
    return not copy.is_file() or is_as_copied(run_dir / LEDGER_FILE, copy, read_state(checkpoint)["extra"]["seq"])


def how_to_extend(run_dir: Path, summary: Summary) -> str:
    """A line that says that the run is complete, and how to train it further."""
    done = f"{run_dir} is complete: {summary.samples:,} samples are trained"
    if not _checkpoints(run_dir):
        return f"{done}; it kept no checkpoint to train further from"
    more = f"sortedrl train --resume {shlex.quote(str(run_dir))} run.samples={2 * summary.samples}"
    return f"{done}; to train further, raise run.samples: {more}"


def _checkpoints(run_dir: Path) -> list[Path]:
    """The folders of checkpoints, newest first."""
    numbered = [folder for folder in (run_dir / "checkpoints").glob("*") if folder.name.isdecimal()]
    return sorted(numbered, key=lambda folder: int(folder.name), reverse=True)
