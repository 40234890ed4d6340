"""The command `sft`: supervised fine-tuning, and rebuilding the embedded models knights-tiny and tools-tiny."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sortedrl.cli.app import RUN_EXTRAS, AsJson, Overrides, app, complete_config, err
from sortedrl.config import SortedConfig
from sortedrl.config.needs import check_extras
from sortedrl.config.shipped import shipped_names
from sortedrl.errors import ConfigError

if TYPE_CHECKING:
    from sortedrl.learner.sft import SftResult


@app.command(epilog=RUN_EXTRAS)
def sft(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|OUT",
            help="Configuration to fine-tune as: a shipped name or a file that ends in .toml. Or a folder to rebuild "
            "an embedded model in.",
            autocompletion=complete_config,
        ),
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the fine-tuned model. Default: sft in the run directory.")
    ] = None,
    rebuild_tiny: Annotated[
        bool, typer.Option("--rebuild-tiny", help="Rebuild an embedded model even if OUT names a configuration.")
    ] = False,
    model: Annotated[
        str, typer.Option(help="Embedded model to rebuild in OUT: knights-tiny or tools-tiny.")
    ] = "knights-tiny",
    seed: Annotated[int | None, typer.Option(help="Seed. Default: that of CONFIG, or 0.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of batches. Default: that of CONFIG, or of the shipped model.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model as the section `sft` of CONFIG says, or rebuild the embedded model in the folder OUT."""
    if (target.suffix == ".toml" or str(target) in shipped_names()) and not rebuild_tiny:
        given = [f"run.seed={seed}"] * (seed is not None) + [f"sft.steps={steps}"] * (steps is not None)
        config = SortedConfig.load(target, [*(overrides or []), *given])
        check_extras(config)
        _fine_tune(config, out, as_json)
        return
    if overrides or out is not None:
        raise ConfigError(
            "overrides and --out go with a CONFIG, which is a shipped name or ends in .toml: leave them out to rebuild "
            "the embedded model"
        )
    if seed is not None:
        SortedConfig(run={"seed": seed})  # refuses a seed that is out of range
    if model not in ("knights-tiny", "tools-tiny"):
        raise ConfigError(f"--model {model!r:.80} is not an embedded model: choose knights-tiny or tools-tiny")
    _rebuild_tiny(target, model, seed or 0, steps, as_json)


def _fine_tune(config: SortedConfig, out: Path | None, as_json: bool) -> None:
    from sortedrl.run.sft_run import run_sft

    folder = out or config.run_dir / "sft"
    with _progress_bar(as_json) as progress:
        bar = progress.add_task("sft", total=None, loss="")
        result = run_sft(
            config,
            folder,
            on_step=lambda step, loss: progress.update(bar, completed=step, loss=f"loss {loss:.3f}"),
            on_start=lambda total: progress.update(bar, total=total),
        )
    _print_result(folder, result, as_json)


def _rebuild_tiny(folder: Path, model: str, seed: int, steps: int | None, as_json: bool) -> None:
    import torch

    if model == "tools-tiny":
        from sortedrl.tasks.tools_model import STEPS, rebuild
    else:
        from sortedrl.tasks.tiny import STEPS, rebuild

    torch.set_num_threads(1)
    with _progress_bar(as_json) as progress:
        bar = progress.add_task("sft", total=steps or STEPS, loss="")
        result = rebuild(
            folder,
            seed=seed,
            steps=steps or STEPS,
            on_step=lambda step, loss: progress.update(bar, completed=step, loss=f"loss {loss:.3f}"),
        )
    _print_result(folder, result, as_json)


def _progress_bar(as_json: bool) -> Progress:
    loss = TextColumn("{task.fields[loss]}")
    columns = (TextColumn("SFT"), BarColumn(), MofNCompleteColumn(), loss, TimeRemainingColumn())
    return Progress(*columns, console=err, disable=as_json)


def _print_result(folder: Path, result: SftResult, as_json: bool) -> None:
    record = {"path": str(folder), "steps": result.steps, "num_tokens": result.num_tokens, "loss": result.loss}
    print(json.dumps(record)) if as_json else err.print(f"saved {folder}: loss {result.loss:.4f}", highlight=False)
