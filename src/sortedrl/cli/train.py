"""The commands `train` and `compare`."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from sortedrl.cli.app import RUN_EXTRAS, AsJson, ConfigPath, OptionalConfigPath, Overrides, app, err, stdout_console
from sortedrl.config import SortedConfig
from sortedrl.config.needs import check_extras
from sortedrl.config.plug_points import STRATEGY
from sortedrl.errors import ConfigError, NothingLearnedError, RunDirError
from sortedrl.reward.worker import printable

if TYPE_CHECKING:
    from sortedrl.telemetry.summary import Summary
    from sortedrl.trainer import SortedTrainer

log = logging.getLogger(__name__)

ExitZero = Annotated[
    bool,
    typer.Option(
        "--exit-zero",
        help="Exit with 0 after a signal stopped the run, instead of 129 (SIGHUP), 130 (SIGINT) or 143 (SIGTERM).",
    ),
]


@app.command(epilog=RUN_EXTRAS)
def train(
    config: OptionalConfigPath = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Resume the run in this directory.")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray cluster to use: its address, or auto.")
    ] = None,
    exit_zero: ExitZero = False,
    as_json: AsJson = False,
) -> None:
    """Train a model as CONFIG says.

    The run directory gets events, metrics, ledger, checkpoints, a summary and a report. Ctrl-C, SIGTERM and SIGHUP stop
    the run and save it.
    """
    given = [*(overrides or []), *([] if cluster is None else [f"engine.cluster={cluster}"])]
    settings = _load_config(config, given, resume)
    check_extras(settings)
    from sortedrl.trainer import SortedTrainer

    trainer = SortedTrainer(args=settings, console=err, quiet=as_json)
    with _results_of_alarm(trainer, [], as_json):
        summary = trainer.train(resume=resume is not None)
    is_stopped = summary.status == "stopped"  # a signal may also fall on the last update of a run
    with _exit_after_signal(trainer.stop_signal, is_zero=exit_zero or not is_stopped):
        _print_end(trainer, summary, as_json)


def _print_end(trainer: SortedTrainer, summary: Summary, as_json: bool) -> None:
    _print_summaries([summary], as_json)
    files = {"report": "report.html", "summary": "summary.json", "weights": "checkpoints", "model": "model"}
    paths = {name: trainer.run_dir / file for name, file in files.items()}
    kept = ", ".join(f"{name} {path}" for name, path in paths.items() if path.exists())
    if summary.status == "complete":
        err.print(escape(f"done: {kept}"), highlight=False, soft_wrap=True)
        return
    trained = f"{summary.updates} updates, {summary.samples} samples trained"
    err.print(escape(f"stopped after {trained}; kept: {kept}"), highlight=False, soft_wrap=True)
    if trainer.config.checkpoint.save:
        err.print(escape(f"go on with: {trainer.resume_command}"), highlight=False, soft_wrap=True)


@contextmanager
def _results_of_alarm(trainer: SortedTrainer, before: list[Summary], as_json: bool) -> Iterator[None]:
    """With --json, print the summaries also if the run of the block cannot learn; its error passes through."""
    from sortedrl.telemetry.summary import Summary

    try:
        yield
    except NothingLearnedError:
        if as_json:
            _print_summaries([*before, Summary.read(trainer.run_dir / "summary.json")], as_json)
        raise


@contextmanager
def _exit_after_signal(number: int | None, *, is_zero: bool) -> Iterator[None]:
    """Exit with 128 + the number of the signal, unless `is_zero`, once the block has printed its results.

    The terminal may be gone after SIGHUP. The run is saved, so what cannot be printed is dropped.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError:
        if number is None:
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
    if number is not None and not is_zero:
        raise typer.Exit(128 + number)


