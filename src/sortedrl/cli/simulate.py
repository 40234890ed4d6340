"""`simulate` and `plan`: answers from the virtual clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sortedrl.cli.app import AsJson, app, err, stdout_console


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
    stdout_console().print(found.table())


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
    stdout_console().print(found.table())
    for line in [*found.advice(), *([f"configuration: {out}"] if out else [])]:
        err.print(line, highlight=False, soft_wrap=True)
