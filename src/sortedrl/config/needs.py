"""What a configuration needs besides this package: extras, accelerators, and files of the user.

Commands call `check_extras` before they import torch, so that a missing package is reported at once. The command
`configs` shows what `describe` finds in a shipped configuration.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sortedrl.config.config import SortedConfig
from sortedrl.config.shipped import shipped_path
from sortedrl.external.extras import require_extra
from sortedrl.external.plugins import name_of
from sortedrl.learner.smollm2 import is_converted

SHIPPED_MODELS = {
    "knights-tiny": "",
    "tools-tiny": "",
    "smollm2-135m": "smollm2",
}  # models by name, and the extra that each needs
_PLAIN_ROWS = (".jsonl", ".ndjson", ".json", ".csv")  # read without any extra
_HARDWARE = re.compile(r"--hardware (\w+)(?: --devices (\d+))?")


def needed_extras(config: SortedConfig) -> dict[str, str]:
    """The extras that a run of this configuration needs, each with the setting that needs it."""
    engine, task = config.engine, config.task
    needs: dict[str, str] = {}
    if engine.kind == "vllm" and not engine.address:
        needs["vllm"] = "engine.kind = vllm"
    if engine.own_process and engine.kind != "local":
        needs["ray"] = f"engine.own_process = true with engine.kind = {name_of(engine.kind)}"
    if config.placement.mode is not None and config.has_rank_actors:
        needs["ray"] = f"placement.mode = {config.placement.mode}"
    if engine.own_process and engine.replica_gpus:
        needs["ray"] = f"engine.replica_gpus = {engine.replica_gpus:g}"
    if engine.cluster:
        needs["ray"] = f"engine.cluster = {engine.cluster}"
    if config.num_engines > 1:
        needs["ray"] = f"engine.replicas = {config.num_engines}"
    if config.num_ranks > 1:
        needs["ray"] = f"learner.ranks = {config.num_ranks}"
    if config.lora.rank or config.lora.path:
        needs["lora"] = f"lora.rank = {config.lora.rank}" if config.lora.rank else f"lora.path = {config.lora.path}"
    if extra := SHIPPED_MODELS.get(config.model.path):
        needs[extra] = f"model.path = {config.model.path}"
    task_name = name_of(task.name)
    if task_name.startswith("reasoning_gym:"):
        needs["gym"] = f"task.name = {task_name}"
    if "math" in (name.strip() for name in (task.reward or task_name).split(",")):
        needs["math"] = "task.reward = math" if task.reward else "task.name = math"
    if rows := next((path for path in (task.path, task.eval_path) if _needs_datasets(path)), ""):
        needs["data"] = f"reading {rows}"
    for tracker in config.track.trackers:
        if tracker in ("tensorboard", "wandb"):
            needs[tracker] = f"track.to = {tracker}"
    return needs


def _needs_datasets(path: str) -> bool:
    """Whether rows are read from Parquet without pyarrow, or from the hub because there is no such file or folder."""
    if path.endswith(".parquet"):
        return find_spec("pyarrow") is None
    return bool(path) and not path.endswith(_PLAIN_ROWS) and not Path(path).is_dir()


def check_extras(config: SortedConfig, *, skip: Container[str] = ()) -> None:
    """Raise ConfigError for the first extra that the configuration needs here and that is not installed."""
    for extra, what in needed_extras(config).items():
        if extra in skip:
            continue
        is_elsewhere = extra == "vllm" and config.engine.cluster  # the cluster's machines have vLLM
        if not is_elsewhere and not (extra == "smollm2" and is_converted()):
            require_extra(what, extra)


@dataclass(slots=True, kw_only=True, frozen=True)
class ShippedConfig:
    """One shipped configuration, and what a user must have to run it."""

    name: str
    description: str
    extras: list[str]
    hardware: str  # such as "8 x h100"; empty: any machine
    files: list[str]  # folders and files that do not come with the package

    @property
    def needs(self) -> str:
        """All needs in one line."""
        extras = f"extras {', '.join(self.extras)}" if self.extras else ""
        return "; ".join(filter(None, (extras, self.hardware, ", ".join(self.files)))) or "nothing else"


def describe(name: str) -> ShippedConfig:
    """The description of a shipped configuration: its first comment line, and what its settings need.

    The hardware is that of the `sortedrl doctor` command in its comments.
    """
    path = shipped_path(name)
    text, config = path.read_text(encoding="utf-8"), SortedConfig.load(path)
    hardware = _HARDWARE.search(text)
    paths = [config.model.path, config.task.path, config.task.eval_path]
    return ShippedConfig(
        name=name,
        description=text.splitlines()[0].removeprefix("# "),
        extras=sorted(needed_extras(config)),
        hardware=f"{hardware[2] or 1} x {hardware[1]}" if hardware else "",
        files=[path for path in paths if path and path not in SHIPPED_MODELS],
    )
