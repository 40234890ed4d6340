"""`eval`: a model on test suites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sortedrl.cli.app import AsJson, app, err, stdout_console


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="A model's folder, smollm2-135m, knights-tiny, or a run's directory.")],
    suite: Annotated[
        str,
        typer.Option(help="Comma-separated: aime24, aime25, math500, minerva, amc23, gsm8k, olympiad, kk, knights."),
    ],
    samples: Annotated[int, typer.Option(min=1, help="k: answers to each problem.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many problems of each suite.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with the suites' files; left out: data/ or the hub.")
    ] = None,
    engine: Annotated[str, typer.Option(help="As engine.kind in a configuration.")] = "local",
    slots: Annotated[int, typer.Option(min=1, help="Answers that are written at once.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=1, help="Token budget of an answer.")] = 1024,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 is greedy; left out: 0 for one answer a problem, 0.6 for several.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads for torch.")] = 1,
    workers: Annotated[int, typer.Option(min=1, help="Processes that mark answers.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that marking a few answers may take.")] = 10.0,
    out: Annotated[Path | None, typer.Option(help="Write every answer with its mark to this JSONL file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Answer test suites and mark them: mean@k, pass@k, maj@k with standard errors, lengths, truncation."""
    from sortedrl.run.suite_eval import ExamSettings, take_exam

    settings = ExamSettings(
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

        found = take_exam(settings, on_progress)
    if out is not None:
        found.write_answers(out)
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    stdout_console().print(found.table())
    speed = f"{found.num_tokens:,} tokens in {found.seconds:.0f} s, slots {found.busy_share:.0%} busy"
    err.print(escape(speed + (f"; answers: {out}" if out else "")), highlight=False, soft_wrap=True)
