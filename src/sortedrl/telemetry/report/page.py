"""The parts of a page about runs, for the report and the dashboard alike: head, tiles, table, sections with charts.

What it keeps true: every string that comes from a run is escaped; a figure that was estimated or left out is said to
be; a section is there only if it has something to show. Charts are drawn by `assets/page.js` into the empty elements
that the sections hold.
"""

from __future__ import annotations

import html
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from sortedrl.telemetry.report import charts, timeline
from sortedrl.telemetry.report.style import Chart, run_colour, run_dash
from sortedrl.telemetry.run_reader import RunReader
from sortedrl.telemetry.summary import Summary, before_after, number, share
from sortedrl.telemetry.view import RunView

_DASH_ARRAYS = {"solid": "", "dash": "7 4", "dot": "2 4", "dashdot": "7 3 2 3"}

_AGES = (
    "Versions between the weights that wrote a token, or last verified it, and those in force when it was trained. "
    "White: no answer is so long. Where weights change in the middle of an attempt, tokens count as evenly spaced in "
    "time."
)

_WORDS = (
    ("bubble", "Share of slot time in which a slot idles, while answers are being written. Updates do not count."),
    (
        "goodput",
        "Share of slot time that decoded tokens which were then trained. Work that is thrown away does not count.",
    ),
    ("speed", "Trained tokens per second of wall time, updates and weight publications included."),
    ("version", "Counts publications of weights. A token's version is that of the weights that wrote or verified it."),
    ("staleness", "Version in force when a sample is trained, minus the version of its oldest token."),
    ("cohort", "The samples that are loaded together."),
    ("harvest", "The moment at which an update batch is taken."),
    (
        "replay",
        "Cached tokens are checked under new weights and kept up to the first that those would write otherwise.",
    ),
    ("ledger", "Samples loaded and trained, counted from the events: none may be lost, none trained twice."),
)


@dataclass(slots=True, kw_only=True)
class Parts:
    """A page in parts: what is replaced as a whole, the frame of the charts, and what goes into it."""

    title: str
    head: str  # HTML
    frame: str  # HTML with an element for each chart and each caption
    captions: dict[str, str] = field(default_factory=dict)  # plain text, by chart
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)  # as plotly.js takes them


def asset(name: str) -> str:
    return (files("sortedrl.telemetry") / "assets" / name).read_text(encoding="utf-8")


def page_parts(readers: Sequence[RunReader]) -> Parts:
    """All that is to be said about these runs as they stand."""
    arrange(readers)
    runs = [reader.view for reader in readers]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    tiles = _tiles(runs[0].summary) if len(runs) == 1 else ""
    parts = Parts(title=title, head=_head(readers, title) + tiles + _table(runs), frame="")
    frame = _Frame(parts)
    trained = [run for run in runs if len(run.updates)]
    if trained:
        _learning(frame, trained)
    else:
        frame.section("Charts", "No update was done yet: there is nothing to learn from.")
    _slots(frame, [run for run in runs if run.bars.num_seen])
    if trained:
        _batches(frame, trained)
    parts.frame = "\n".join(frame.sections)
    return parts


def arrange(readers: Sequence[RunReader]) -> None:
    """Give each run its place on the page, which its colour follows; those whose directories share a name get their
    parent's too."""
    names = [reader.run_dir.resolve().name for reader in readers]
    count = Counter(names)
    for place, (reader, name) in enumerate(zip(readers, names, strict=True)):
        reader.view.position = place
        parent = Path(reader.run_dir).resolve().parent.name
        reader.view.name = f"{parent}/{name}" if count[name] > 1 else name


