"""Colours, fonts, margins and line styles that all charts of a page share.

Used by `charts.py`, `timeline.py` and `page.py`. Guarantees: colour-blind readers can tell the colours apart (Okabe and
Ito's palette, viridis), and no difference is shown by colour alone: runs also differ in dash and symbol, and versions
are numbered.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from sortedrl.telemetry.view import RunView

_RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
NUM_RUN_COLOURS = len(_RUN_COLOURS)
"""`page.css` has the same colours as `--run-0` and so on, and their counterparts on a dark page."""
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
# Neighbours in this order also differ in lightness, so that a change of version is visible in grey print.
VERSION_COLOURS = ("#0072B2", "#E69F00", "#56B4E9", "#CC79A7", "#009E73", "#F0E442")
INK, _GRID, RULE = "#1b2430", "#e6e9ee", "#b4bcc8"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_AXIS: dict[str, Any] = {"gridcolor": _GRID, "linecolor": RULE, "zeroline": False, "automargin": True, "ticks": ""}


@dataclass(slots=True, kw_only=True, frozen=True)
class Chart:
    name: str  # unique on its page
    figure: go.Figure | dict[str, Any]  # a dictionary is a figure as plotly.js takes it
    caption: str = ""  # plain text
    title: str = ""  # plain text; above the chart, for charts without titles of their own


def run_colour(position: int) -> str:
    return _RUN_COLOURS[position % len(_RUN_COLOURS)]


def run_dash(position: int) -> str:
    """Return the line style of a run. Among twelve runs, two of the same colour have different line styles."""
    return _DASHES[position % len(_DASHES)]


def run_symbol(position: int) -> str:
    return _SYMBOLS[position % len(_SYMBOLS)]


def run_name(run: RunView) -> str:
    """Return the escaped name, because plotly interprets tags in a name as markup."""
    return html.escape(run.name)


def faded(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def styled(figure: go.Figure, *, height: int, top: int = 26) -> go.Figure:
    """Apply the common style; `top` is the space for titles, and for the button of the chart.

    Charts have no legend, which would take too much width on a phone: the page has a key for runs.
    """
    figure.update_layout(template="none", **_layout(height, top, 44))
    figure.update_xaxes(**_AXIS, title_standoff=8, title_font_size=12)
    figure.update_yaxes(**_AXIS, title_standoff=4, title_font_size=12)
    figure.update_annotations(font_size=12.5, x=0, xanchor="left")
    return figure


def small_figure(
    traces: Sequence[dict[str, Any]], *, height: int, bottom: int, xaxis: dict[str, Any], yaxis: dict[str, Any]
) -> dict[str, Any]:
    """Return a figure in the common style as a dictionary.

    A page has dozens of small charts, and plotly's own objects take ten times as long to build.
    """
    axes = {"xaxis": {**_AXIS, **xaxis}, "yaxis": {**_AXIS, **yaxis}}
    return {"data": list(traces), "layout": {**_layout(height, 8, bottom), **axes}}


def _layout(height: int, top: int, bottom: int) -> dict[str, Any]:
    return {
        "height": height,
        "showlegend": False,
        "hovermode": "closest",
        "margin": {"l": 44, "r": 12, "t": top, "b": bottom},
        "font": {"family": _FONT, "size": 12, "color": INK},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "dragmode": "zoom",
        "uirevision": "kept",  # keep the reader's zoom when new data arrives
    }


def add_title(figure: go.Figure, row: int, text: str) -> None:
    """Add a title above one row of subplots, at the left."""
    suffix = "" if row == 1 else str(row)
    figure.add_annotation(
        text=text,
        xref="paper",
        yref=f"y{suffix} domain",
        x=0,
        y=1.02,
        xanchor="left",
        yanchor="bottom",
        showarrow=False,
    )


def add_verticals(
    figure: go.Figure,
    xs: Sequence[float],
    span: tuple[float, float],
    *,
    colour: str = RULE,
    dash: str = "solid",
    **where: int,
) -> None:
    """Add vertical lines as one trace: one shape per line would take plotly seconds in a long run."""
    figure.add_scatter(
        x=[value for x in xs for value in (x, x, None)],
        y=[value for _ in xs for value in (*span, None)],
        mode="lines",
        line={"color": colour, "width": 1, "dash": dash},
        hoverinfo="skip",
        **where,
    )
