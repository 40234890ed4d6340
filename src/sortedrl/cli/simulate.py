"""The commands `simulate` and `plan`, which run the simulator on a virtual clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sortedrl.cli.app import AsJson, app, err, stdout_console
from sortedrl.errors import ConfigError

HardwareOption = Annotated[str, typer.Option(help="h100, a100, rtx4090 or cpu; for roofline.")]
ModelOption = Annotated[str, typer.Option(help="llama-3.1-8b, qwen2.5-7b, qwen2.5-32b or smollm2-135m; for roofline.")]
TensorParallelOption = Annotated[int, typer.Option(min=1, help="Devices per replica.")]
ReplicasOption = Annotated[int, typer.Option(min=1, help="Number of engines, each with --slots; the load is balanced.")]
CapOption = Annotated[int | None, typer.Option(help="Token budget of an answer.")]
ColumnOption = Annotated[str, typer.Option(help="Column of the lengths in a CSV or Parquet file.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of all random choices.")]


@app.command()
def simulate(
    trace: Annotated[
        str, typer.Option(help="A file of answer lengths, a run directory, or lognormal(700, 1.1, 8192).")
    ],
    slots: Annotated[int, typer.Option(help="Q: sequences that one replica runs at the same time.")] = 128,
    update_batch: Annotated[int, typer.Option(help="U: samples per update.")] = 128,
    cohort_batches: Annotated[int | None, typer.Option(min=1, help="n: update batches per cohort; 1 for sync.")] = None,
    lookahead: Annotated[
        str | None, typer.Option(help="L: cohorts open ahead, or none; unless the strategy fixes it.")
    ] = None,
    max_staleness: Annotated[str | None, typer.Option(help="A bound, or none; unless the strategy fixes it.")] = None,
    on_bound: Annotated[
        str | None, typer.Option(help="At the bound: wait, replay or restart; unless the strategy fixes it.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="Strategies, separated by commas, or all.")] = "all",
    admission: Annotated[str | None, typer.Option(help="load-order, new-first or longest-expected-first.")] = None,
    max_unverified: Annotated[
        str | None, typer.Option(help="Updates that an answer goes through before replay verifies it, or none.")
    ] = None,
    restart_noise: Annotated[str | None, typer.Option(help="seeded or fresh.")] = None,
    overlap: Annotated[bool | None, typer.Option(help="Continue rollout during updates.")] = None,
    cost: Annotated[str, typer.Option(help="Cost model: unit (one second per decode step) or roofline.")] = "unit",
    hardware: HardwareOption = "h100",
    model: ModelOption = "llama-3.1-8b",
    tensor_parallel: TensorParallelOption = 1,
    replicas: ReplicasOption = 1,
    prompt_tokens: Annotated[int, typer.Option(min=0, help="Length of every prompt, which is prefilled.")] = 256,
    divergence: Annotated[float, typer.Option(help="Chance that an update changes a token; for replay.")] = 1e-4,
    drift: Annotated[float, typer.Option(help="Factor by which each update changes lengths.")] = 1.0,
    update_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds per update, instead of the cost model's.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Number of answers; default: all of the file, or 4096.")] = None,
    seed: SeedOption = 0,
    group_size: Annotated[int, typer.Option(help="Siblings that train together.")] = 1,
    cap: CapOption = None,
    column: ColumnOption = "length",
    drafts: Annotated[
        float, typer.Option(min=1, help="Tokens that a pass with 7 draft tokens gives; for roofline. 1: no drafts.")
    ] = 1.0,
    tools: Annotated[
        str | None,
        typer.Option(help="Turns in tools: mean number x mean seconds, as in '3 x 20', or a run's own. Default: none."),
    ] = None,
    open_trajectories: Annotated[
        str | None, typer.Option(help="Most trajectories begun and not complete; slots: as if tools held their slots.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML page that shows the slots in use over time.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare strategies on a trace of answer lengths, on a virtual clock."""
    from sortedrl.simulate.compare import SimulationQuestion, compare_strategies

    knobs = {"cohort_batches": cohort_batches, "admission": admission, "restart_noise": restart_noise}
    given = {"lookahead": lookahead, "max_staleness": max_staleness, "max_unverified": max_unverified}
    given["open_trajectories"] = str(slots) if open_trajectories == "slots" else open_trajectories
    bounds = {name: _parse_bound(text) for name, text in given.items()}
    question = SimulationQuestion(
        trace=trace,
        strategies=strategy,
        slots=slots,
        update_batch=update_batch,
        knobs={**knobs, **bounds, "on_bound": on_bound, "overlap": overlap},
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
        draft_tokens=drafts,
        tools=tools,
    )
    answer = compare_strategies(question, page=html)
    for note in answer.notes:
        err.print(note, highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps({"runs": [summary.model_dump(mode="json") for summary in answer.summaries]}))
        return
    stdout_console().print(answer.table())


