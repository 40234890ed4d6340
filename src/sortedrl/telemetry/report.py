"""`report.html`: one or several runs on one page that needs no network.

Called at the end of a run and by the command line; reads run directories only. What it keeps true: the file holds all
it needs, and the page forbids itself to load anything; every string that comes from a run is escaped; a figure that was
estimated or left out is said to be.
"""

from __future__ import annotations

import html
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import plotly.io
from plotly.offline import get_plotlyjs

from sortedrl.errors import RunDirError
from sortedrl.telemetry.charts import (
    Chart,
    learning_chart,
    lengths_chart,
    occupancy_chart,
    replay_chart,
    run_colour,
    staleness_chart,
    timeline_chart,
)
from sortedrl.telemetry.history import RunHistory, read_history
from sortedrl.telemetry.summary import Summary, before_after, number, share

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'"
)

_CSS = """
:root { color-scheme: light; --ink: #1b2430; --soft: #5a6675; --rule: #dfe3e9; }
* { box-sizing: border-box; }
body { margin: 0; background: #f5f6f8; color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 56px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.12rem; margin: 0 0 2px; }
p { margin: 0 0 8px; max-width: 90ch; }
.caption { max-width: 110ch; }
.soft, .caption { color: var(--soft); font-size: .875rem; }
.card { background: #fff; border: 1px solid var(--rule); border-radius: 10px; padding: 18px 18px 12px;
  margin-top: 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(148px, 1fr)); gap: 12px; margin-top: 18px; }
.tile { background: #fff; border: 1px solid var(--rule); border-radius: 10px; padding: 12px 14px; }
.tile b { display: block; font-size: 1.15rem; line-height: 1.4; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.tile span { color: var(--soft); font-size: .8rem; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 8px 24px; }
.pair > div, .chart { min-width: 0; }
.key { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: .875rem; margin: 4px 0 6px; overflow-wrap: anywhere; }
.key i { display: inline-block; width: 18px; height: 10px; border-radius: 3px; margin-right: 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: min(100%, 420px); }
.pair table { width: 100%; }
th, td { text-align: right; padding: 5px 12px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; font-weight: 500; white-space: normal; min-width: 8.5em;
  position: sticky; left: 0; background: #fff; }
thead th { font-weight: 650; vertical-align: bottom; white-space: normal; overflow-wrap: anywhere; min-width: 7.5em; }
.note { border-left: 4px solid #e69f00; padding-left: 12px; margin-top: 14px; }
dl { margin: 6px 0 0; font-size: .9rem; }
dt { font-weight: 650; }
dd { margin: 0 0 8px; color: var(--soft); max-width: 78ch; }
@media (max-width: 860px) { .pair { grid-template-columns: 1fr; } }
@media (max-width: 560px) { main { padding: 18px 10px 40px; } .card { padding: 14px 10px 8px; border-radius: 8px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 8px; } .tile b { font-size: 1.05rem; } th, td { padding: 5px 8px; } }
@media print { body { background: #fff; font-size: 12px; } main { max-width: none; padding: 0; }
  .card, .tile { border-color: #ccc; break-inside: avoid; } }
"""

# A finger that scrolls the page must not be caught by a chart that wants to zoom.
_TOUCH = """if (matchMedia("(pointer: coarse)").matches)
  document.querySelectorAll(".js-plotly-plot").forEach(chart => Plotly.relayout(chart, {dragmode: false}));"""

_WORDS = (
    ("bubble", "Share of slot time in which a slot idles, while answers are being written. Updates do not count."),
    (
        "goodput",
        "Share of slot time that decoded tokens which were then trained. Work that is thrown away does not count.",
    ),
    ("speed", "Trained tokens per second of wall time, updates and weight publications included."),
    ("staleness", "Version in force when a sample is trained, minus the version of its oldest token."),
    ("harvest", "The moment at which an update batch is taken."),
    (
        "replay",
        "Cached tokens are checked under new weights and kept up to the first that those would write otherwise.",
    ),
    ("ledger", "Samples loaded and trained, counted from the events: none may be lost, none trained twice."),
)


