"""The charts of the report: each function turns run histories into one plotly figure.

Called by `report.py` only. What it keeps true: colours are told apart by colour-blind readers (Okabe and Ito's palette,
and a dash per run besides); text that comes from a run is escaped; a chart that leaves data out has a caption that
says so.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sortedrl.telemetry.history import Attempt, RunHistory, mean_overlap

RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("solid", "dash", "dot", "dashdot")
# Neighbours in this order differ in lightness too, so that a change of version shows in grey print.
VERSION_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#56B4E9")
_INK, _GRID, _IDLE, _UPDATING = "#1b2430", "#e6e9ee", "#ffffff", "#b4bcc8"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_NUM_BINS = 240
MAX_ATTEMPTS = 4000
_VIEW_ATTEMPTS = 320


@dataclass(slots=True, kw_only=True, frozen=True)
class Chart:
    figure: go.Figure
    caption: str = ""  # plain text


def run_colour(position: int) -> str:
    return RUN_COLOURS[position % len(RUN_COLOURS)]


def run_dash(position: int) -> str:
    """Colours come round after six runs; from the second run on the dash differs too."""
    return DASHES[position % len(DASHES)]


def learning_chart(runs: Sequence[RunHistory], *, by_time: bool) -> Chart:
    """Reward, length and held-out accuracy, one under the other, against samples trained or wall time."""
    titles = ["mean reward of a batch", "mean answer length of a batch, tokens"]
    has_accuracy = any(run.evaluations for run in runs)
    if has_accuracy:
        titles.append("held-out accuracy")
    figure = make_subplots(rows=len(titles), cols=1, shared_xaxes=True, vertical_spacing=0.09, subplot_titles=titles)
    window = max(max(run.summary.cohort_batches or 4, len(run.updates) // 25) for run in runs)
    for position, run in enumerate(runs):
        line = {"color": run_colour(position), "width": 2.5, "dash": run_dash(position)}
        x = [point.t if by_time else point.samples_trained for point in run.updates]
        for row, values in enumerate(
            ([point.reward for point in run.updates], [point.mean_length for point in run.updates]), start=1
        ):
            faint = {"color": run_colour(position), "width": 1}
            figure.add_scatter(x=x, y=values, line=faint, opacity=0.28, hoverinfo="skip", row=row, col=1)
            figure.add_scatter(x=x, y=_trailing_mean(values, window), line=line, name=_name(run), row=row, col=1)
        if has_accuracy:
            _add_accuracy(figure, run, position, by_time=by_time)
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(title_text="wall time, s" if by_time else "samples trained", row=len(titles), col=1)
    caption = f"Thick: mean over the last {window} updates. Faint: every update." + (
        " Filled: sampled accuracy. Open: greedy." if has_accuracy else ""
    )
    return Chart(figure=_styled(figure, height=210 * len(titles) + 40), caption=caption)


def _add_accuracy(figure: go.Figure, run: RunHistory, position: int, *, by_time: bool) -> None:
    x = [t if by_time else event.samples_trained for t, event in run.evaluations]
    for greedy in (False, True):
        y = [event.greedy_accuracy if greedy else event.sampled_accuracy for _, event in run.evaluations]
        figure.add_scatter(
            x=x,
            y=y,
            mode="lines+markers",
            name=_name(run) + (", greedy" if greedy else ", sampled"),
            line={"color": run_colour(position), "width": 1.5, "dash": "dot" if greedy else "solid"},
            marker={
                "size": 9,
                "symbol": "circle-open" if greedy else "circle",
                "line": {"width": 2, "color": run_colour(position)},
            },
            cliponaxis=False,
            row=3,
            col=1,
        )


def occupancy_chart(runs: Sequence[RunHistory]) -> Chart:
    """What the slots did over time, a row per run on one clock: decode, stand still for an update, idle."""
    titles = [_name(run) for run in runs]
    figure = make_subplots(rows=len(runs), cols=1, shared_xaxes=True, vertical_spacing=0.3 / max(len(runs), 2))
    longest = max(run.seconds for run in runs)
    for row, (run, title) in enumerate(zip(runs, titles, strict=True), start=1):
        edges = np.linspace(0.0, max(run.seconds, 1e-9), _NUM_BINS + 1)
        running = mean_overlap([(a.start, a.end) for a in run.attempts], edges)
        updating = np.minimum(mean_overlap(run.updating, edges) * run.slots, run.slots - running)
        bars = {"x": (edges[:-1] + edges[1:]) / 2, "width": np.diff(edges), "row": row, "col": 1}
        colour = run_colour(row - 1)
        figure.add_bar(y=running.round(3), marker={"color": colour, "line": {"width": 0}}, name="running", **bars)
        figure.add_bar(y=updating.round(3), marker={"color": _UPDATING, "line": {"width": 0}}, name="updating", **bars)
        ceiling = {"mode": "lines", "line": {"color": _INK, "width": 1}, "hoverinfo": "skip"}
        figure.add_scatter(x=[0, run.seconds], y=[run.slots, run.slots], **ceiling, row=row, col=1)
        figure.update_yaxes(range=[0, run.slots * 1.04], row=row, col=1)
        _title(figure, row, f"{title}: slots of {run.slots}")
    figure.update_layout(barmode="stack", bargap=0)
    figure.update_xaxes(range=[0, longest])
    figure.update_xaxes(title_text="wall time, s", row=len(runs), col=1)
    caption = (
        f"Time averages over {_NUM_BINS} intervals a run. Colour: slots that run. Grey: nothing runs, because weights "
        "are being updated and published. White below the line: the bubble."
    )
    return Chart(figure=_styled(figure, height=190 * len(runs) + 70), caption=caption)


def timeline_chart(run: RunHistory) -> Chart:
    """A row per slot, a bar per attempt, coloured by version; interruptions and harvests marked."""
    attempts, is_window = _timeline_window(run.attempts)
    first, last = attempts[0].start, max(attempt.end for attempt in attempts)
    figure = go.Figure()
    figure.add_bar(
        orientation="h",
        base=[round(a.start, 5) for a in attempts],
        x=[round(a.end - a.start, 5) for a in attempts],
        y=[a.slot for a in attempts],
        width=0.84,
        marker={
            "color": [VERSION_COLOURS[a.version % len(VERSION_COLOURS)] for a in attempts],
            "line": {"color": "#ffffff", "width": 0.6},
        },
        customdata=[
            [a.sample, a.attempt, a.version, html.escape(a.mode), html.escape(a.outcome or "running"), a.num_tokens]
            for a in attempts
        ],
        hovertemplate="sample %{customdata[0]}, attempt %{customdata[1]} (%{customdata[3]})<br>"
        "version %{customdata[2]}, %{customdata[5]} tokens, %{customdata[4]}<extra></extra>",
    )
    harvests = [point.taken for point in run.updates if first <= point.taken <= last]
    _add_verticals(figure, harvests, (-0.6, run.slots - 0.4), colour=_INK, dash="dot")
    cut = [a for a in attempts if a.outcome == "interrupted"]
    figure.add_scatter(
        x=[a.end for a in cut],
        y=[a.slot for a in cut],
        mode="markers",
        marker={"symbol": "line-ns", "size": 9, "line": {"color": "#000000", "width": 2.5}},
        hoverinfo="skip",
    )
    low, high = _view(attempts)
    figure.update_xaxes(title_text="wall time, s", range=[low, high])
    figure.update_yaxes(title_text="slot", range=[run.slots - 0.4, -0.6], dtick=max(run.slots // 8, 1), zeroline=False)
    shown = (
        f"{len(attempts):,} of {len(run.attempts):,} attempts are drawn, those from {first:,.1f} to {last:,.1f} s. "
        if is_window
        else f"All {len(attempts):,} attempts are drawn. "
    )
    caption = (
        f"{shown}The view opens on {low:,.1f} to {high:,.1f} s; double-click for all, drag to zoom. A bar is an "
        "attempt, or its part between two updates, its colour the version of the weights (six colours in turn). "
        "Dotted: harvests. A black tick ends an interrupted attempt."
    )
    return Chart(figure=_styled(figure, height=min(18 * run.slots, 620) + 110), caption=caption)


def _timeline_window(attempts: Sequence[Attempt]) -> tuple[Sequence[Attempt], bool]:
    """The attempts in the middle of the run, as many as a browser draws with ease."""
    if len(attempts) <= MAX_ATTEMPTS:
        return attempts, False
    start = (len(attempts) - MAX_ATTEMPTS) // 2
    return attempts[start : start + MAX_ATTEMPTS], True


def _view(attempts: Sequence[Attempt]) -> tuple[float, float]:
    """From the middle on, so many attempts that single bars can be seen."""
    start = max((len(attempts) - _VIEW_ATTEMPTS) // 2, 0)
    seen = attempts[start : start + _VIEW_ATTEMPTS]
    return seen[0].start, max(attempt.end for attempt in seen)


def lengths_chart(runs: Sequence[RunHistory]) -> Chart:
    """The micro-curriculum: how long the answers of each update's batch are."""
    figure = make_subplots(rows=len(runs), cols=1, shared_xaxes=True, vertical_spacing=0.3 / max(len(runs), 2))
    for row, run in enumerate(runs, start=1):
        colour = run_colour(row - 1)
        x = np.array([point.update for point in run.updates])
        x = np.append(x - 0.5, x[-1] + 0.5)  # a step is as wide as its update
        quantiles = np.array([np.quantile(point.lengths, [0.0, 0.1, 0.5, 0.9, 1.0]) for point in run.updates])
        quantiles = np.maximum(
            np.vstack([quantiles, quantiles[-1:]]), 1.0
        ).T  # an empty answer has no place on a logarithmic axis
        for low, high, opacity in ((0, 4, 0.16), (1, 3, 0.32)):
            edge = {"mode": "lines", "line": {"width": 0, "color": colour, "shape": "hv"}, "hoverinfo": "skip"}
            figure.add_scatter(x=x, y=quantiles[low], **edge, row=row, col=1)
            figure.add_scatter(
                x=x, y=quantiles[high], fill="tonexty", fillcolor=_faded(colour, opacity), **edge, row=row, col=1
            )
        line = {"color": colour, "width": 2, "shape": "hv"}
        figure.add_scatter(x=x, y=quantiles[2], mode="lines", line=line, name="median", row=row, col=1)
        _add_verticals(
            figure,
            [update - 0.5 for update in run.cohort_updates],
            (float(quantiles[0].min()), float(quantiles[4].max())),
            row=row,
            col=1,
        )
        _title(figure, row, f"{_name(run)}: answer tokens")
    figure.update_yaxes(type="log", dtick=1, minor={"dtick": "D1", "showgrid": False})
    figure.update_xaxes(title_text="update", row=len(runs), col=1)
    caption = (
        "Line: median of the batch. Bands: 10th to 90th percentile, and shortest to longest. Grey verticals: a cohort "
        "is loaded. Lengths on a logarithmic scale."
    )
    return Chart(figure=_styled(figure, height=220 * len(runs) + 70), caption=caption)


