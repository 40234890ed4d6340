"""`sortedrl doctor`: report what this machine can run, and check a configuration before training.

The command line calls `examine` and prints `findings_table`, or the findings as JSON.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from sortedrl.config import SortedConfig
from sortedrl.config.needs import check_extras, needed_extras
from sortedrl.engine.vllm.core import check_installed, vllm_version
from sortedrl.errors import DataError, EngineError, SortedRLError
from sortedrl.external.extras import MODULES, extra_message, has_extra
from sortedrl.external.hub import is_offline, is_repo_id


@dataclass(slots=True, kw_only=True, frozen=True)
class Finding:
    """`is_fine` False: a run would fail. `is_here` False: something optional that this machine does not have."""

    name: str
    text: str
    is_fine: bool = True
    is_here: bool = True


@dataclass(slots=True, kw_only=True, frozen=True)
class Target:
    """Where the run is planned: accelerators by the name of their preset; None means this machine."""

    hardware: str | None = None
    devices: int = 1
    from_run: Path | None = None  # an earlier run, from which times are estimated


def examine(config_path: Path | None = None, target: Target | None = None) -> list[Finding]:
    """All findings, in the order in which a run would fail on them."""
    findings = [
        Finding(name="python", text=platform.python_version(), is_fine=sys.version_info >= (3, 11)),
        *(_package(name) for name in ("torch", "transformers", "tokenizers", "safetensors")),
        Finding(name="processors", text=f"{os.cpu_count()} CPU cores"),
        _accelerator(),
        _local(),
        _vllm(),
        _extras(),
        _disk(Path("runs")),
    ]
    return findings if config_path is None else [*findings, *_configuration(config_path, target or Target())]


def _package(name: str) -> Finding:
    try:
        return Finding(name=name, text=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name=name, text=f"missing: pip install {name}", is_fine=False)


def _accelerator() -> Finding:
    import torch

    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    kind = "CUDA" if has_cuda else "MPS"
    text = f"{kind}; the local engine runs on the CPU" if has_cuda or has_mps else "no GPU: everything runs on the CPU"
    return Finding(name="accelerator", text=text, is_here=has_cuda or has_mps)


def _local() -> Finding:
    """Whether Llama models run on the compiled kernel, and the dtype that `engine.dtype = auto` gives large ones."""
    from sortedrl.engine.local.decoder_choice import fast_dtype
    from sortedrl.native.kernel import load_kernel

    is_compiled = load_kernel() is not None
    large = str(fast_dtype(is_compiled=is_compiled)).removeprefix("torch.")
    how = "compiled" if is_compiled else "on torch (no C compiler: small models at half the speed)"
    return Finding(name="engine local", text=f"in process, {how}; float32, large models of the Llama family {large}")


def _vllm() -> Finding:
    """Whether vLLM works. It is optional, so its absence is fine."""
    version = vllm_version()
    if version is None:
        return Finding(name="engine vllm", text=extra_message("engine.kind = vllm", "vllm"), is_here=False)
    try:
        check_installed()
    except EngineError as error:
        return Finding(name="engine vllm", text=str(error), is_fine=False)
    return Finding(name="engine vllm", text=f"vLLM {version}: engine=vllm; exact replay with engine.dtype = float32")


def _extras() -> Finding:
    """Which optional packages are installed; vLLM has a line of its own."""
    missing = [extra for extra in MODULES if extra != "vllm" and not has_extra(extra)]
    if not missing:
        return Finding(name="extras", text="all installed")
    names = ", ".join(missing)
    return Finding(name="extras", text=f"without {names}: pip install 'sortedrl[EXTRA]' adds one", is_here=False)


def _disk(folder: Path) -> Finding:
    there = folder if folder.exists() else Path()
    free = shutil.disk_usage(there).free / 2**30
    if free < 1:
        return Finding(name="disk", text=f"only {free:.2f} GiB free for {folder}/: free some space", is_fine=False)
    return Finding(name="disk", text=f"{free:.1f} GiB free for {folder}/")


def _configuration(path: Path, target: Target) -> list[Finding]:
    try:
        config = SortedConfig.load(path)
        config.check_startable()
        knobs = config.knobs
    except SortedRLError as error:
        return [Finding(name="config", text=str(error), is_fine=False)]
    bound = "no bound" if knobs.cohort_updates is None else f"{knobs.cohort_updates} updates"
    staleness = "unbounded" if knobs.max_staleness is None else knobs.max_staleness
    findings = [
        Finding(
            name="config",
            text=f"{path}: {config.strategy_name}, {config.slots} slots, update batch {knobs.update_batch}, "
            f"cohorts of {knobs.cohort_samples} consumed within {bound}, staleness {staleness}",
        )
    ]
    if target.hardware is None:
        try:
            check_extras(config, skip={"vllm"})  # `_model` checks its version too
        except SortedRLError as error:
            return [*findings, Finding(name="needed extras", text=str(error), is_fine=False)]
    task = _task(config, target)
    findings += [] if task is None else [task]
    if task is not None and not task.is_fine:
        return findings
    needs = [*_ranks(config, target), *_needs(config, target)]
    if any(not need.is_fine for need in needs):  # do not load a model that does not fit
        return [*findings, *needs]
    return [*findings, _model(config, target), *needs]


def _task(config: SortedConfig, target: Target) -> Finding | None:
    """What is wrong with the task. What only this machine lacks is no fault if another one is planned."""
    from sortedrl.run.builders.parts import build_task

    missing = [extra for extra in needed_extras(config) if extra in ("data", "gym", "math") and not has_extra(extra)]
    if target.hardware is not None and missing:
        text = f"not checked, because the extras {', '.join(missing)} are not installed here"
        return Finding(name="task", text=text, is_here=False)
    try:
        build_task(config)
    except DataError as error:
        if target.hardware is None:
            return Finding(name="task", text=str(error), is_fine=False)
        return Finding(name="task", text=f"{config.task.path}: not on this machine, so not checked", is_here=False)
    except SortedRLError as error:
        return Finding(name="task", text=str(error), is_fine=False)
    return None


def _model(config: SortedConfig, target: Target) -> Finding:
    from sortedrl.run.builders.engine import load_vllm_engine
    from sortedrl.run.builders.parts import build_engine, load_model, model_path_here

    try:
        folder = model_path_here(config)
        if folder is None and target.hardware is not None:
            text = f"{config.model.path}: not on this machine, so not checked"
            return Finding(name="model", text=text, is_here=False)
        if folder is None and is_repo_id(config.model.path):
            name = config.model.path
            text = f"{name!r} is not a folder and not in the cache of the hub, so not checked: hf download {name}"
            return Finding(name="model", text=text, is_fine=not is_offline(), is_here=False)
        model, tokenizer = load_model(folder or config.model.path)
        if config.engine.kind == "vllm":
            if not config.engine.address:
                check_installed()  # checks the installation only: starting vLLM takes a minute
            load_vllm_engine()
        else:
            build_engine(config, model, config.knobs)
    except SortedRLError as error:
        return Finding(name="model", text=str(error), is_fine=False)
    size = sum(parameter.numel() for parameter in model.parameters())
    text = f"{config.model.path}: {size:,} parameters, vocabulary {len(tokenizer):,}, fits the engine"
    return Finding(name="model", text=text)


def _ranks(config: SortedConfig, target: Target) -> list[Finding]:
    """Whether the libraries for a learner with several ranks are there; no finding for one rank."""
    if not config.has_rank_actors:
        return []
    import torch.distributed as dist

    backend = "nccl" if config.rank_gpus else "gloo"
    together = config.context_parallel
    text = f"{config.num_ranks}, over {backend}" + (f", {together} together on a micro-batch" if together > 1 else "")
    if target.hardware is not None:
        is_fine = True  # another machine is planned
    elif importlib.util.find_spec("ray") is None:
        text, is_fine = f"{text}: Ray is missing: pip install 'sortedrl[ray]'", False
    else:
        is_fine = dist.is_available() and (dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available())
        text += "" if is_fine else f": this torch has no {backend}: install a build that has it"
    return [Finding(name="ranks", text=text, is_fine=is_fine)]


def _needs(config: SortedConfig, target: Target) -> list[Finding]:
    """Memory and time; no finding if the model folder is missing, which `_model` reports."""
    from sortedrl.run.builders.parts import model_path_here
    from sortedrl.run.estimate import estimate_run

    try:
        folder = model_path_here(config)
        if target.hardware is None and folder is None:
            return []
        there = folder or Path(config.model.path)
        estimate = estimate_run(
            config, there, hardware=target.hardware, devices=target.devices, from_run=target.from_run
        )
    except SortedRLError as error:
        return [Finding(name="estimate", text=str(error), is_fine=False)]
    text = estimate.placement_text
    placement = [Finding(name="placement", text=text, is_fine=estimate.is_placed)] if text else []
    return [
        *placement,
        Finding(name="memory", text=estimate.memory_text, is_fine=estimate.fits),
        Finding(name="time", text=estimate.time_text),
    ]


def findings_table(findings: list[Finding]) -> Table:
    """Three marks: ok, `no` for what makes a run fail, and `-` for what is not here and not needed."""
    table = Table("", "check", "finding", box=None)
    for finding in findings:
        mark = "[red]no[/]" if not finding.is_fine else "[green]ok[/]" if finding.is_here else "[yellow]-[/]"
        table.add_row(mark, escape(finding.name), escape(finding.text))
    return table
