"""The command line: train, compare, simulate, plan, ledger, sft, report, doctor.

Each command prints a table for people, or with `--json` one JSON object and nothing else on stdout. Progress and
messages go to stderr. Users' mistakes end with one line and exit code 2, Ctrl-C with 130.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError, RunDirError, SortedRLError
from sortedrl.redact import SafeText, redact_text
from sortedrl.reward_worker import printable
from sortedrl.schedule import Strategy

if TYPE_CHECKING:
    from sortedrl.telemetry.summary import Summary

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Online length-aware rollout scheduling for RL post-training.",
)
err = Console(stderr=True)
TABLE_WIDTH = 110  # where stdout is no terminal

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file, see configs/.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For example run.seed=1.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout instead of tables.")]


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A TOML file, see configs/.")] = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with the run in this directory.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train as CONFIG says; the run directory gets events, metrics, ledger, checkpoints, summary and report."""
    from sortedrl.trainer import SortedTrainer

    settings = load_config(config, overrides or [], resume)
    trainer = SortedTrainer(args=settings, console=err, quiet=as_json)
    summary = trainer.train(resume=resume is not None)
    show([summary], as_json)
    files = {"report": "report.html", "summary": "summary.json", "weights": "checkpoints"}
    paths = {name: trainer.run_dir / file for name, file in files.items()}
    kept = ", ".join(f"{name} {path}" for name, path in paths.items() if path.exists())
    if summary.status == "complete":
        err.print(escape(f"done: {kept}"), highlight=False, soft_wrap=True)
        return
    trained = f"{summary.updates} updates, {summary.samples} samples trained"
    err.print(escape(f"stopped after {trained}; kept: {kept}"), highlight=False, soft_wrap=True)
    if settings.checkpoint.save:
        err.print(escape(f"go on with: {trainer.resume_command}"), highlight=False, soft_wrap=True)


def load_config(config: Path | None, overrides: list[str], resume: Path | None) -> SortedConfig:
    """The configuration of a run from its file, or, to resume it, from its directory."""
    if resume is None:
        if config is None:
            raise ConfigError("name the CONFIG to train, or a run to go on with: --resume RUN")
        return SortedConfig.load(config, overrides)
    if config is not None:
        if "=" not in str(config):
            raise ConfigError(f"--resume takes the run's own configuration: leave out {config}, or give KEY=VALUE")
        overrides = [str(config), *overrides]
    if not (resume / "config.toml").is_file():
        raise RunDirError(f"{resume} holds no run to resume: it has no config.toml")
    here = resume if resume.name not in ("", "..") else resume.resolve()
    settings = SortedConfig.load(resume / "config.toml", overrides)
    return settings.moved(here.parent, here.name)  # it may have been since


