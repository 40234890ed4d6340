"""Comparison of strategies on one trace: one summary per strategy, a table, and a page with the slots in use.

`sortedrl simulate` makes a `SimulationQuestion`, calls `compare_strategies` and shows the `SimulationAnswer`.
Guarantees: every mistake in the question is reported before the first simulation starts. On the page, all curves share
one time axis, so a shorter curve is a faster run.
"""

from __future__ import annotations

import html
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from sortedrl.errors import ConfigError, RunDirError
from sortedrl.ledger.atomic_file import atomic_file
from sortedrl.schedule import Strategy
from sortedrl.simulate.costs import load_cost
from sortedrl.simulate.run import PROMPT_TOKENS, knobs_for, simulate
from sortedrl.simulate.tools import draw_tools
from sortedrl.simulate.traces import load_trace
from sortedrl.telemetry.events import AttemptEnded, AttemptStarted, BatchTaken, Event, WeightsPublished
from sortedrl.telemetry.summary import Summary, number, share

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_COLUMNS = (
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


@dataclass(slots=True, kw_only=True, frozen=True)
class SimulationQuestion:
    """`slots` is per replica; `strategies` is a comma-separated list, or `all`."""

    trace: str
    strategies: str
    slots: int
    update_batch: int
    knobs: Mapping[str, Any]
    cost: str = "unit"
    hardware: str = "h100"
    model: str = "llama-3.1-8b"
    tensor_parallel: int = 1
    replicas: int = 1
    prompt_tokens: int = PROMPT_TOKENS
    divergence: float = 0.0
    drift: float = 1.0
    update_s: float | None = None
    samples: int | None = None
    seed: int = 0
    group_size: int = 1
    cap: int | None = None
    column: str = "length"
    draft_tokens: float = 1.0
    tools: str | None = None  # turns in tools, as `draw_tools` reads them

    @property
    def strategy_names(self) -> list[str]:
        if self.strategies.strip() == "all":
            return [strategy.value for strategy in Strategy]
        names = [name.strip() for name in self.strategies.split(",") if name.strip()]
        if not names:
            raise ConfigError(f"--strategy names no strategy: choose from {', '.join(Strategy)}, or all")
        return names


@dataclass(slots=True, kw_only=True, frozen=True)
class SimulationAnswer:
    summaries: list[Summary]
    notes: list[str]

    def table(self) -> Table:
        base = _base_of(self.summaries)
        caption = f"discarded: share of trained tokens; speed: relative to {escape(base.strategy)}"
        table = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, caption=caption, caption_justify="left"
        )
        for position, header in enumerate(_COLUMNS):
            table.add_column(header, justify="right" if position else "left", no_wrap=True)
        for summary in self.summaries:
            table.add_row(*(escape(cell) for cell in _cells(summary, base)))
        return table


def compare_strategies(question: SimulationQuestion, *, page: Path | None = None) -> SimulationAnswer:
    """Simulate every strategy of the question; with `page`, also write an HTML page that shows the slots in use."""
    names = question.strategy_names
    for name in names:
        knobs_for(name, question.update_batch, **question.knobs)
    trace = load_trace(
        question.trace,
        samples=question.samples,
        seed=question.seed,
        cap=question.cap,
        column=question.column,
        group_size=question.group_size,
    )
    cost = load_cost(
        question.cost,
        hardware=question.hardware,
        model=question.model,
        tensor_parallel=question.tensor_parallel,
        replicas=question.replicas,
        longest=question.prompt_tokens + trace.cap,
        draft_tokens=question.draft_tokens,
    )
    notes = [trace.note] if trace.note else []
    curves = [OccupancyCurve() for _ in names]
    tools = None if question.tools is None else draw_tools(question.tools, trace.lengths, question.seed)
    summaries = [
        simulate(
            trace,
            strategy=name,
            slots=question.slots * question.replicas,
            update_batch=question.update_batch,
            group_size=question.group_size,
            cost=cost,
            divergence=question.divergence,
            drift=question.drift,
            seed=question.seed,
            update_s=question.update_s,
            prompt_tokens=question.prompt_tokens,
            emit=curve.emit if page is not None else None,
            tools=tools,
            **question.knobs,
        )
        for name, curve in zip(names, curves, strict=True)
    ]
    if page is not None:
        costs = "unit costs" if question.cost == "unit" else f"{question.model} on {question.hardware}"
        text = f"{trace.source}: {trace.num_samples:,} answers, U = {question.update_batch}, {costs}"
        _write_page(page, summaries, curves, title="Slots in use, by strategy", text=text)
        notes.append(f"page: {page}")
    return SimulationAnswer(summaries=summaries, notes=notes)


