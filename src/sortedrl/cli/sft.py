"""`sft`: supervised fine-tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sortedrl.cli.app import AsJson, app, err


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
