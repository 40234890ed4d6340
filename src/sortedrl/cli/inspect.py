"""The commands `report`, `trace`, `ledger` and `doctor`, which read runs, and check a machine and a configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from sortedrl.cli.app import AsJson, OptionalConfigPath, app, err, stdout_console
from sortedrl.errors import ConfigError, ModelError
from sortedrl.reward.worker import printable


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run directories.")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write. Default: report.html in the first run directory.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a self-contained HTML report about one or several runs."""
    from sortedrl.telemetry.report.report import write_report

    columns = (TextColumn("reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, disable=as_json, transient=True) as progress:
        bar = progress.add_task("report", total=None)
        target = out or runs[0] / "report.html"
        path = write_report(
            runs,
            target,
            progress=lambda at, all_: progress.update(bar, completed=at, total=all_),
            find_decode=answer_decoder,
        )
    print(json.dumps({"report": str(path)})) if as_json else err.print(f"report: {path}", highlight=False)


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    perfetto: Annotated[
        Path | None,
        typer.Option(help="Write the events to this file, as a trace for ui.perfetto.dev or chrome://tracing."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how RUN used its slot time and how long each cohort took; optionally write a trace."""
    from sortedrl.telemetry.cohorts import cohort_table
    from sortedrl.telemetry.summary import slot_time_table
    from sortedrl.telemetry.trace import trace_run

    columns = (TextColumn("reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, disable=as_json, transient=True) as progress:
        bar = progress.add_task("trace", total=None)
        found = trace_run(
            run, perfetto=perfetto, progress=lambda at, size: progress.update(bar, completed=at, total=size)
        )
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    for note in found.notes:
        err.print(escape(printable(f"{found.run} {note}")), highlight=False, soft_wrap=True)
    out = stdout_console()
    for table in (slot_time_table([(found.strategy, found.slot_time)]), cohort_table(found.cohorts)):
        if table is not None:
            out.print(table)
    if found.trace is not None:
        err.print(escape(f"trace: {found.trace}"), highlight=False, soft_wrap=True)


@app.command()
def ledger(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or its ledger.sqlite.")],
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check every guarantee from the ledger file, and the counts of summary.json."),
    ] = False,
    sample: Annotated[int | None, typer.Option(min=0, help="Show the history of the sample with this id.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what happened to the samples of RUN.

    The exit code is 1 if --verify finds a broken guarantee or missing rows.
    """
    from sortedrl.ledger.tables import ledger_command

    out = stdout_console()
    decode = None if sample is None or as_json else answer_decoder(run)
    code = ledger_command(run, verify=verify, sample=sample, console=out, as_json=as_json, decode=decode)
    raise typer.Exit(code)


def answer_decoder(run: Path) -> Callable[[list[int]], str] | None:
    """The decode function of the run's tokenizer; None without one.

    It is that of the last checkpoint or of the initial model, or for a run inside another trainer the one it saved.
    """
    from sortedrl.adapters.host_files import TOKENIZER_FOLDER

    run = run if run.is_dir() else run.parent
    if not any((run / name).exists() for name in (TOKENIZER_FOLDER, "checkpoints", "config.toml")):
        return None  # before anything large is imported
    from sortedrl.config import SortedConfig
    from sortedrl.learner.model import check_model_folder, load_tokenizer
    from sortedrl.run.builders.parts import model_path_here
    from sortedrl.run.checkpoint_folder import Checkpoints

    folder = Checkpoints(run / "checkpoints").latest()
    try:
        if (run / TOKENIZER_FOLDER).is_dir():
            return load_tokenizer(run / TOKENIZER_FOLDER).decode
        if folder is None:
            folder = model_path_here(SortedConfig.load(run / "config.toml", []))
        return None if folder is None else load_tokenizer(check_model_folder(folder)).decode
    except (ConfigError, ModelError):
        return None  # the caller shows token ids instead


@app.command()
def doctor(
    config: OptionalConfigPath = None,
    hardware: Annotated[
        str | None, typer.Option(help="Estimate for h100, a100, rtx4090 or cpu instead of this machine.")
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="Number of devices to estimate for.")] = 1,
    from_run: Annotated[
        Path | None, typer.Option(help="Estimate time from the measurements of this finished run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine and CONFIG, and estimate the memory and time that a run will need.

    On GPUs, memory is counted device by device under the placement, by a dry run of the learner without weights.
    """
    from sortedrl.run.doctor import Target, examine, findings_table

    findings = examine(config, Target(hardware=hardware, devices=devices, from_run=from_run))
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}))
    else:
        Console().print(findings_table(findings))
    if any(not finding.is_fine for finding in findings):
        raise typer.Exit(2)