def _load_config(config: Path | None, overrides: list[str], resume: Path | None) -> SortedConfig:
    """Read the configuration from its file, or from the directory of the run to resume."""
    if resume is None:
        if config is None:
            raise ConfigError("no configuration is given: name a CONFIG to train, or a run to resume with --resume RUN")
        return SortedConfig.load(config, overrides)
    if config is not None:
        if "=" not in str(config):
            raise ConfigError(
                f"--resume uses the configuration of the run: leave out {config}; only overrides may follow"
            )
        overrides = [str(config), *overrides]
    run_dir = resume.resolve()
    if not (resume / "config.toml").is_file():
        raise RunDirError(f"{resume} holds no run to resume: it has no config.toml; name a run directory")
    settings = SortedConfig.load(resume / "config.toml", overrides)
    is_elsewhere = _enter_start_folder(settings.run.started_in)
    here = run_dir if is_elsewhere or resume.name in ("", "..") else resume
    return settings.moved(here.parent, here.name)  # the directory may have been moved since it was written


def _enter_start_folder(folder: str) -> bool:
    """Change to the folder that a run was started in; returns whether that is another one than the current."""
    if not folder or Path(folder) == Path.cwd():
        return False
    try:
        os.chdir(folder)
    except OSError as error:
        log.warning(
            "the run was started in %s (%s): reward modules and relative paths are looked up in %s; name another with "
            "run.started_in=FOLDER",
            folder,
            error.strerror,
            Path.cwd(),
        )
        return False
    return True


@app.command(epilog=RUN_EXTRAS)
def compare(
    config: ConfigPath,
    overrides: Overrides = None,
    strategies: Annotated[
        str, typer.Option(help="Strategies to compare, separated by commas.")
    ] = "sync,sorted-partial,sorted-replay",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds to train each strategy with.")] = 1,
    exit_zero: ExitZero = False,
    as_json: AsJson = False,
) -> None:
    """Train CONFIG once per strategy and seed, and compare the runs in a table and a report.

    All runs have the same slots, update batch, samples and seeds.
    """
    base = SortedConfig.load(config, overrides or [])
    check_extras(base)
    from sortedrl.cli.inspect import answer_decoder
    from sortedrl.telemetry.report.report import write_report
    from sortedrl.trainer import SortedTrainer

    names = [name.strip() for name in strategies.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--strategies names no strategy: choose from {', '.join(STRATEGY.names)}")
    for name in names:
        STRATEGY.check_name(name)
    configs = [  # all before the first run: an impossible one is refused before time is spent on the others
        base.with_strategy(name, seed=seed, name=f"{base.run.name}-{name}-seed{seed}")
        for seed in range(base.run.seed, base.run.seed + seeds)
        for name in names
    ]
    summaries: list[Summary] = []
    directories: list[Path] = []
    for run in configs:
        trainer = SortedTrainer(args=run, console=err, quiet=as_json)
        if not as_json:
            err.print(f"[bold]{escape(run.run.name)}[/]")
        with _results_of_alarm(trainer, summaries, as_json):
            summaries.append(trainer.train())
        directories.append(trainer.run_dir)
        if trainer.stop_requested and (summaries[-1].status == "stopped" or run is not configs[-1]):
            with _exit_after_signal(trainer.stop_signal, is_zero=exit_zero):
                _print_summaries(summaries, as_json)
            return
    out = Path(base.run.dir) / f"{base.run.name}-compare.html"
    report = write_report(directories, out, find_decode=answer_decoder)
    _print_summaries(summaries, as_json)
    err.print(f"report: {report}", highlight=False)


def _print_summaries(summaries: list[Summary], as_json: bool) -> None:
    from sortedrl.telemetry.summary import (
        comparison_table,
        group_line,
        mean_slot_time,
        slot_time_table,
        summary_table,
        uneven_updates,
    )

    if as_json:
        found: dict[str, object] = {"runs": [summary.model_dump(mode="json") for summary in summaries]}
        if len(summaries) > 1:
            found["uneven_updates"] = uneven_updates(summaries)
        print(json.dumps(found))
        return
    out = stdout_console()
    out.print(summary_table(summaries, width=out.width))
    if len(summaries) > 1:
        out.print(comparison_table(summaries))
    elif groups := group_line(summaries[0]):
        out.print(escape(printable(groups)), highlight=False)
    if (causes := slot_time_table(mean_slot_time(summaries))) is not None:
        out.print(causes)
