"""The charts that compare runs: learning, slots, causes, lengths, staleness and replays; one function per figure.

`page.py` calls them; `timeline.py` has the charts with a row per slot or sample. Guarantees: text from a run is
escaped, and the caption says if a chart merges or leaves out data.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sortedrl.telemetry.report.style import (
    INK,
    RULE,
    Chart,
    add_title,
    add_verticals,
    faded,
    run_colour,
    run_dash,
    run_name,
    run_symbol,
    styled,
)
from sortedrl.telemetry.slot_time import MEANINGS, Cause
from sortedrl.telemetry.view import RunView

# Colour and hatching of each cause of slot time; hatching marks lost work.
CAUSE_STYLES = {
    Cause.TRAINED: ("#0072B2", ""),
    Cause.IN_FLIGHT: ("#56B4E9", ""),
    Cause.DISCARDED: ("#D55E00", "/"),
    Cause.RECOMPUTED: ("#E69F00", "\\"),
    Cause.PREFILL: ("#009E73", ""),
    Cause.OVERHEAD: ("#8fd1bd", ""),
    Cause.TAIL: ("#F0E442", ""),
    Cause.TOOL: ("#b39ddb", ""),
    Cause.REWARD: ("#CC79A7", ""),
    Cause.UPDATE: ("#7d8794", ""),
    Cause.PUBLISH: ("#a9b1bc", ""),
    Cause.SAVE: ("#c3cad3", ""),
    Cause.START_UP: ("#e1e5ea", ""),
}


def smoothing(runs: Sequence[RunView]) -> int:
    """Return how many points a smoothed line is a mean of, until the reader chooses: a cohort, or a part of the run."""
    return max(max(run.summary.cohort_batches or 4, len(run.updates) // 25) for run in runs)


def learning_chart(runs: Sequence[RunView], *, by_time: bool) -> Chart:
    """Draw reward, length and held-out accuracy, one under the other, against samples trained or wall time."""
    titles = ["mean reward of a batch", "mean answer length of a batch, tokens"]
    has_accuracy = any(len(run.evaluations) for run in runs)
    if has_accuracy:
        titles.append("held-out accuracy")
    figure = make_subplots(rows=len(titles), cols=1, shared_xaxes=True, vertical_spacing=0.09, subplot_titles=titles)
    for run in runs:
        points = run.updates.points
        x = [round(point.t, 3) if by_time else point.samples_trained for point in points]
        line = {"color": run_colour(run.position), "width": 2.5, "dash": run_dash(run.position)}
        series = ([point.reward for point in points], [point.mean_length for point in points])
        for row, values in enumerate(series, start=1):
            figure.add_scatter(
                x=x,
                y=[round(value, 5) for value in values],
                mode="lines" if len(values) > 1 else "markers",
                line=line,
                name=run_name(run),
                meta={"smooth": True},
                row=row,
                col=1,
            )
        if has_accuracy:
            _add_accuracy(figure, run, by_time=by_time)
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(title_text="wall time, s" if by_time else "samples trained", row=len(titles), col=1)
    stride = max(run.stride for run in runs)
    caption = "Thick line: smoothed. Thin line: every " + (
        "update." if stride == 1 else f"point, which is the mean of up to {stride} updates."
    )
    caption += " Filled marks: sampled accuracy. Open marks: greedy accuracy." if has_accuracy else ""
    name = "wall" if by_time else "samples"
    return Chart(name=name, figure=styled(figure, height=200 * len(titles) + 40, top=34), caption=caption)


def _add_accuracy(figure: go.Figure, run: RunView, *, by_time: bool) -> None:
    x = [point.t if by_time else point.samples_trained for point in run.evaluations]
    for greedy in (False, True):
        figure.add_scatter(
            x=x,
            y=[point.greedy if greedy else point.sampled for point in run.evaluations],
            mode="lines+markers",
            name=run_name(run) + (", greedy" if greedy else ", sampled"),
            line={"color": run_colour(run.position), "width": 1.5, "dash": "dot" if greedy else "solid"},
            marker={
                "size": 9,
                "symbol": run_symbol(run.position) + ("-open" if greedy else ""),
                "line": {"width": 2, "color": run_colour(run.position)},
            },
            cliponaxis=False,
            row=3,
            col=1,
        )


def occupancy_chart(runs: Sequence[RunView]) -> Chart:
    """Draw how many slots decode, wait for an update, or idle over time, with a row per run."""
    figure = make_subplots(rows=len(runs), cols=1, shared_xaxes=True, vertical_spacing=0.3 / max(len(runs), 2))
    longest = max(run.seconds for run in runs)
    for row, run in enumerate(runs, start=1):
        edges, (running, updating) = run.occupancy.heights(run.seconds)
        ends = np.array(edges)
        bars = {"x": (ends[:-1] + ends[1:]) / 2, "width": np.diff(ends), "row": row, "col": 1}
        for name, heights, colour in (
            ("decode", running, faded(run_colour(run.position), 0.75)),
            ("wait for an update", updating, RULE),
        ):
            figure.add_bar(
                y=np.round(heights, 3),
                marker={"color": colour, "line": {"width": 0}},
                hovertemplate=f"%{{x:.4~g}} s: %{{y:.1f}} slots {name}<extra></extra>",
                **bars,
            )
        ceiling = {"mode": "lines", "line": {"color": INK, "width": 1}, "hoverinfo": "skip"}
        figure.add_scatter(x=[0, run.seconds], y=[run.slots, run.slots], **ceiling, row=row, col=1)
        figure.update_yaxes(range=[0, run.slots * 1.04], row=row, col=1)
        add_title(figure, row, f"{run_name(run)}: slots of {run.slots}")
    figure.update_layout(barmode="stack", bargap=0)
    figure.update_xaxes(range=[0, longest])
    figure.update_xaxes(title_text="wall time, s", row=len(runs), col=1)
    caption = (
        "Averages over short intervals. Colour: slots that decode. Grey: slots that wait while weights are updated and "
        "published. Empty below the line: idle slots, the bubble."
    )
    return Chart(name="occupancy", figure=styled(figure, height=170 * len(runs) + 80, top=34), caption=caption)


def causes_chart(runs: Sequence[RunView]) -> Chart:
    """Draw all slot time of each run, divided by cause."""
    shown = [run for run in runs if run.slot_time]
    causes = [*Cause, *sorted({cause for run in shown for cause in run.slot_time} - {*Cause})]
    figure = go.Figure()
    for cause in causes:
        if isinstance(cause, Cause):
            meaning, (colour, hatch) = MEANINGS[cause], CAUSE_STYLES[cause]
        else:  # from a later version of this package
            meaning, colour, hatch = cause.replace("_", " "), "#ffffff", "."
        shares = [run.slot_time.get(cause, 0.0) for run in shown]
        if max(shares, default=0.0) < 0.0005:
            continue
        figure.add_bar(
            orientation="h",
            y=[run_name(run) for run in shown],
            x=shares,
            name=html.escape(meaning),
            text=[f"{share:.0%}" for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            marker={
                "color": colour,
                "line": {"color": "#ffffff", "width": 1},
                "pattern": {
                    "shape": hatch,
                    "fillmode": "overlay",
                    "fgcolor": "#ffffff",
                    "fgopacity": 0.7,
                    "size": 6,
                    "solidity": 0.15,
                },
            },
            hovertemplate=f"{html.escape(meaning)}: %{{x:.1%}}<extra>%{{y}}</extra>",
        )
    figure.update_layout(
        barmode="stack", bargap=0.35, uniformtext={"mode": "hide", "minsize": 10}, meta={"keepsColours": True}
    )
    figure.update_xaxes(tickformat=".0%", range=[0, 1.001], title_text="share of all slot time")
    figure.update_yaxes(autorange="reversed", showticklabels=len(shown) > 1)
    caption = "100 % is the number of slots times wall time. Hatched: work that was thrown away, or done again."
    return Chart(name="causes", figure=styled(figure, height=52 * len(shown) + 76), caption=caption)


def lengths_chart(runs: Sequence[RunView]) -> Chart:
    """Draw the lengths of the answers in each update's batch."""
    figure = make_subplots(rows=len(runs), cols=1, shared_xaxes=True, vertical_spacing=0.3 / max(len(runs), 2))
    for row, run in enumerate(runs, start=1):
        colour = run_colour(run.position)
        x = np.array([point.update for point in run.updates], dtype=float)
        x = np.append(x - run.stride + 0.5, x[-1] + 0.5)  # a step is as wide as the updates it stands for
        table = np.array([point.lengths for point in run.updates])
        # A logarithmic axis cannot show an empty answer.
        quantiles = np.maximum(np.vstack([table, table[-1:]]), 1.0).T
        for low, high, opacity in ((0, 4, 0.16), (1, 3, 0.32)):
            edge = {"mode": "lines", "line": {"width": 0, "color": colour, "shape": "hv"}, "hoverinfo": "skip"}
            figure.add_scatter(x=x, y=quantiles[low], **edge, row=row, col=1)
            figure.add_scatter(
                x=x, y=quantiles[high], fill="tonexty", fillcolor=faded(colour, opacity), **edge, row=row, col=1
            )
        line = {"color": colour, "width": 2, "shape": "hv"}
        figure.add_scatter(x=x, y=quantiles[2], mode="lines", line=line, name="median", row=row, col=1)
        if run.stride == 1 and run.cohort_updates.is_whole:
            span = (float(quantiles[0].min()), float(quantiles[4].max()))
            loads = [update - 0.5 for update in run.cohort_updates]
            add_verticals(figure, loads, span, row=row, col=1)
        add_title(figure, row, f"{run_name(run)}: answer tokens")
    figure.update_yaxes(type="log", dtick=1, minor={"dtick": "D1", "showgrid": False})
    figure.update_xaxes(title_text="update", row=len(runs), col=1)
    stride = max(run.stride for run in runs)
    caption = (
        "Line: median of the batch. Strong band: 10th to 90th percentile. Faint band: shortest to longest. The "
        "scale is logarithmic. "
        + ("Grey vertical lines: a cohort is loaded." if stride == 1 else f"A step stands for up to {stride} updates.")
    )
    return Chart(name="lengths", figure=styled(figure, height=200 * len(runs) + 80, top=34), caption=caption)


