"""`report`, `ledger` and `doctor`: what became of a run, and what this machine can run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from sortedrl.cli.app import AsJson, app, err, stdout_console
from sortedrl.errors import ConfigError, ModelError


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    out: Annotated[Path | None, typer.Option(help="HTML file; left out: report.html in the first run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about one or several runs."""
    from sortedrl.telemetry.report import write_report

    columns = (TextColumn("reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, disable=as_json, transient=True) as progress:
        bar = progress.add_task("report", total=None)
        target = out or runs[0] / "report.html"
        path = write_report(runs, target, tell=lambda at, all_: progress.update(bar, completed=at, total=all_))
    print(json.dumps({"report": str(path)})) if as_json else err.print(f"report: {path}", highlight=False)


@app.command()
def ledger(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or its ledger.sqlite.")],
    verify: Annotated[bool, typer.Option("--verify", help="Prove the invariants from the file alone.")] = False,
    sample: Annotated[int | None, typer.Option(min=0, help="Tell the life of one sample.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what became of every sample of RUN; exit code 1 if the file breaks an invariant."""
    from sortedrl.ledger.command import ledger_command

    out = stdout_console()
    decode = None if sample is None or as_json else answer_decoder(run)
    code = ledger_command(run, verify=verify, sample=sample, console=out, as_json=as_json, decode=decode)
    raise typer.Exit(code)


def answer_decoder(run: Path) -> Callable[[list[int]], str] | None:
    """How the run's tokenizer spells tokens: that of its last checkpoint, or of the model that it started from."""
    from sortedrl.build import model_path
    from sortedrl.config import SortedConfig
    from sortedrl.learner.checkpoint import Checkpoints
    from sortedrl.learner.model import check_model_folder, load_tokenizer

    run = run if run.is_dir() else run.parent
    folder = Checkpoints(run / "checkpoints").latest()
    try:
        if folder is None:
            folder = check_model_folder(model_path(SortedConfig.load(run / "config.toml", [])))
        return load_tokenizer(folder).decode
    except (ConfigError, ModelError):
        return None  # token numbers tell something too


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(help="A configuration to check.")] = None, as_json: AsJson = False
) -> None:
    """Say what this machine can run, and whether CONFIG is sound."""
    from sortedrl.doctor import examine, findings_table

    findings = examine(config)
    if as_json:
        print(json.dumps({"findings": [finding.as_dict() for finding in findings]}))
    else:
        Console().print(findings_table(findings))
    if any(not finding.is_fine for finding in findings):
        raise typer.Exit(2)
