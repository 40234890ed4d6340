"""The command `dashboard`: follow runs in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sortedrl.cli.app import app, err
from sortedrl.cli.inspect import answer_decoder
from sortedrl.external.extras import require_extra


@app.command(epilog=r"Needs the extra dashboard: pip install 'sortedrl\[dashboard]'")
def dashboard(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Run directories, or folders of run directories. Default: runs."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any address but loopback needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0: any free port.")] = 8427,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="SORTEDRL_DASHBOARD_TOKEN",
            help="Token that browsers must send. Prefer the variable: arguments are visible to other users.",
        ),
    ] = None,
) -> None:
    """Serve read-only pages that follow runs while they train. Ctrl-C ends the server."""
    require_extra("sortedrl dashboard", "dashboard")
    from sortedrl.telemetry.dashboard.app import Dashboard, serve

    page = Dashboard(runs or [Path("runs")], decoder=answer_decoder)
    hint = "" if token is None else " (add ?token=... the first time)"
    serve(
        page,
        host=host,
        port=port,
        token=token,
        announce=lambda address: err.print(f"dashboard: {address}{hint}, Ctrl-C ends it", highlight=False),
    )
