"""`sortedrl doctor`: what this machine can run, and whether a configuration is sound, before anything is trained."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from sortedrl.config import SortedConfig
from sortedrl.errors import SortedRLError


@dataclass(slots=True, kw_only=True, frozen=True)
class Finding:
    name: str
    text: str
    is_fine: bool = True

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def examine(config_path: Path | None = None) -> list[Finding]:
    """Everything worth knowing, in the order in which a run would trip over it."""
    findings = [
        Finding(name="python", text=platform.python_version(), is_fine=sys.version_info >= (3, 11)),
        *(_package(name) for name in ("torch", "transformers", "tokenizers", "safetensors")),
        _devices(),
        Finding(name="engine local", text="in process, float32: exact replay"),
        _disk(Path("runs")),
    ]
    return findings if config_path is None else [*findings, *_configuration(config_path)]


def _package(name: str) -> Finding:
    try:
        return Finding(name=name, text=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name=name, text=f"missing: pip install {name}", is_fine=False)


def _devices() -> Finding:
    import torch

    accelerator = (
        "CUDA" if torch.cuda.is_available() else "MPS" if torch.backends.mps.is_available() else "no accelerator"
    )
    return Finding(name="devices", text=f"{os.cpu_count()} CPU cores, {accelerator}; the local engine runs on the CPU")


def _disk(folder: Path) -> Finding:
    there = folder if folder.exists() else Path()
    free = shutil.disk_usage(there).free / 2**30
    text = f"{free:.1f} GiB free for {folder}/" if free >= 1 else f"only {free:.2f} GiB free for {folder}/: make room"
    return Finding(name="disk", text=text, is_fine=free >= 1)


def _configuration(path: Path) -> list[Finding]:
    try:
        config = SortedConfig.load(path)
        knobs = config.knobs
    except SortedRLError as error:
        return [Finding(name="config", text=str(error), is_fine=False)]
    bound = "no bound" if knobs.cohort_updates is None else f"{knobs.cohort_updates} updates"
    staleness = "unbounded" if knobs.max_staleness is None else knobs.max_staleness
    findings = [
        Finding(
            name="config",
            text=f"{path}: {config.schedule.strategy}, {config.slots} slots, update batch {knobs.update_batch}, "
            f"cohorts of {knobs.cohort_samples} consumed within {bound}, staleness {staleness}",
        )
    ]
    from sortedrl.build import build_engine, build_task, load_model, model_path

    try:
        build_task(config)
    except SortedRLError as error:
        return [*findings, Finding(name="task", text=str(error), is_fine=False)]
    try:
        model, tokenizer = load_model(model_path(config))
        build_engine(config, model, knobs)
    except SortedRLError as error:
        return [*findings, Finding(name="model", text=str(error), is_fine=False)]
    size = sum(parameter.numel() for parameter in model.parameters())
    text = f"{config.model.path}: {size:,} parameters, vocabulary {len(tokenizer):,}, fits the engine"
    return [*findings, Finding(name="model", text=text)]


def findings_table(findings: list[Finding]) -> Table:
    table = Table("", "check", "finding", box=None)
    for finding in findings:
        table.add_row("[green]ok[/]" if finding.is_fine else "[red]no[/]", escape(finding.name), escape(finding.text))
    return table
