"""The places of a configuration that take the user's own objects, and how a strategy is found.

`POINTS` lists all of them; docs/reference/plug_points.md shows the table. `config.py` checks the names, the parts of
the package that use an object load it (`external/plugins.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sortedrl.external.plugins import PlugPoint, lacking
from sortedrl.learner.algorithms import ADVANTAGE, ALGORITHM
from sortedrl.schedule import DECISIONS, PRESETS, Schedule, Strategy

ENGINE = PlugPoint(
    key="engine.kind",
    noun="engine",
    argument="engine",
    group="sortedrl.engines",
    names=("local", "vllm"),
    page="docs/guides/own_engine.md",
    fault=lambda found: lacking(found, ("capabilities", "submit", "poll", "interrupt", "publish", "stats", "close")),
    is_made=True,
)
STRATEGY = PlugPoint(
    key="schedule.strategy",
    noun="strategy",
    argument="strategy",
    group="sortedrl.strategies",
    names=tuple(Strategy),
    page="docs/guides/own_strategy.md",
    fault=lambda found: "" if isinstance(found, Mapping) else lacking(found, ("knobs", *DECISIONS)),
    is_made=True,
)
TASK = PlugPoint(
    key="task.name",
    noun="task",
    argument="task",
    group="sortedrl.tasks",
    names=("knights", "logic", "counting", "tools", "math", "dataset", "reasoning_gym:NAME"),
    page="docs/guides/own_task.md",
    fault=lambda found: lacking(found, ("name", "train", "reward_funcs", "group_column", "heldout")),
    is_made=True,
)
TRACKER = PlugPoint(
    key="track.to",
    noun="tracker",
    argument="trackers",
    group="sortedrl.trackers",
    names=("tensorboard", "wandb", "all", "none"),
    page="docs/guides/own_tracker.md",
    fault=lambda found: lacking(found, ("write", "close")),
    is_made=True,
)
ENVIRONMENT = PlugPoint(
    key="environment.factory",
    noun="environment",
    argument="environment_factory",
    group="sortedrl.environments",
    names=("none",),
    page="docs/guides/own_environment.md",
    fault=lambda found: "" if callable(found) else "it cannot be called to make an object",
)
POINTS = (ENGINE, ALGORITHM, ADVANTAGE, STRATEGY, TASK, TRACKER, ENVIRONMENT)


def preset_of(strategy: Any) -> Mapping[str, Any]:
    """The knobs that define a strategy."""
    if isinstance(strategy, str) and strategy in STRATEGY.names:
        return PRESETS[Strategy(strategy)]
    found = STRATEGY.make(strategy)
    return found if isinstance(found, Mapping) else found.knobs


def own_schedule(strategy: Any) -> Schedule | None:
    """The decisions of a strategy; None if they are ours."""
    if isinstance(strategy, str) and strategy in STRATEGY.names:
        return None
    found = STRATEGY.make(strategy)
    return None if isinstance(found, Mapping) else found