# ---- table and page -------------------------------------------------------------------------------------------------


def _cells(summary: Summary, base: Summary) -> list[str]:
    """One row in the order of _COLUMNS; speed is relative to `base`, discarded tokens to trained tokens."""
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


def _base_of(summaries: Sequence[Summary]) -> Summary:
    """The run that speeds are relative to: `sync`, or the first one."""
    return next((summary for summary in summaries if summary.strategy == "sync"), summaries[0])


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


class OccupancyCurve:
    """The number of running slots over one run's virtual time, collected from its events.

    Guarantees: a bin's height is the mean number of running slots during the bin, so areas are slot-seconds. Memory is
    two numbers per attempt.
    """

    def __init__(self) -> None:
        self._times, self._changes = array("d"), array("l")
        self._num_paused = 0
        self.end = 0.0

    def emit(self, event: Event) -> None:
        self.end = max(self.end, event.t)
        if isinstance(event, AttemptStarted):
            self._change(event.t, 1)
        elif isinstance(event, AttemptEnded):
            self._change(event.t, -1)
        elif isinstance(event, BatchTaken):
            self._num_paused = event.num_paused
            self._change(event.t, -self._num_paused)
        elif isinstance(event, WeightsPublished):
            self._change(event.t, self._num_paused)
            self._num_paused = 0

    def _change(self, t: float, by: int) -> None:
        self._times.append(t)
        self._changes.append(by)

    def binned(self, num_bins: int) -> tuple[list[float], list[float]]:
        """Edges of equal bins from 0 to the end, and the mean number of running slots in each bin."""
        if not self._times:
            return [0.0, self.end], [0.0]
        times, changes = np.asarray(self._times), np.asarray(self._changes, dtype=np.int64)
        order = np.argsort(times, kind="stable")
        times, running = times[order], np.cumsum(changes[order])
        # Integrate up to each change, then interpolate to each edge: exact, because the curve is piecewise constant.
        area = np.concatenate([[0.0], np.cumsum(np.diff(times) * running[:-1])])
        edges = np.linspace(0.0, self.end, num_bins + 1)
        upto = np.interp(edges, times, area)
        return edges.tolist(), (np.diff(upto) / np.maximum(np.diff(edges), 1e-300)).tolist()


def _write_page(
    path: Path, summaries: Sequence[Summary], curves: Sequence[OccupancyCurve], *, title: str, text: str
) -> None:
    """Write the table and the curves into one HTML file that loads nothing and escapes the text it is given."""
    import plotly.io  # takes a second to import, and a comparison without a page does not need it
    from plotly.offline import get_plotlyjs

    chart = plotly.io.to_html(
        _occupancy_figure(summaries, curves),
        full_html=False,
        include_plotlyjs=False,
        div_id="occupancy",
        config={"responsive": True, "displayModeBar": False},
    )
    base = _base_of(summaries)
    head = "".join(f"<th>{html.escape(header)}</th>" for header in _COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(summary, base)) + "</tr>"
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
        "<p>Discarded tokens are a share of the trained tokens. Speed is relative to "
        f"{html.escape(base.strategy)}.</p></section>\n"
        "<section><p>Slots in use over time, for each strategy on the same time axis. White area under the dashed line "
        "is the bubble. A curve that ends earlier is a faster run. A busy slot may do work that is discarded later; "
        "goodput counts only the tokens that are trained.</p>\n"
        f"{chart}</section>\n</main>\n</body>\n</html>\n"
    )
    try:
        with atomic_file(path) as file:
            file.write(document)
    except OSError as error:
        raise RunDirError(f"cannot write {path}: {error.strerror}; create its folder or choose another") from error


def _occupancy_figure(summaries: Sequence[Summary], curves: Sequence[OccupancyCurve]) -> Figure:
    from plotly.subplots import make_subplots

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