def staleness_chart(runs: Sequence[RunHistory]) -> Chart:
    """How many versions the oldest token of a trained sample lags behind."""
    figure = go.Figure()
    for position, run in enumerate(runs):
        total = max(run.staleness.total(), 1)
        values = sorted(run.staleness)
        shares = [run.staleness[value] / total for value in values]
        text = [f"{value:.1%}" for value in shares] if len(runs) * len(values) <= 12 else None
        figure.add_bar(
            x=values,
            y=shares,
            marker={"color": run_colour(position)},
            name=_name(run),
            text=text,
            textposition="outside",
        )
    figure.update_layout(barmode="group", bargap=0.3)
    most = max((value for run in runs for value in run.staleness), default=0)
    figure.update_xaxes(title_text="versions behind", range=[-0.6, max(most, 3) + 0.6], dtick=max(most // 12, 1))
    figure.update_yaxes(tickformat=".0%", range=[0, 1.12], tickvals=[0, 0.25, 0.5, 0.75, 1])
    caption = (
        "Share of the trained samples. 0: every token was sampled, or verified, by the weights in force at the update."
    )
    return Chart(figure=_styled(figure, height=300), caption=caption)


def replay_chart(runs: Sequence[RunHistory]) -> Chart:
    """How much of their cached tokens replays kept, update by update."""
    figure = go.Figure()
    for position, run in enumerate(runs):
        if not run.replays:
            continue
        x = [point.update for point in run.replays]
        colour = run_colour(position)
        counts = [[point.num_replays] for point in run.replays]
        for name, dash, values in (
            ("mean over replays", "solid", [point.share for point in run.replays]),
            ("weighted by tokens", "dot", [point.token_share for point in run.replays]),
        ):
            figure.add_scatter(
                x=x,
                y=values,
                mode="lines",
                line={"color": colour, "width": 2, "dash": dash},
                name=f"{_name(run)}, {name}",
                customdata=counts,
                hovertemplate="%{y:.1%} of %{customdata[0]} replays",
            )
    figure.update_xaxes(title_text="update")
    figure.update_yaxes(tickformat=".0%", range=[0, 1.04])
    caption = (
        "Share of cached tokens accepted by the replays before each update. Solid: mean over replays. Dotted: weighted "
        "by tokens."
    )
    return Chart(figure=_styled(figure, height=300), caption=caption)


# ---- looks ----------------------------------------------------------------------------------------------------------


def _styled(figure: go.Figure, *, height: int) -> go.Figure:
    """Runs are told apart by the page's own key, so that no legend eats the width of a phone."""
    axis = {"gridcolor": _GRID, "linecolor": _UPDATING, "zeroline": False, "automargin": True, "ticks": ""}
    figure.update_layout(
        template="none",
        height=height,
        showlegend=False,
        hovermode="closest",
        margin={"l": 44, "r": 12, "t": 34, "b": 44},
        font={"family": _FONT, "size": 12, "color": _INK},
        paper_bgcolor="#ffffff",
        plot_bgcolor=_IDLE,
        dragmode="zoom",
    )
    figure.update_xaxes(**axis, title_standoff=8, title_font_size=12)
    figure.update_yaxes(**axis, title_standoff=4, title_font_size=12)
    figure.update_annotations(font_size=12.5, x=0, xanchor="left")
    return figure


def _title(figure: go.Figure, row: int, text: str) -> None:
    """A title at the left above one row of subplots."""
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


def _add_verticals(
    figure: go.Figure,
    xs: Sequence[float],
    span: tuple[float, float],
    *,
    colour: str = _UPDATING,
    dash: str = "solid",
    **where: int,
) -> None:
    """Vertical lines as one trace: a shape each would take plotly seconds for a long run."""
    figure.add_scatter(
        x=[value for x in xs for value in (x, x, None)],
        y=[value for _ in xs for value in (*span, None)],
        mode="lines",
        line={"color": colour, "width": 1, "dash": dash},
        hoverinfo="skip",
        **where,
    )


def _name(run: RunHistory) -> str:
    return html.escape(run.name)


def _trailing_mean(values: Sequence[float], window: int) -> list[float]:
    total = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return ((total[ends] - total[starts]) / (ends - starts)).tolist()


def _faded(colour: str, opacity: float) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