def _parse_bound(text: str | None) -> int | str | None:
    """The number in the text, or else the text itself, which `resolve_knobs` checks."""
    return int(text) if text is not None and text.isdecimal() else text


@app.command()
def plan(
    trace: Annotated[str | None, typer.Option(help="As for simulate; default: the lengths of --from-run.")] = None,
    from_run: Annotated[
        Path | None, typer.Option(help="A finished run that costs and settings are taken from.")
    ] = None,
    from_logs: Annotated[
        Path | None, typer.Option(help="Lengths from the logs of TRL (completions) or verl (rollout_data_dir).")
    ] = None,
    hardware: HardwareOption = "h100",
    model: ModelOption = "llama-3.1-8b",
    tensor_parallel: TensorParallelOption = 1,
    replicas: ReplicasOption = 1,
    slots: Annotated[int | None, typer.Option(help="Q; default: the run's, or 128.")] = None,
    update_batch: Annotated[int | None, typer.Option(help="U; default: the run's, or the number of slots.")] = None,
    max_staleness: Annotated[int | None, typer.Option(min=0, help="Use only settings that keep this bound.")] = None,
    overlap: Annotated[
        bool, typer.Option(help="Also try async and async-on-policy, which need separate learner devices.")
    ] = False,
    divergence: Annotated[float | None, typer.Option(help="As for simulate; default: the run's, or 1e-4.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=0, help="Length of every prompt.")] = None,
    group_size: Annotated[int | None, typer.Option(min=1, help="Siblings that train together.")] = None,
    samples: Annotated[int | None, typer.Option(help="Number of answers; at most 32 updates are simulated.")] = None,
    cap: CapOption = None,
    column: ColumnOption = "length",
    tools: Annotated[str | None, typer.Option(help="As for simulate; the plan then bounds open trajectories.")] = None,
    candidates: Annotated[int, typer.Option(min=1, help="Number of settings to try.")] = 48,
    seed: SeedOption = 0,
    out: Annotated[Path | None, typer.Option(help="Write the recommendation as a configuration.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="Propose placements of this configuration on GPUs, instead of schedules.")
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="Number of GPUs, for --config.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Search by simulation for settings that train fast with little staleness.

    With --config, propose which GPUs engines and learner get, by memory and speed.
    """
    if config is not None:
        _plan_placements(config, hardware, devices, out, as_json)
        return
    from sortedrl.simulate.plan import PlanQuestion, propose

    if from_logs is not None and trace is not None:
        raise ConfigError("--from-logs and --trace both give lengths: leave one out")
    trace = trace if from_logs is None else str(from_logs)
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
        tools=tools,
    )
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, disable=as_json, transient=True) as progress:
        bar = progress.add_task("plan", total=None)
        proposal = propose(question, lambda done, total: progress.update(bar, completed=done, total=total))
    if out is not None:
        proposal.write(out)
    for note in proposal.notes:
        err.print(note, highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(proposal.as_dict()))
        return
    stdout_console().print(proposal.table())
    for line in [*proposal.advice(), *([f"configuration: {out}"] if out else [])]:
        err.print(line, highlight=False, soft_wrap=True)


def _plan_placements(path: Path, hardware: str, devices: int, out: Path | None, as_json: bool) -> None:
    """Show the placements of a configuration on some GPUs; `out` gets the configuration with the first."""
    from sortedrl.config import SortedConfig
    from sortedrl.run.placements import placements_of, placements_table, write_placement

    config = SortedConfig.load(path)
    options = placements_of(config, hardware, devices)
    if out is not None:
        write_placement(options, out)
    if as_json:
        print(json.dumps({"placements": [option.as_dict() for option in options]}))
        return
    stdout_console().print(placements_table(options, f"{config.run.name} on {devices} x {hardware}"))
    if out is not None:
        err.print(f"configuration: {out}", highlight=False, soft_wrap=True)