def staleness_chart(runs: Sequence[RunView]) -> Chart:
    """Draw how many versions the oldest token of a trained sample lags behind."""
    figure = go.Figure()
    for run in runs:
        total = max(run.staleness.total(), 1)
        values = sorted(run.staleness)
        shares = [run.staleness[value] / total for value in values]
        text = [f"{value:.1%}" for value in shares] if len(runs) * len(values) <= 12 else None
        figure.add_bar(
            x=values,
            y=shares,
            marker={"color": run_colour(run.position)},
            name=run_name(run),
            text=text,
            textposition="outside",
        )
    figure.update_layout(barmode="group", bargap=0.3)
    most = max((value for run in runs for value in run.staleness), default=0)
    figure.update_xaxes(title_text="versions behind", range=[-0.6, max(most, 3) + 0.6], dtick=max(most // 12, 1))
    figure.update_yaxes(tickformat=".0%", range=[0, 1.12], tickvals=[0, 0.25, 0.5, 0.75, 1])
    caption = (
        "Share of the trained samples. 0: every token was written or verified by the version that was being updated."
    )
    return Chart(name="staleness", figure=styled(figure, height=280), caption=caption)


def replay_chart(runs: Sequence[RunView]) -> Chart:
    """Draw the share of cached tokens that replays accepted, by update."""
    figure = go.Figure()
    for run in runs:
        points = run.replays.points
        for name, dash, values in (
            ("mean over replays", "solid", [point.share_sum / point.num_replays for point in points]),
            ("weighted by tokens", "dot", [point.accepted / point.cached for point in points]),
        ):
            figure.add_scatter(
                x=[point.update for point in points],
                y=values,
                mode="lines",
                line={"color": run_colour(run.position), "width": 2, "dash": dash},
                name=f"{run_name(run)}, {name}",
                customdata=[[point.num_replays] for point in points],
                hovertemplate="%{y:.1%} of %{customdata[0]} replays",
            )
    figure.update_xaxes(title_text="update")
    figure.update_yaxes(tickformat=".0%", range=[0, 1.04])
    caption = (
        "Share of cached tokens that the replays before each update accepted. Solid line: mean over replays. Dotted "
        "line: weighted by tokens."
    )
    return Chart(name="replay", figure=styled(figure, height=280), caption=caption)
