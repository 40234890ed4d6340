"""The command `export`: copy a run's weights to a folder for `from_pretrained`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from sortedrl.cli.app import AsJson, app, err


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write; it must be new or empty.")],
    version: Annotated[int | None, typer.Option(min=0, help="Version of the weights. Default: the last saved.")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Export the adapters alone, not the merged weights.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FOLDER if it holds a model.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy the weights and the tokenizer of RUN to a folder that `from_pretrained` loads, with a model card.

    Weights come from the last checkpoint. Adapters are merged into them unless --adapter is given.
    """
    from sortedrl.run.export import export_run

    done = export_run(run, to, version=version, is_adapter=adapter, overwrite=overwrite)
    if as_json:
        print(json.dumps(done.as_dict()))
        return
    what = "adapters" if done.is_adapter else "weights"
    err.print(escape(f"exported {what} of version {done.version}: {done.folder}"), highlight=False, soft_wrap=True)
