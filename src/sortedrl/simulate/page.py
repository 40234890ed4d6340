"""What `sortedrl simulate` shows: a table, and one page with the slots that each strategy keeps busy.

What it keeps true: the page holds all it needs and forbids itself to load anything; all curves share one time axis, so
that a shorter curve is a faster run; text from outside is escaped.
"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots
from rich import box
from rich.markup import escape
from rich.table import Table

from sortedrl.errors import RunDirError
from sortedrl.simulate.occupancy import OccupancyCurve
from sortedrl.telemetry.summary import Summary, number, share

_NUM_BINS = 480
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_CSS = """
body { margin: 0; background: #f5f6f8; color: #1b2430; font: 16px/1.5 FONT; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 56px; }
h1 { font-size: 1.5rem; margin: 0 0 4px; }
p { color: #5a6675; font-size: .9rem; margin: 0 0 8px; max-width: 100ch; }
section { background: #fff; border: 1px solid #dfe3e9; border-radius: 10px; padding: 16px; margin-top: 18px; }
div.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 5px 12px; border-bottom: 1px solid #dfe3e9; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
""".replace("FONT", _FONT)
_INK, _GRID, _BUSY, _LINE = "#1b2430", "#e6e9ee", "rgba(0, 114, 178, 0.28)", "#0072B2"

COLUMNS = (
    "strategy",
    "bubble",
    "goodput",
    "discarded",
    "stale mean",
    "by token",
    "max",
    "updates",
    "wall s",
    "tokens/s",
    "speed",
)


def cells(summary: Summary, base: Summary) -> list[str]:
    """One row, in the order of COLUMNS; speed is against `base`, discarded against what was trained."""
    speed = None
    if summary.tokens_per_s and base.tokens_per_s:
        speed = summary.tokens_per_s / base.tokens_per_s
    return [
        summary.strategy,
        share(summary.bubble_ratio),
        share(summary.goodput),
        share((summary.discarded_tokens or 0) / summary.trained_tokens if summary.trained_tokens else None),
        number(summary.staleness_mean, 2),
        number(summary.staleness_token_mean, 2),
        number(summary.staleness_max),
        number(summary.updates),
        number(summary.wall_s, 1),
        number(summary.tokens_per_s, 1),
        "–" if speed is None else f"{speed:.2f}x",
    ]


def base_of(summaries: Sequence[Summary]) -> Summary:
    """What speeds are measured against: `sync`, or the first one."""
    return next((summary for summary in summaries if summary.strategy == "sync"), summaries[0])


def simulation_table(summaries: Sequence[Summary]) -> Table:
    base = base_of(summaries)
    caption = f"discarded: against trained tokens; speed: against {escape(base.strategy)}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=caption, caption_justify="left")
    for position, header in enumerate(COLUMNS):
        table.add_column(header, justify="right" if position else "left", no_wrap=True)
    for summary in summaries:
        table.add_row(*(escape(cell) for cell in cells(summary, base)))
    return table


def write_page(
    path: str | Path, summaries: Sequence[Summary], curves: Sequence[OccupancyCurve], *, title: str, text: str
) -> Path:
    """The table and the curves as one file; written aside and renamed, so that a reader never sees half of it."""
    path = Path(path)
    aside = path.with_name(path.name + ".part")
    figure = occupancy_figure(summaries, curves)
    chart = plotly.io.to_html(
        figure,
        full_html=False,
        include_plotlyjs=False,
        div_id="occupancy",
        config={"responsive": True, "displayModeBar": False},
    )
    base = base_of(summaries)
    head = "".join(f"<th>{html.escape(header)}</th>" for header in COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(summary, base)) + "</tr>"
        for summary in summaries
    )
    document = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)} - sortedrl</title>\n<style>{_CSS}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n<h1>{html.escape(title)}</h1>\n"
        f"<p>{html.escape(text)}</p>\n"
        f'<section><div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>\n'
        f"<p>Discarded is against trained tokens, speed against {html.escape(base.strategy)}.</p></section>\n"
        "<section><p>Slots in use over time, one strategy above the other on one time axis: white under the dashed "
        "line is the bubble, and a curve that ends sooner is a faster run. Filled slots may still do work that is "
        "thrown away: goodput tells.</p>\n"
        f"{chart}</section>\n</main>\n</body>\n</html>\n"
    )
    try:
        aside.write_text(document, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        raise RunDirError(f"cannot write {path}: {error.strerror}; create its folder or choose another") from error
    return path


def occupancy_figure(summaries: Sequence[Summary], curves: Sequence[OccupancyCurve]) -> go.Figure:
    titles = [
        f"{html.escape(s.strategy)}: bubble {share(s.bubble_ratio)}, goodput {share(s.goodput)}" for s in summaries
    ]
    count = len(curves)
    figure = make_subplots(
        rows=count, cols=1, shared_xaxes=True, vertical_spacing=min(0.34 / count, 0.1), subplot_titles=titles
    )
    end = max(curve.end for curve in curves)
    for row, (summary, curve) in enumerate(zip(summaries, curves, strict=True), start=1):
        bins = max(round(_NUM_BINS * curve.end / end), 1) if end else 1
        edges, heights = curve.binned(bins)
        figure.add_scatter(
            x=edges,
            y=[*heights, 0.0],
            line={"shape": "hv", "width": 1, "color": _LINE},
            fill="tozeroy",
            fillcolor=_BUSY,
            hovertemplate="%{x:.4~g} s: %{y:.1f} slots<extra></extra>",
            row=row,
            col=1,
        )
        top = {"dash": "dash", "width": 1, "color": _INK}
        figure.add_scatter(x=[0, end], y=[summary.slots] * 2, mode="lines", line=top, hoverinfo="skip", row=row, col=1)
    figure.update_xaxes(range=[0, end], gridcolor=_GRID, zeroline=False)
    figure.update_xaxes(title_text="time, s", row=count, col=1)
    slots = max((summary.slots or 0) for summary in summaries)
    figure.update_yaxes(range=[0, slots * 1.06], gridcolor=_GRID, zeroline=False, nticks=4)
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    figure.update_layout(
        height=150 * count + 70,
        showlegend=False,
        plot_bgcolor="#ffffff",
        paper_bgcolor="#ffffff",
        font={"family": _FONT, "color": _INK, "size": 12},
        margin={"l": 46, "r": 10, "t": 30, "b": 46},
    )
    return figure
