"""The charts with a row per slot or sample: slot timeline, life of cohorts, age of trained tokens.

`page.py` calls them once per run. Guarantees: the caption says how many bars are drawn. If a run has more bars than a
browser can draw quickly, both ends are drawn as bars and the whole run as shares of busy time. Nothing that a tool
returned is drawn, only names, counts and times of ours.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from sortedrl.telemetry.report.style import (
    INK,
    RULE,
    VERSION_COLOURS,
    Chart,
    add_title,
    add_verticals,
    styled,
)
from sortedrl.telemetry.sample_lives import SampleLife, TimelineBar, ToolBar
from sortedrl.telemetry.view import RunView

_VIEW_BARS = 240  # few enough to see single bars
_MAX_ROWS = 160  # samples
_MAX_TOOL_ROWS = 48  # trajectories in tools at the same time
_TOOL_COLOURS = {"lost": "#D55E00", "dropped": "#D55E00", "cut": "#D55E00"}  # by outcome: what was for nothing
_TOOL_COLOUR = "#b39ddb"


def timeline_chart(run: RunView) -> Chart:
    """Draw a row per slot with a bar per stay of a sample, coloured by version; mark interruptions and harvests.

    Below the slots, trajectories in tools have a row each.
    """
    bars, tools = list(run.bars), [bar for bar in run.tool_bars if bar.row < _MAX_TOOL_ROWS]
    figure = go.Figure()
    if not run.bars.is_whole:
        _add_shares(figure, run)
    _add_bars(figure, bars, run.seconds)
    num_rows = run.slots + max((bar.row + 2 for bar in tools), default=0)
    if tools:
        _add_tools(figure, tools, run)
    _add_verticals(figure, run, num_rows)
    marks = {"symbol": "line-ns", "size": 9, "line": {"color": "#000000", "width": 2.5}}
    continues = {"symbol": "triangle-right", "size": 7, "color": INK}
    for outcomes, marker in ((("interrupted", "cut", "failed"), marks), (("published",), continues)):
        cut = [bar for bar in bars if bar.outcome in outcomes]
        figure.add_scatter(
            x=[bar.end for bar in cut],
            y=[bar.slot for bar in cut],
            mode="markers",
            marker=marker,
            hoverinfo="skip",
        )
    views = _views(run)
    figure.update_xaxes(title_text="wall time, s", range=views["end"])
    figure.update_yaxes(title_text="slot", range=[num_rows - 0.4, -0.6], **_ticks(run.slots, num_rows))
    figure.update_layout(
        meta={"views": views, "view": "end"}, barmode="overlay", uniformtext={"mode": "hide", "minsize": 9}
    )
    shown = f"All {len(bars):,} bars are drawn. "
    if not run.bars.is_whole:
        half = len(run.bars.first)
        shown = (
            f"Of {run.bars.num_seen:,} bars the first and the last {half:,} are drawn; between them, grey shows "
            "the share of time in which a slot is busy. "
        )
    caption = (
        f"{shown}A bar is one stay of a sample in a slot under one version; its colour and number show the version "
        "(six colours repeat). Dotted line: harvest. Tick: the attempt was interrupted. Triangle: it continues "
        "in its slot under the next version. Drag to zoom; double-click to see the whole run."
    )
    if tools:
        caption += f" {_tool_caption(run)}"
    chart = styled(figure, height=min(max(17 * num_rows, 150), 640) + 100)
    return Chart(name=f"timeline-{run.position}", figure=chart, caption=caption)


def _add_bars(figure: go.Figure, bars: Sequence[TimelineBar], now: float) -> None:
    ends = [now if bar.end is None else bar.end for bar in bars]
    numbers = _numbers(bars)
    figure.add_bar(
        orientation="h",
        base=[round(bar.start, 5) for bar in bars],
        x=[round(max(end - bar.start, 0.0), 5) for bar, end in zip(bars, ends, strict=True)],
        y=[bar.slot for bar in bars],
        width=0.84,
        text=numbers,
        textposition="inside",
        insidetextanchor="start",
        textangle=0,
        textfont={"size": 10},
        marker={
            "color": [VERSION_COLOURS[bar.version % len(VERSION_COLOURS)] for bar in bars],
            "line": {"color": "#ffffff", "width": 0.6},
        },
        customdata=[
            [
                bar.sample,
                bar.attempt,
                bar.version,
                html.escape(bar.mode),
                html.escape(bar.outcome or "running"),
                bar.num_tokens,
            ]
            for bar in bars
        ],
        hovertemplate="sample %{customdata[0]}, attempt %{customdata[1]} (%{customdata[3]})<br>"
        "version %{customdata[2]}, %{customdata[5]} tokens, %{customdata[4]}<extra></extra>",
    )


def _add_tools(figure: go.Figure, bars: Sequence[ToolBar], run: RunView) -> None:
    ends = [run.seconds if bar.end is None else bar.end for bar in bars]
    figure.add_bar(
        orientation="h",
        base=[round(bar.start, 5) for bar in bars],
        x=[round(max(end - bar.start, 0.0), 5) for bar, end in zip(bars, ends, strict=True)],
        y=[run.slots + 1 + bar.row for bar in bars],
        width=0.5,
        meta={"tools": True},
        marker={
            "color": [_TOOL_COLOURS.get(bar.outcome, _TOOL_COLOUR) for bar in bars],
            "line": {"color": "#ffffff", "width": 0.6},
        },
        customdata=[
            [
                bar.sample,
                bar.turn + 1,
                bar.num_calls,
                bar.num_failed,
                html.escape(bar.outcome or "working"),
                round(end - bar.start, 4),
            ]
            for bar, end in zip(bars, ends, strict=True)
        ],
        hovertemplate="sample %{customdata[0]}, tools of turn %{customdata[1]}<br>%{customdata[2]} calls, "
        "%{customdata[3]} failed, %{customdata[4]}, %{customdata[5]:.3~g} s<extra></extra>",
    )


def _ticks(slots: int, num_rows: int) -> dict[str, Any]:
    """The ticks of the rows: numbers of slots, and the word for the rows below them."""
    step = max(slots // 8, 1)
    if num_rows == slots:
        return {"dtick": step}
    places = list(range(0, slots, step))
    return {"tickvals": [*places, slots + 1], "ticktext": [*map(str, places), "tools"]}


def _tool_caption(run: RunView) -> str:
    drawn = "all" if run.tool_bars.is_whole else f"the first and the last {len(run.tool_bars.first):,}"
    hidden = sum(bar.row >= _MAX_TOOL_ROWS for bar in run.tool_bars)
    left_out = f"; {hidden:,} of them in further rows are left out" if hidden else ""
    return (
        f"Below the slots, a narrow bar is the time that a trajectory's tools take between two turns ({drawn} of "
        f"{run.tool_bars.num_seen:,} are drawn{left_out}); red ones were for nothing. Click a bar to list the turns of "
        "its trajectory."
    )


def _numbers(bars: Sequence[TimelineBar]) -> list[str]:
    """Return a version number for bars near both ends, where the version in the slot changes, and "" elsewhere."""
    last: dict[int, int] = {}
    numbers = []
    for position, bar in enumerate(bars):
        is_near = min(position, len(bars) - 1 - position) < _VIEW_BARS
        is_other = last.get(bar.slot) != bar.version
        last[bar.slot] = bar.version
        numbers.append(str(bar.version) if is_near and is_other else "")
    return numbers


def _add_shares(figure: go.Figure, run: RunView) -> None:
    edges, shares = run.busy.heights(run.seconds)
    rows = len(shares)
    per_row = run.slots / rows
    figure.add_heatmap(
        x=np.array(edges),
        y=[row * per_row - 0.5 for row in range(rows + 1)],
        z=np.round(np.array(shares) / per_row, 3),
        colorscale=[[0, "#ffffff"], [1, "#9aa4b2"]],
        zmin=0,
        zmax=1,
        showscale=False,
        hovertemplate="busy %{z:.0%}<extra></extra>",
    )


def _add_verticals(figure: go.Figure, run: RunView, num_rows: int) -> None:
    """Mark harvests where bars are drawn."""
    gap = (0.0, 0.0)
    if not run.bars.is_whole:
        gap = (run.bars.first[-1].start, run.bars.last[0].start)
    inside = [t for t in run.harvests if not gap[0] < t < gap[1]]
    add_verticals(figure, inside, (-0.6, num_rows - 0.4), colour=INK, dash="dot")


def _views(run: RunView) -> dict[str, list[float]]:
    """Return the time ranges that the buttons select; at both ends single bars are visible."""
    bars = list(run.bars)
    seconds = max(run.seconds, 1e-9)
    first, last = bars[:_VIEW_BARS], bars[-_VIEW_BARS:]
    views = {"start": [0.0, max(s.start if s.end is None else s.end for s in first)]}
    views["end"] = [min(bar.start for bar in last), seconds]
    views["whole run"] = [0.0, seconds]
    return views


# ---- samples --------------------------------------------------------------------------------------------------------


def lives_chart(run: RunView) -> Chart:
    """Draw when each sample of the last cohorts was loaded, started, interrupted and trained."""
    lives = _last_cohorts(run)
    now = run.seconds
    figure = go.Figure()
    rows = range(len(lives))
    _add_lines(
        figure,
        [(life.loaded, now if life.started is None else life.started, row) for row, life in enumerate(lives)],
        RULE,
        1,
    )
    spans = [
        (life.started, now if life.trained is None else life.trained, row)
        for row, life in enumerate(lives)
        if life.started is not None
    ]
    _add_lines(figure, spans, "#56B4E9", 2)
    tools = [(bar, row) for row, life in enumerate(lives) for bar in life.tools]
    _add_lines(figure, [(bar.start, now if bar.end is None else bar.end, row) for bar, row in tools], _TOOL_COLOUR, 4)
    marks = (
        ("started", "circle-open", 5, "#0072B2", [(life.started, row) for row, life in enumerate(lives)]),
        (
            "interrupted",
            "line-ns",
            6,
            "#000000",
            [(t, row) for row, life in enumerate(lives) for t in life.interruptions],
        ),
        ("trained", "diamond", 6, "#D55E00", [(life.trained, row) for row, life in enumerate(lives)]),
    )
    for name, symbol, size, colour, points in marks:
        known = [(t, row) for t, row in points if t is not None]
        figure.add_scatter(
            x=[round(t, 4) for t, _ in known],
            y=[row for _, row in known],
            mode="markers",
            name=name,
            marker={"symbol": symbol, "size": size, "color": colour, "line": {"width": 1.5, "color": colour}},
            customdata=[[lives[row].sample] for _, row in known],
            hovertemplate=f"sample %{{customdata[0]}} {name}, %{{x:.4~g}} s<extra></extra>",
        )
    firsts = [row for row in rows if row == 0 or lives[row].cohort != lives[row - 1].cohort]
    figure.update_yaxes(
        range=[len(lives) - 0.5, -0.5],
        tickvals=firsts,
        ticktext=[f"cohort {lives[row].cohort}" for row in firsts],
        gridcolor=RULE,
    )
    figure.update_xaxes(title_text="wall time, s", range=[min(life.loaded for life in lives), max(now, 1e-9)])
    chart = styled(figure, height=min(max(4 * len(lives), 160), 620) + 110)
    shown = f"the last {len(lives):,} of {run.samples.num_loaded:,}" if len(lives) < run.samples.num_loaded else "all"
    caption = (
        f"One row per sample, {shown} in the order of loading. Grey: loaded, not started. Blue: from the start of its "
        "first attempt until it is trained. Open circle: started. Tick: interrupted. Diamond: trained."
        + (" Thick violet: its tools work." if tools else "")
    )
    return Chart(name=f"lives-{run.position}", figure=chart, caption=caption)


def _add_lines(figure: go.Figure, spans: Sequence[tuple[float, float, int]], colour: str, width: int) -> None:
    figure.add_scatter(
        x=[value for start, end, _ in spans for value in (round(start, 4), round(end, 4), None)],
        y=[value for _, _, row in spans for value in (row, row, None)],
        mode="lines",
        line={"color": colour, "width": width},
        hoverinfo="skip",
    )


def _last_cohorts(run: RunView) -> list[SampleLife]:
    """Return the most recent samples, as whole cohorts if more than one fits."""
    recent = list(run.samples.recent)
    lives = recent[-_MAX_ROWS:]
    if len(lives) < run.samples.num_loaded:
        whole = next((row for row, life in enumerate(lives) if life.cohort != lives[0].cohort), 0)
        lives = lives[whole:]
    return lives


def waits_chart(run: RunView) -> Chart:
    """Draw how long samples wait from load to training, by cohort."""
    points = sorted(run.samples.waits, key=lambda point: point.cohort)  # a later cohort may be trained first
    figure = go.Figure()
    x = [point.cohort for point in points]
    edge = {"mode": "lines", "line": {"width": 0, "color": "#56B4E9"}, "hoverinfo": "skip"}
    figure.add_scatter(x=x, y=[point.shortest for point in points], **edge)
    figure.add_scatter(
        x=x, y=[point.longest for point in points], fill="tonexty", fillcolor="rgba(86,180,233,0.3)", **edge
    )
    figure.add_scatter(
        x=x,
        y=[point.median for point in points],
        mode="lines",
        line={"color": "#0072B2", "width": 2},
        customdata=[[point.num_interrupted / point.num_samples] for point in points],
        hovertemplate="cohort %{x}: median %{y:.4~g} s, %{customdata[0]:.0%} interrupted<extra></extra>",
    )
    figure.update_xaxes(title_text="cohort")
    figure.update_yaxes(rangemode="tozero")
    add_title(figure, 1, "seconds from load to training")
    stride = run.samples.waits.stride
    caption = "Line: median of the cohort. Band: shortest to longest." + (
        f" A point stands for up to {stride} cohorts." if stride > 1 else ""
    )
    return Chart(name=f"waits-{run.position}", figure=styled(figure, height=220, top=34), caption=caption)


def ages_charts(run: RunView) -> list[Chart]:
    """Draw how many versions trained tokens lag behind, for the whole run and for its last samples.

    Returns no chart if no token lags behind.
    """
    most = max(run.staleness, default=0)
    rows = [row for row in run.samples.ages.rows if row.tokens.any()]
    if not most or not rows:
        return []
    width = run.samples.ages.width
    columns = max(int(np.flatnonzero(row.tokens)[-1]) for row in rows) + 1
    positions = np.arange(columns) * width + width / 2
    stride = run.samples.ages.rows.stride
    whole = _age_map(
        positions,
        [row.update for row in rows],
        np.array([_mean_ages(row.ages, row.tokens)[:columns] for row in rows]),
        most,
    )
    whole.update_yaxes(title_text="update")
    last = _age_map(positions, list(range(len(run.samples.trained))), _ages_by_sample(run, positions), most)
    last.update_yaxes(title_text="sample, in the order of training", showticklabels=False)
    joined = f" A row stands for up to {stride} updates." if stride > 1 else ""
    return [
        Chart(
            name=f"ages-{run.position}", figure=whole, caption=f"Whole run: mean age by update and position.{joined}"
        ),
        Chart(
            name=f"tokens-{run.position}",
            figure=last,
            caption=f"The last {len(run.samples.trained)} trained samples, one row each. Where the colour changes, the "
            "answer was interrupted and continued under later weights.",
        ),
    ]


def _age_map(positions: np.ndarray, rows: Sequence[int], ages: np.ndarray, most: int) -> go.Figure:
    figure = go.Figure()
    figure.add_heatmap(
        x=positions,
        y=rows,
        z=ages,
        colorscale="Viridis",
        reversescale=True,
        zmin=0,
        zmax=most,
        colorbar={"title": {"text": "versions<br>behind", "font": {"size": 11}}, "thickness": 10, "nticks": 6},
        hovertemplate="token %{x:.0f}: %{z:.2~f} versions behind<extra></extra>",
    )
    figure.update_xaxes(title_text="token of the answer", showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return styled(figure, height=360)


def _mean_ages(ages: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.round(np.divide(ages, tokens, out=np.full(len(ages), np.nan), where=tokens > 0), 3)


def _ages_by_sample(run: RunView, positions: np.ndarray) -> np.ndarray:
    table = np.full((len(run.samples.trained), len(positions)), np.nan)
    for row, (_, runs) in enumerate(run.samples.trained):
        ends = np.cumsum([count for _, count in runs])
        for column, position in enumerate(positions):
            at = int(np.searchsorted(ends, position, side="right"))
            if at < len(runs):
                table[row, column] = runs[at][0]
    return table
