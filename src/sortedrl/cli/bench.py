"""`bench`: speed beside that of peers, measured in one run."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sortedrl.cli.app import AsJson, app, err, stdout_console

bench = typer.Typer(no_args_is_help=True, help="Speed beside that of peers, measured in one run.")
app.add_typer(bench, name="bench")


@bench.command()
def engine(
    model: Annotated[str, typer.Option(help="As model.path in a configuration.")] = "smollm2-135m",
    slots: Annotated[int, typer.Option(min=1)] = 64,
    new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    against: Annotated[str, typer.Option(help="Peers, by comma: hf, hf-continuous, vllm.")] = "hf",
    rounds: Annotated[int, typer.Option(min=1, help="The median of so many rounds counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="For every contender; left out, all cores.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    vllm_python: Annotated[str | None, typer.Option(help="Python of an environment with vLLM.")] = None,
    as_json: AsJson = False,
) -> None:
    """Sampling speed of the local engine, transformers and vLLM, and the limit that matrix products set."""
    from sortedrl.bench.engine import EngineBench, measure

    peers = tuple(name for name in against.split(",") if name)
    settings = EngineBench(
        model=model,
        slots=slots,
        new_tokens=new_tokens,
        against=peers,
        rounds=rounds,
        threads=threads or os.cpu_count() or 1,
        dtype=dtype,
        seed=seed,
        vllm_python=vllm_python,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=as_json) as progress:
        bar = progress.add_task("loading", total=rounds * (1 + len(peers)))

        def on_round(name: str) -> None:
            progress.update(bar, description=name, advance=1)

        result = measure(settings, on_round)
    print(json.dumps(result)) if as_json else stdout_console().print(engine_table(result))


def engine_table(result: dict[str, Any]) -> Table:
    title = (
        f"{result['model']}, {result['slots']} slots x {result['new_tokens']} tokens, {result['dtype']}, "
        f"{result['threads']} threads"
    )
    table = Table("engine", "tokens/s", "tokens per CPU second", "ours is faster by", "note", title=title)
    for row in result["results"]:
        name, note = row["name"], row.get("skipped", "")
        if note:
            table.add_row(name, "-", "-", "-", note)
            continue
        ratio = result["ratio"].get(name)
        if name == "limit":
            note = f"matrix products alone; ours reaches {result['limit_fraction']:.0%}"
        speeds = (f"{row['tokens_per_s']:.0f}", f"{row['tokens_per_cpu_s']:.0f}")
        table.add_row(name, *speeds, "" if ratio is None else f"{ratio:.2f}", note)
    return table
