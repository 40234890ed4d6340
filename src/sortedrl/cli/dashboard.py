"""`dashboard`: runs in a browser, live."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sortedrl.cli.app import app, err
from sortedrl.cli.inspect import answer_decoder
from sortedrl.errors import ConfigError


@app.command()
def dashboard(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run directories, or folders of runs; left out: runs.")
    ] = None,
    host: Annotated[str, typer.Option(help="Beyond loopback a token is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8427,
    token: Annotated[
        str | None, typer.Option(envvar="SORTEDRL_DASHBOARD_TOKEN", help="Who asks has to show it; better by variable.")
    ] = None,
) -> None:
    """Serve pages that follow runs as they train, read-only, until Ctrl-C."""
    try:
        from sortedrl.telemetry.dashboard.app import Dashboard, serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'sortedrl[dashboard]'") from None

    page = Dashboard(runs or [Path("runs")], decoder=answer_decoder)
    hint = "" if token is None else " (add ?token=... the first time)"
    serve(
        page,
        host=host,
        port=port,
        token=token,
        announce=lambda address: err.print(f"dashboard: {address}{hint}, Ctrl-C ends it", highlight=False),
    )