def figure_json(figures: dict[str, dict[str, Any]]) -> str:
    """For a script element: no text can end it."""
    text = json.dumps(figures, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def words() -> str:
    entries = "".join(f"<dt>{word}</dt><dd>{meaning}</dd>" for word, meaning in _WORDS)
    return f'<section class="card"><h2>Words</h2><dl>{entries}</dl></section>'


# ---- sections -------------------------------------------------------------------------------------------------------


class _Frame:
    """Sections as they come, and the charts in them."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.sections: list[str] = []

    def chart(self, chart: Chart) -> str:
        self.parts.captions[chart.name] = chart.caption
        self.parts.figures[chart.name] = json.loads(chart.figure.to_json() or "{}")
        name = html.escape(chart.name)
        return f'<div class="chart" id="chart-{name}"></div><p class="caption" id="caption-{name}"></p>'

    def section(self, title: str, text: str, content: str = "") -> None:
        intro = f'<p class="soft">{html.escape(text)}</p>' if text else ""
        self.sections.append(f'<section class="card"><h2>{html.escape(title)}</h2>{intro}{content}</section>')


def _learning(frame: _Frame, runs: Sequence[RunView]) -> None:
    pair = _pair(*(frame.chart(charts.learning_chart(runs, by_time=by_time)) for by_time in (False, True)))
    frame.section("Learning", "First against the samples that were trained, then against wall time.", _key(runs) + pair)


def _slots(frame: _Frame, runs: Sequence[RunView]) -> None:
    if not runs:
        return
    if any(run.slot_time for run in runs):
        key = _cause_key(runs)
        frame.section("Where slot time went", "", key + frame.chart(charts.causes_chart(runs)))
    if any(run.seconds for run in runs):
        frame.section("What the slots did", "", frame.chart(charts.occupancy_chart(runs)))
    for run in runs:
        frame.section("Slot timeline" + _of(run, runs), "", frame.chart(timeline.timeline_chart(run)))
    for run in runs:
        if run.samples.recent:
            content = frame.chart(timeline.lives_chart(run))
            if len(run.samples.waits) > 1:
                content += frame.chart(timeline.waits_chart(run))
            frame.section("Life of cohorts" + _of(run, runs), "", content)


def _batches(frame: _Frame, runs: Sequence[RunView]) -> None:
    for run in runs:
        if found := timeline.ages_charts(run):
            content = f'<p class="soft">{_AGES}</p>' + _pair(*map(frame.chart, found))
            frame.section("Age of trained tokens" + _of(run, runs), "", content)
    young = [run.name for run in runs if not any(run.staleness)]
    if young:
        names = "" if len(runs) == 1 else f"{', '.join(young)}: "
        text = "every token was written, or verified, by the weights in force when it was trained."
        frame.section("No age of trained tokens", names + (text if names else text.capitalize()))
    frame.section(
        "Trained lengths by update",
        "Where batches are taken as answers finish, short ones come first in every cohort: a micro-curriculum.",
        frame.chart(charts.lengths_chart(runs)),
    )
    frame.section("Staleness", "", _key(runs) + frame.chart(charts.staleness_chart(runs)))
    if any(len(run.replays) for run in runs):
        frame.section("Accepted prefix of replays", "", _key(runs) + frame.chart(charts.replay_chart(runs)))


def _of(run: RunView, runs: Sequence[RunView]) -> str:
    return "" if len(runs) == 1 else f": {run.name}"


def _key(runs: Sequence[RunView]) -> str:
    if len(runs) == 1:
        return ""
    entries = (
        '<span><svg width="34" height="10" aria-hidden="true"><line x1="1" y1="5" x2="33" y2="5" stroke-width="3" '
        f'stroke="{run_colour(run.position)}" stroke-dasharray="{_DASH_ARRAYS[run_dash(run.position)]}"/></svg>'
        f"{html.escape(run.name)}</span>"
        for run in runs
    )
    return f'<div class="key">{"".join(entries)}</div>'


def _cause_key(runs: Sequence[RunView]) -> str:
    entries = []
    for cause, (meaning, colour, hatch) in charts.CAUSES.items():
        if max((run.slot_time.get(cause, 0.0) for run in runs), default=0.0) >= 0.0005:
            angle = {"/": "-45deg", "\\": "45deg"}.get(hatch)
            stripes = f"repeating-linear-gradient({angle}, {colour} 0 3px, #fff 3px 4.5px)" if angle else colour
            entries.append(f'<span><i style="background:{stripes}"></i>{html.escape(meaning)}</span>')
    return f'<div class="key">{"".join(entries)}</div>'


def _pair(left: str, right: str) -> str:
    return f'<div class="pair"><div>{left}</div><div>{right}</div></div>'


# ---- figures in words -----------------------------------------------------------------------------------------------


def _head(readers: Sequence[RunReader], title: str) -> str:
    lines = [f"<header><h1>{html.escape(title)}</h1>"]
    if len(readers) == 1:
        summary = readers[0].view.summary
        lines.append(
            f'<p class="soft">{html.escape(summary.strategy)}, {number(summary.samples)} samples in '
            f"{number(summary.updates)} updates, {number(summary.slots)} slots, seed {number(summary.seed)}</p>"
        )
    for reader in readers:
        lines += [f'<p class="note">{html.escape(remark)}</p>' for remark in reader.remarks()]
    return "\n".join(lines) + "</header>"


def _tiles(summary: Summary) -> str:
    ledger = summary.ledger
    tiles = (
        (before_after(summary.accuracy_before, summary.accuracy_after), "held-out accuracy, sampled"),
        (share(summary.bubble_ratio), "bubble"),
        (share(summary.goodput), "goodput"),
        (number(summary.tokens_per_s), "trained tokens/s"),
        (number(summary.staleness_max), "largest staleness, versions"),
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
    ("held-out reward, sampled", lambda s: before_after(s.heldout_reward_before, s.heldout_reward_after)),
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


def _table(runs: Sequence[RunView]) -> str:
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
