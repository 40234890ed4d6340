"""The learner's curves and those of the machine: one small chart per figure, with all runs on the same axes.

`page.py` calls `learner_charts` and `machine_charts`. The browser draws the smoothed line (`assets/page.js`): a trace
with `meta.smooth` holds every point, and the reader chooses how many points a mean covers. Guarantees: names of metrics
and functions are escaped and cut; a figure that no run has gets no chart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sortedrl.reward.worker import printable
from sortedrl.telemetry.curves import MachinePoint, UpdatePoint
from sortedrl.telemetry.report.style import Chart, run_colour, run_dash, run_name, small_figure
from sortedrl.telemetry.view import RunView

Trace = dict[str, Any]
_HEIGHT = 210
_MAX_OTHERS = 12  # charts of metrics that this package does not know: those of a user's algorithm
_MAX_FUNCTIONS = 8
_MAX_NAME = 60


@dataclass(slots=True, kw_only=True, frozen=True)
class LearnerFigure:
    """What one chart shows."""

    name: str  # of the chart
    title: str
    caption: str = ""
    metric: str = ""  # of the learner


FIGURES = (
    LearnerFigure(name="loss", metric="loss", title="loss"),
    LearnerFigure(name="grad-norm", metric="grad_norm", title="gradient norm", caption="Before clipping."),
    LearnerFigure(
        name="kl-behaviour",
        metric="kl_behaviour",
        title="KL to the policy that sampled",
        caption="The k3 estimate, mean over tokens: how far the updated policy is from the one that wrote the tokens.",
    ),
    LearnerFigure(
        name="kl-reference",
        metric="kl_reference",
        title="KL to the reference model",
        caption="Mean over tokens, by learner.kl_estimator.",
    ),
    LearnerFigure(
        name="entropy", metric="entropy", title="entropy", caption="Of the next token, nats, mean over tokens."
    ),
    LearnerFigure(
        name="clip",
        metric="clip_fraction",
        title="share of clipped tokens",
        caption="Tokens whose gradient is clipped.",
    ),
    LearnerFigure(
        name="ratio",
        metric="ratio_mean",
        title="ratio",
        caption="Probability under the updated policy over that when sampled. Line: mean. Dotted: 5th and 95th "
        "percentile.",
    ),
    LearnerFigure(
        name="mismatch",
        metric="mismatch_kl",
        title="mismatch of engine and trainer",
        caption="The same KL on tokens that the current version wrote, before the update's first step: both should "
        "give them the same probability.",
    ),
    LearnerFigure(
        name="mismatch-log-ratio",
        metric="mismatch_mean",
        title="mismatch of log-probs",
        caption="On the same tokens. Line: mean of the absolute difference. Dotted: the largest.",
    ),
    LearnerFigure(
        name="masked",
        metric="mask_fraction",
        title="share of masked tokens",
        caption="Tokens that learner.importance_mask leaves out.",
    ),
    LearnerFigure(name="lr", metric="lr", title="learning rate"),
    LearnerFigure(name="truncated", metric="truncated_fraction", title="share of truncated answers"),
    LearnerFigure(
        name="advantage", metric="advantage_std", title="spread of advantages", caption="Standard deviation."
    ),
    LearnerFigure(
        name="effective",
        metric="effective_sample_share",
        title="effective sample share",
        caption="1: all samples of an update weigh the same.",
    ),
)
# Metrics that another figure shows already, or that are counts of little interest over time.
_SHOWN_ELSEWHERE = frozenset(
    {figure.metric for figure in FIGURES}
    | {"reward_mean", "reward_std", "advantage_mean", "advantage_max", "zero_advantage_fraction", "num_tokens"}
    | {"learned_tokens", "computed_tokens", "masked_samples", "filtered_samples", "skipped_steps", "kl_behaviour_k1"}
    | {"ratio_p05", "ratio_p50", "ratio_p95", "mismatch_max"}
)
_EDGES = {"ratio": ("ratio_p05", "ratio_p95"), "mismatch-log-ratio": ("mismatch_max",)}  # by chart
_QUIET_PREFIXES = ("degenerate_", "kl_behaviour_staleness_")


def learner_charts(runs: Sequence[RunView]) -> list[Chart]:
    """Draw what the learner reports, against samples trained; then rewards by function and lengths by quantile."""
    found = [chart for figure in FIGURES if (chart := _metric_chart(runs, figure)) is not None]
    found += [_quantile_chart(runs), *_function_charts(runs)]
    for number, metric in enumerate(_other_metrics(runs)):
        figure = LearnerFigure(name=f"other-{number}", metric=metric, title=printable(metric[:_MAX_NAME]))
        if (chart := _metric_chart(runs, figure)) is not None:
            found.append(chart)
    return found


def _other_metrics(runs: Sequence[RunView]) -> list[str]:
    names = dict.fromkeys(name for run in runs for point in run.updates.points[-8:] for name in point.metrics)
    return [name for name in names if name not in _SHOWN_ELSEWHERE and not name.startswith(_QUIET_PREFIXES)][
        :_MAX_OTHERS
    ]


def _metric_chart(runs: Sequence[RunView], figure: LearnerFigure) -> Chart | None:
    drawn: list[Trace] = []
    for run in runs:
        _add_curve(drawn, run, _of_metric(figure.metric))
        for metric in _EDGES.get(figure.name, ()):
            _add_curve(drawn, run, _of_metric(metric), is_edge=True)
    if not drawn:
        return None
    return _chart(drawn, f"learner-{figure.name}", figure.title, figure.caption)


def _function_charts(runs: Sequence[RunView]) -> list[Chart]:
    names = list(dict.fromkeys(name for run in runs for point in run.updates for name in point.rewards))
    charts = []
    for number, name in enumerate(names[:_MAX_FUNCTIONS]):
        drawn: list[Trace] = []
        for run in runs:
            _add_curve(drawn, run, _of_function(name))
        title = f"reward by {printable(name[:_MAX_NAME])}"
        charts.append(_chart(drawn, f"function-{number}", title, "Mean of the batch, before reward.weights."))
    return charts


def _quantile_chart(runs: Sequence[RunView]) -> Chart:
    drawn: list[Trace] = []
    for run in runs:
        _add_curve(drawn, run, lambda point: point.lengths[2])
        for quantile in (1, 3):
            _add_curve(drawn, run, _of_length(quantile), is_edge=True)
    caption = "Line: median of the batch. Dotted: 10th and 90th percentile."
    return _chart(drawn, "learner-lengths", "answer length, tokens", caption)


def _of_metric(name: str) -> Callable[[UpdatePoint], float | None]:
    return lambda point: _mean(point.metrics.get(name))


def _of_function(name: str) -> Callable[[UpdatePoint], float | None]:
    return lambda point: _mean(point.rewards.get(name))


def _of_length(quantile: int) -> Callable[[UpdatePoint], float]:
    return lambda point: point.lengths[quantile]


def _mean(found: tuple[float, int] | None) -> float | None:
    return found[0] / found[1] if found is not None and found[1] else None


def _add_curve(
    traces: list[Trace], run: RunView, value: Callable[[UpdatePoint], float | None], *, is_edge: bool = False
) -> None:
    """Add one run's curve, if it has any values. An edge is a thin dotted line beside the curve."""
    points = [(point.samples_trained, value(point)) for point in run.updates]
    known = [(x, _short(y)) for x, y in points if y is not None]
    if not known:
        return
    traces.append(
        {
            "type": "scatter",
            "x": [x for x, _ in known],
            "y": [y for _, y in known],
            "mode": "lines" if len(known) > 1 else "markers",
            "name": run_name(run),
            "line": {
                "color": run_colour(run.position),
                "width": 1 if is_edge else 2,
                "dash": "dot" if is_edge else run_dash(run.position),
            },
            "meta": {"smooth": True},
            **({"hoverinfo": "skip"} if is_edge else {"hovertemplate": "%{x:,} samples: %{y:.4~g}"}),
        }
    )