@app.command()
def compare(
    config: ConfigPath,
    overrides: Overrides = None,
    strategies: Annotated[str, typer.Option(help="Comma-separated presets.")] = "sync,sorted-partial,sorted-replay",
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0, 1, ... for each strategy.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Train once per strategy and seed, on the same slots, update batch, samples and seeds."""
    from sortedrl.telemetry.report import write_report
    from sortedrl.trainer import SortedTrainer

    base = SortedConfig.load(config, overrides or [])
    names = [name.strip() for name in strategies.split(",") if name.strip()]
    unknown = [name for name in names if name not in list(Strategy)]
    if unknown or not names:
        raise ConfigError(f"unknown strategy {unknown[0] if unknown else ''!r}: choose from {', '.join(Strategy)}")
    configs = [  # all of them first: one that cannot be kept is refused before the others are trained
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
        summaries.append(trainer.train())
        directories.append(trainer.run_dir)
        if trainer.stop_requested:
            show(summaries, as_json)
            raise typer.Exit(130)
    report = write_report(directories, Path(base.run.dir) / f"{base.run.name}-compare.html")
    show(summaries, as_json)
    err.print(f"report: {report}", highlight=False)


@app.command()
def simulate(
    trace: Annotated[str, typer.Option(help="A file of lengths, a run directory, or lognormal(700, 1.1, 8192).")],
    slots: Annotated[int, typer.Option(help="Q: sequences that one replica runs at once.")] = 128,
    update_batch: Annotated[int, typer.Option(help="U: samples per update.")] = 128,
    cohort_batches: Annotated[int | None, typer.Option(min=1, help="n; sync always loads one batch.")] = None,
    lookahead: Annotated[str | None, typer.Option(help="L, or none; where the strategy leaves it open.")] = None,
    max_staleness: Annotated[str | None, typer.Option(help="A bound, or none; likewise.")] = None,
    strategy: Annotated[str, typer.Option(help="Comma-separated presets, or all.")] = "all",
    admission: Annotated[str | None, typer.Option(help="load-order or longest-expected-first.")] = None,
    restart_noise: Annotated[str | None, typer.Option(help="seeded or fresh.")] = None,
    overlap: Annotated[bool | None, typer.Option(help="Rollout goes on during updates.")] = None,
    cost: Annotated[str, typer.Option(help="unit or roofline.")] = "unit",
    hardware: Annotated[str, typer.Option(help="h100, a100 or cpu; for roofline.")] = "h100",
    model: Annotated[
        str, typer.Option(help="llama-3.1-8b, qwen2.5-32b or smollm2-135m; for roofline.")
    ] = "llama-3.1-8b",
    tensor_parallel: Annotated[int, typer.Option(help="Devices per replica.")] = 1,
    replicas: Annotated[int, typer.Option(help="Engines, balanced, each with --slots.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Length of every prompt; costs prefill.")] = 256,
    divergence: Annotated[float, typer.Option(help="Chance that an update changes a token; for replay.")] = 1e-4,
    drift: Annotated[float, typer.Option(help="Factor by which each update changes lengths.")] = 1.0,
    update_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds of an update, in place of the model's.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Answers; left out: the file's, or 4096.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    group_size: Annotated[int, typer.Option(help="Siblings that are trained together.")] = 1,
    cap: Annotated[int | None, typer.Option(help="Token budget of an answer.")] = None,
    column: Annotated[str, typer.Option(help="The lengths in a CSV or Parquet file.")] = "length",
    html: Annotated[Path | None, typer.Option(help="Write a page with the slots in use over time.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run strategies over a trace of answer lengths on a virtual clock."""
    from sortedrl.simulate.command import Question, answer

    knobs = {"cohort_batches": cohort_batches, "admission": admission, "restart_noise": restart_noise}
    bounds = {"lookahead": bound(lookahead), "max_staleness": bound(max_staleness)}
    question = Question(
        trace=trace,
        strategies=strategy,
        slots=slots,
        update_batch=update_batch,
        knobs={**knobs, **bounds, "overlap": overlap},
        cost=cost,
        hardware=hardware,
        model=model,
        tensor_parallel=tensor_parallel,
        replicas=replicas,
        prompt_tokens=prompt_tokens,
        divergence=divergence,
        drift=drift,
        update_s=update_s,
        samples=samples,
        seed=seed,
        group_size=group_size,
        cap=cap,
        column=column,
    )
    found = answer(question, html=html)
    for note in found.notes:
        err.print(note, highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps({"runs": [summary.model_dump(mode="json") for summary in found.summaries]}))
        return
    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(found.table())


def bound(text: str | None) -> int | str | None:
    """A bound as typed: a number, or whatever else for the schedule to judge."""
    return int(text) if text is not None and text.isdecimal() else text


@app.command()
def plan(
    trace: Annotated[str | None, typer.Option(help="As for simulate; left out: the lengths of --from-run.")] = None,
    from_run: Annotated[Path | None, typer.Option(help="Take costs and settings from this finished run.")] = None,
    hardware: Annotated[str, typer.Option(help="h100, a100 or cpu; without --from-run.")] = "h100",
    model: Annotated[
        str, typer.Option(help="llama-3.1-8b, qwen2.5-32b or smollm2-135m; without --from-run.")
    ] = "llama-3.1-8b",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices per replica.")] = 1,
    replicas: Annotated[int, typer.Option(min=1, help="Engines, balanced, each with --slots.")] = 1,
    slots: Annotated[int | None, typer.Option(help="Q; left out: the run's, or 128.")] = None,
    update_batch: Annotated[int | None, typer.Option(help="U; left out: the run's, or the slots.")] = None,
    max_staleness: Annotated[int | None, typer.Option(min=0, help="Consider only what keeps this bound.")] = None,
    overlap: Annotated[bool, typer.Option(help="Consider async: the learner has devices of its own.")] = False,
    divergence: Annotated[float | None, typer.Option(help="As for simulate; left out: the run's, or 1e-4.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=0, help="Length of every prompt.")] = None,
    group_size: Annotated[int | None, typer.Option(min=1, help="Siblings that are trained together.")] = None,
    samples: Annotated[int | None, typer.Option(help="Answers of the trace; at most 32 updates are simulated.")] = None,
    cap: Annotated[int | None, typer.Option(help="Token budget of an answer.")] = None,
    column: Annotated[str, typer.Option(help="The lengths in a CSV or Parquet file.")] = "length",
    candidates: Annotated[int, typer.Option(min=1, help="Settings to try.")] = 48,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the recommendation as a configuration.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search for the settings that train fastest at little staleness, by simulation."""
    from sortedrl.simulate.proposal import PlanQuestion, propose

    question = PlanQuestion(
        trace=trace,
        from_run=from_run,
        hardware=hardware,
        model=model,
        tensor_parallel=tensor_parallel,
        replicas=replicas,
        slots=slots,
        update_batch=update_batch,
        max_staleness=max_staleness,
        overlap=overlap,
        divergence=divergence,
        prompt_tokens=prompt_tokens,
        group_size=group_size,
        samples=samples,
        cap=cap,
        column=column,
        candidates=candidates,
        seed=seed,
    )
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, disable=as_json, transient=True) as progress:
        bar = progress.add_task("plan", total=None)
        found = propose(question, tell=lambda done, total: progress.update(bar, completed=done, total=total))
    if out is not None:
        found.write(out)
    for note in found.notes:
        err.print(note, highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(found.table())
    for line in [*found.advice(), *([f"configuration: {out}"] if out else [])]:
        err.print(line, highlight=False, soft_wrap=True)


@app.command()
def sft(
    out: Annotated[Path, typer.Argument(help="Folder for the model.")],
    seed: Annotated[int, typer.Option(min=0)] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Left out: those of the shipped model.")] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the embedded model: SFT of a tiny Llama on demonstrations of Knights and Knaves."""
    import torch

    from sortedrl.tasks.tiny import STEPS, rebuild

    torch.set_num_threads(1)
    loss_column = TextColumn("{task.fields[loss]}")
    columns = (TextColumn("SFT"), BarColumn(), MofNCompleteColumn(), loss_column, TimeRemainingColumn())
    with Progress(*columns, console=err, disable=as_json) as progress:
        bar = progress.add_task("sft", total=steps or STEPS, loss="")

        def on_step(step: int, loss: float) -> None:
            progress.update(bar, completed=step, loss=f"loss {loss:.3f}")

        result = rebuild(out, seed=seed, steps=steps or STEPS, on_step=on_step)
    record = {"path": str(out), "steps": result.steps, "num_tokens": result.num_tokens, "loss": result.loss}
    print(json.dumps(record)) if as_json else err.print(f"saved {out}: loss {result.loss:.4f}", highlight=False)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories.")],
    out: Annotated[Path | None, typer.Option(help="HTML file; left out: report.html in the first run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about one or several runs."""
    from sortedrl.telemetry.report import write_report

    path = write_report(runs, out or runs[0] / "report.html")
    print(json.dumps({"report": str(path)})) if as_json else err.print(f"report: {path}", highlight=False)


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


@app.command()
def ledger(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or its ledger.sqlite.")],
    verify: Annotated[bool, typer.Option("--verify", help="Prove the invariants from the file alone.")] = False,
    sample: Annotated[int | None, typer.Option(min=0, help="Tell the life of one sample.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what became of every sample of RUN; exit code 1 if the file breaks an invariant."""
    from sortedrl.ledger.command import ledger_command

    out = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    decode = None if sample is None or as_json else answer_decoder(run)
    code = ledger_command(run, verify=verify, sample=sample, console=out, as_json=as_json, decode=decode)
    raise typer.Exit(code)


def answer_decoder(run: Path) -> Callable[[list[int]], str] | None:
    """How the run's tokenizer spells tokens; None where there is no checkpoint with one."""
    from sortedrl.learner.checkpoint import Checkpoints
    from sortedrl.learner.model import load_tokenizer

    folder = Checkpoints((run if run.is_dir() else run.parent) / "checkpoints").latest()
    return None if folder is None else load_tokenizer(folder).decode


def show(summaries: list[Summary], as_json: bool) -> None:
    from sortedrl.telemetry.summary import comparison_table, group_line, summary_table

    if as_json:
        print(json.dumps({"runs": [summary.model_dump(mode="json") for summary in summaries]}))
        return
    out = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    out.print(summary_table(summaries))
    if len(summaries) > 1:
        out.print(comparison_table(summaries))
    elif groups := group_line(summaries[0]):
        out.print(escape(printable(groups)), highlight=False)


def complain(message: str, *notes: str) -> None:
    """An error as one line, and what else there is to say below it."""
    safe = [escape(printable(redact_text(text))) for text in (message, *notes)]
    for line in (f"[bold red]error:[/] {safe[0]}", *safe[1:]):
        err.print(line, highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point: errors of this package become one line."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    handler = RichHandler(console=err, show_path=False)
    handler.addFilter(SafeText())
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    command = typer.main.get_command(app)
    try:
        # Not `app()`: it turns an interrupt into an exit, and an exit into a return value.
        with command.make_context("sortedrl", sys.argv[1:]) as context:
            command.invoke(context)
    except SortedRLError as error:
        complain(str(error), *getattr(error, "__notes__", []))
        sys.exit(2)
    except typer.Exit as leave:
        sys.exit(leave.exit_code)
    except KeyboardInterrupt:
        err.print("interrupted: what was written to the run directory is kept", soft_wrap=True)
        sys.exit(130)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        usage = getattr(error, "format_message", None)
        if usage is None:
            raise
        if usage():  # without any argument the help has been printed, and there is nothing to add
            complain(usage())
        sys.exit(2)
