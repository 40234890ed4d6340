"""Opens the trackers of `track.to`: ours by their names, or the user's own.

`parts.py` checks them before a run starts, and `trainer.py` opens them with the run directory. Guarantee: a tracker
that cannot start is logged and left out, because training is more important than any tracker.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sortedrl.config.plug_points import TRACKER
from sortedrl.errors import ConfigError
from sortedrl.external.extras import extra_message
from sortedrl.external.plugins import name_of
from sortedrl.telemetry.metrics import RunMetrics
from sortedrl.telemetry.trackers import OwnTrackerSink, TensorBoardSink, TrackerSink, TrackSettings, WandbSink

log = logging.getLogger(__name__)

_INSTALLED = ("tensorboard", "wandb")
"""Trackers that need a package of their name; the extra of this package has the same name too."""


def _chosen(trackers: Sequence[Any]) -> list[Any]:
    """The trackers to open: `all` stands for the installed ones, `none` for no tracker."""
    if len(trackers) > 1 and (alone := [name for name in trackers if name in ("all", "none")]):
        raise ConfigError(f"track.to has {alone[0]} beside others: write it alone, or remove it")
    if "all" in trackers:
        return [name for name in _INSTALLED if find_spec(name) is not None]
    return [tracker for tracker in trackers if tracker != "none"]


def check_trackers(trackers: Sequence[Any]) -> None:
    """Raise ConfigError for a tracker whose package is not installed, or that cannot be found."""
    for name in _chosen(trackers):
        if name not in _INSTALLED:
            TRACKER.find(name)
        elif find_spec(name) is None:
            raise ConfigError(extra_message(f"track.to = {name}", name))


def open_trackers(
    trackers: Sequence[Any], run_dir: Path, metrics: RunMetrics, settings: TrackSettings
) -> list[TrackerSink]:
    """Return the chosen trackers, without those that cannot start; they are logged."""
    opened: list[TrackerSink] = []
    for chosen in _chosen(trackers):
        try:
            opened.append(_open(chosen, run_dir, metrics, settings))
        except Exception as error:
            name, kind = name_of(chosen), type(error).__name__
            log.warning("%s cannot start (%s: %s); training continues without it", name, kind, error)
    return opened


def _open(name: Any, run_dir: Path, metrics: RunMetrics, settings: TrackSettings) -> TrackerSink:
    match name:
        case "tensorboard":
            return TensorBoardSink(run_dir / "tensorboard", metrics)
        case "wandb":
            return WandbSink(run_dir, metrics, settings)
        case _:
            return OwnTrackerSink(TRACKER.make(name, "(run_dir, settings)", run_dir, settings), metrics)