def _short(value: float) -> float:
    """Round to five digits, which is more than a chart shows and half the size of the page."""
    return float(f"{value:.5g}")


def _chart(traces: list[Trace], name: str, title: str, caption: str) -> Chart:
    is_negative = any(value < 0 for trace in traces for value in trace["y"])
    figure = small_figure(
        traces,
        height=_HEIGHT,
        bottom=26,  # the section says what the axis is
        xaxis={"rangemode": "tozero", "nticks": 5},
        yaxis={"nticks": 5, "exponentformat": "power", "rangemode": "normal" if is_negative else "nonnegative"},
    )
    return Chart(name=name, figure=figure, caption=caption, title=title)


# ---- the machine ----------------------------------------------------------------------------------------------------


def machine_charts(runs: Sequence[RunView]) -> list[Chart]:
    """Draw load, memory and free disk against wall time."""
    figures: tuple[tuple[str, str, str, Callable[[MachinePoint], float | None]], ...] = (
        ("cores", "cores that the trainer uses", "", lambda point: point.cores_used),
        (
            "load",
            "load of the machine",
            "Processes that run or wait for a core, mean over a minute.",
            lambda point: point.load,
        ),
        ("memory", "memory of the trainer, GB", "Without worker processes.", lambda point: _gb(point.process_bytes)),
        ("available", "memory that is free, GB", "Of the whole machine.", lambda point: _gb(point.available_bytes)),
        ("gpu", "GPU memory of the trainer, GB", "", lambda point: _gb(point.gpu_bytes)),
        ("disk", "free disk, GB", "On the disk of the run.", lambda point: _gb(point.disk_free_bytes)),
    )
    return [chart for figure in figures if (chart := _machine_chart(runs, *figure)) is not None]


def _machine_chart(
    runs: Sequence[RunView], name: str, title: str, caption: str, value: Callable[[MachinePoint], float | None]
) -> Chart | None:
    traces = []
    for run in runs:
        known = [(round(point.t, 2), _short(y)) for point in run.machine if (y := value(point)) is not None]
        if known:
            colour = run_colour(run.position)
            traces.append(
                {
                    "type": "scatter",
                    "x": [x for x, _ in known],
                    "y": [y for _, y in known],
                    "mode": "lines+markers" if len(known) < 40 else "lines",
                    "marker": {"size": 5, "color": colour},
                    "name": run_name(run),
                    "line": {"color": colour, "width": 2, "dash": run_dash(run.position)},
                    "hovertemplate": "%{x:.4~g} s: %{y:.4~g}",
                }
            )
    if not traces:
        return None
    figure = small_figure(
        traces,
        height=_HEIGHT,
        bottom=44,
        xaxis={
            "rangemode": "tozero",
            "nticks": 5,
            "title": {"text": "wall time, s", "standoff": 8, "font": {"size": 12}},
        },
        yaxis={"rangemode": "tozero", "nticks": 5},
    )
    return Chart(name=f"machine-{name}", figure=figure, caption=caption, title=title)


def _gb(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 1e9