def write_report(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Write one page about these runs to `out`, and return its path."""
    if not run_dirs:
        raise RunDirError("a report needs at least one run directory; name one")
    runs = [read_history(run_dir) for run_dir in run_dirs]
    _tell_apart(runs, run_dirs)
    out = Path(out)
    aside = out.with_name(out.name + ".part")
    try:
        aside.write_text(_page(runs), encoding="utf-8")
        os.replace(aside, out)
    except OSError as error:
        raise RunDirError(f"cannot write {out}: {error.strerror}; create its folder or choose another") from error
    return out


def _tell_apart(runs: Sequence[RunHistory], run_dirs: Sequence[str | Path]) -> None:
    """Runs whose directories share a name are called by their parent's name too."""
    count = Counter(run.name for run in runs)
    for run, run_dir in zip(runs, run_dirs, strict=True):
        if count[run.name] > 1:
            run.name = f"{Path(run_dir).resolve().parent.name}/{run.name}"


def _page(runs: Sequence[RunHistory]) -> str:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    body = [
        _head(runs, title),
        _tiles(runs[0].summary) if len(runs) == 1 else "",
        _table(runs),
        *_charts(runs),
        _words(),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)} - sortedrl</title>\n<style>{_CSS}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + f"\n</main>\n<script>{_TOUCH}</script>\n</body>\n</html>\n"
    )


def _head(runs: Sequence[RunHistory], title: str) -> str:
    lines = [f"<header><h1>{html.escape(title)}</h1>"]
    summary = runs[0].summary
    if len(runs) == 1:
        lines.append(
            f'<p class="soft">{html.escape(summary.strategy)}, {number(summary.samples)} samples in '
            f"{number(summary.updates)} updates, {number(summary.slots)} slots, seed {number(summary.seed)}</p>"
        )
    for run in runs:
        name = html.escape(run.name)
        if run.is_estimate:
            lines.append(
                f'<p class="note">{name} left no summary.json: its figures are estimated from its events, as far as '
                "they go, and its ledger is not known.</p>"
            )
        elif run.summary.status == "stopped":
            lines.append(f'<p class="note">{name} was stopped before it was complete.</p>')
        ledger = run.summary.ledger
        if ledger is not None and (ledger.lost or ledger.duplicated):
            lines.append(
                f'<p class="note">{name} broke its guarantee: {ledger.lost} samples lost, '
                f"{ledger.duplicated} trained twice.</p>"
            )
    return "\n".join(lines) + "</header>"


def _tiles(summary: Summary) -> str:
    ledger = summary.ledger
    tiles = (
        (before_after(summary.accuracy_before, summary.accuracy_after), "held-out accuracy, sampled"),
        (share(summary.bubble_ratio), "bubble"),
        (share(summary.goodput), "goodput"),
        (number(summary.tokens_per_s), "trained tokens/s"),
        (number(summary.staleness_max), "largest staleness"),
        ("–" if ledger is None else f"{ledger.lost} / {ledger.duplicated}", "samples lost / trained twice"),
    )
    cells = "".join(f'<div class="tile"><b>{html.escape(value)}</b><span>{name}</span></div>' for value, name in tiles)
    return f'<div class="tiles">{cells}</div>'


_ROWS: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("strategy", lambda s: s.strategy),
    ("seed", lambda s: number(s.seed)),
    ("samples / updates", lambda s: f"{number(s.samples)} / {number(s.updates)}"),
    ("accuracy, sampled", lambda s: before_after(s.accuracy_before, s.accuracy_after)),
    ("accuracy, greedy", lambda s: before_after(s.greedy_accuracy_before, s.greedy_accuracy_after)),
    ("bubble", lambda s: share(s.bubble_ratio)),
    ("goodput", lambda s: share(s.goodput)),
    ("trained tokens/s", lambda s: number(s.tokens_per_s)),
    ("wall time, s", lambda s: number(s.wall_s, 1)),
    ("rollout / update / publish, s", lambda s: _slashed(s.rollout_s, s.update_s, s.publish_s, digits=1)),
    ("checkpoints / ledger, s", lambda s: _slashed(s.save_s, s.ledger_s, digits=1)),
    ("mean length / longest seen, tokens", lambda s: _slashed(s.mean_length, s.mean_longest, digits=1)),
    ("tokens trained", lambda s: number(s.trained_tokens)),
    ("tokens discarded", lambda s: number(s.discarded_tokens)),
    ("cached tokens recomputed", lambda s: number(s.recomputed_tokens)),
    ("staleness, mean / largest", lambda s: f"{number(s.staleness_mean, 2)} / {number(s.staleness_max)}"),
    ("accepted prefix", lambda s: share(s.accepted_prefix)),
    ("expected lengths in order", lambda s: share(s.length_in_order)),
    ("divergence rate, per token", lambda s: "–" if s.divergence_rate is None else f"{s.divergence_rate:.1e}"),
    ("loaded / trained", lambda s: "–" if s.ledger is None else _slashed(s.ledger.loaded, s.ledger.trained)),
    ("lost / trained twice", lambda s: "–" if s.ledger is None else _slashed(s.ledger.lost, s.ledger.duplicated)),
)


def _slashed(*values: float | None, digits: int = 0) -> str:
    return " / ".join(number(value, digits) for value in values)


def _table(runs: Sequence[RunHistory]) -> str:
    """A column per run, or two halves side by side for one; rows that no run has a figure for are left out."""
    rows = []
    for label, render in _ROWS:
        cells = [render(run.summary) for run in runs]
        if any(cell.strip("–/ →") for cell in cells):
            rows.append(f"<tr><th>{label}</th>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    if len(runs) == 1:
        half = (len(rows) + 1) // 2
        tables = _pair(*(f"<table>{''.join(part)}</table>" for part in (rows[:half], rows[half:])))
    else:
        names = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
        tables = f"<table><thead><tr><th></th>{names}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<section class="card"><h2>Summary</h2><div class="scroll">{tables}</div></section>'


def _charts(runs: Sequence[RunHistory]) -> list[str]:
    """The chart sections, each only if there is something to draw."""
    trained = [run for run in runs if run.updates]
    if not trained:
        return ['<section class="card"><h2>Charts</h2><p>No update was done: there is nothing to draw.</p></section>']
    if len(trained) < len(runs):
        runs = trained
    key = _key(runs)
    sections = [
        _section(
            "Learning",
            "First against the samples that were trained, then against wall time.",
            key
            + _pair(
                _div(learning_chart(runs, by_time=False), "samples"), _div(learning_chart(runs, by_time=True), "wall")
            ),
        ),
        _section("What the slots did", "", _div(occupancy_chart(runs), "occupancy")),
    ]
    for position, run in enumerate(runs):
        if run.attempts:
            name = "" if len(runs) == 1 else f": {run.name}"
            sections.append(_section(f"Slot timeline{name}", "", _div(timeline_chart(run), f"timeline-{position}")))
    sections.append(
        _section(
            "Trained lengths by update",
            "Where batches are taken as answers finish, short ones come first in every cohort: a micro-curriculum.",
            _div(lengths_chart(runs), "lengths"),
        )
    )
    sections.append(_section("Staleness", "", key + _div(staleness_chart(runs), "staleness")))
    if any(run.replays for run in runs):
        sections.append(_section("Accepted prefix of replays", "", key + _div(replay_chart(runs), "replay")))
    return sections


def _key(runs: Sequence[RunHistory]) -> str:
    if len(runs) == 1:
        return ""
    entries = (
        f'<span><i style="background:{run_colour(position)}"></i>{html.escape(run.name)}</span>'
        for position, run in enumerate(runs)
    )
    return f'<div class="key">{"".join(entries)}</div>'


def _section(title: str, text: str, content: str) -> str:
    intro = f'<p class="soft">{html.escape(text)}</p>' if text else ""
    return f'<section class="card"><h2>{html.escape(title)}</h2>{intro}{content}</section>'


def _pair(left: str, right: str) -> str:
    return f'<div class="pair"><div>{left}</div><div>{right}</div></div>'


def _div(chart: Chart, name: str) -> str:
    """The figure as a div; its id is fixed, so that one run gives one and the same file."""
    div = plotly.io.to_html(
        chart.figure,
        full_html=False,
        include_plotlyjs=False,
        div_id=f"chart-{name}",
        config={"responsive": True, "displayModeBar": False},
    )
    return f'<div class="chart">{div}</div><p class="caption">{html.escape(chart.caption)}</p>'


def _words() -> str:
    entries = "".join(f"<dt>{word}</dt><dd>{meaning}</dd>" for word, meaning in _WORDS)
    return f'<section class="card"><h2>Words</h2><dl>{entries}</dl></section>'
