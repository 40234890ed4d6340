"""The parts of a page about runs, for both report and dashboard: head, tiles, table, and sections with charts.

`assets/page.js` draws the charts into the empty elements of the sections. Guarantees: every string from a run is
escaped. The page says if a figure is estimated or left out. A section appears only if it has something to show.
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

from sortedrl.errors import RunDirError, first_line
from sortedrl.ledger.reader import FILE_NAME as LEDGER_NAME
from sortedrl.reward.worker import printable
from sortedrl.telemetry.report import charts, timeline
from sortedrl.telemetry.report.configuration import configuration_html, read_configuration
from sortedrl.telemetry.report.learner_charts import learner_charts, machine_charts
from sortedrl.telemetry.report.style import NUM_RUN_COLOURS, Chart, run_dash
from sortedrl.telemetry.run_reader import DAMAGE, RunReader
from sortedrl.telemetry.slot_time import MEANINGS
from sortedrl.telemetry.summary import Summary, before_after, number, share
from sortedrl.telemetry.view import RunView

SCRIPTS = ("page.js", "completions.js")
"""The scripts at the end of a page, in order; `theme.js` comes before everything else."""

_DASH_ARRAYS = {"solid": "", "dash": "7 4", "dot": "2 4", "dashdot": "7 3 2 3"}

_AGES = (
    "The age of a token is the number of updates between the version that wrote or last verified it and the version "
    "being updated. Empty: no answer is that long. If weights changed during an attempt, its tokens are assumed to be "
    "evenly spaced in time."
)

_MAX_TEXT = 2000  # characters of a sentence with text from a run

_GLOSSARY = (
    ("slot", "A place in the engine for one running sequence."),
    ("bubble", "Share of slot time in which a slot is idle while others decode. Updates do not count."),
    (
        "idle slot-steps",
        "Share of decode steps x slots in which the slot did not run. Time between steps does not count.",
    ),
    ("goodput", "Share of slot time that decoded tokens which were then trained. Discarded work does not count."),
    ("speed", "Trained tokens per second of wall time, including updates and publication of weights."),
    ("version", "Number of the published weights. A token has the version that wrote it, or that verified it last."),
    ("staleness", "Updates between the version that wrote a sample's oldest token and the version being updated."),
    ("cohort", "The prompts that are loaded together."),
    ("harvest", "Taking an update batch out of the buffer."),
    (
        "replay",
        "An interrupted answer's tokens are verified under new weights in one prefill. The prefix that the new model "
        "would also have written is kept.",
    ),
    ("ledger", "Samples loaded and trained, counted from the events: none may be lost or trained twice."),
)


@dataclass(slots=True, kw_only=True, frozen=True)
class RunFacts:
    """One run at the moment that its page shows; the dashboard's list shows the same figures."""

    updates: int
    samples: int
    reward: float | None
    tokens_per_s: float | None
    alarms: list[str]
    is_live: bool


@dataclass(slots=True, kw_only=True)
class PageParts:
    """A page in parts: the head, the frame of the charts, and the contents of the frame."""

    title: str
    head: str  # HTML
    frame: str  # HTML with an element for each chart and each caption
    captions: dict[str, str] = field(default_factory=dict)  # plain text, by chart
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)  # as plotly.js takes them
    facts: list[RunFacts] = field(default_factory=list)  # one per run
    smoothing: int = 1  # points that a smoothed line is a mean of, until the reader chooses


def asset(name: str) -> str:
    return (files("sortedrl.telemetry") / "assets" / name).read_text(encoding="utf-8")


def page_parts(readers: Sequence[RunReader]) -> PageParts:
    """Return the parts of a page about these runs, from the events that the readers have read so far."""
    _arrange(readers)
    try:
        return _page_parts(readers)
    except DAMAGE as error:
        names = ", ".join(str(reader.file.path) for reader in readers)
        raise RunDirError(
            f"the figures in {names} cannot be shown ({type(error).__name__}: {first_line(error)}); leave the damaged "
            "run out, or restore its files from a copy"
        ) from error


def _page_parts(readers: Sequence[RunReader]) -> PageParts:
    runs = [reader.view for reader in readers]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    tiles = _tiles(runs[0]) if len(runs) == 1 else ""
    parts = PageParts(title=title, head=_head(readers, title) + tiles + _table(runs), frame="")
    parts.facts = [_facts(reader) for reader in readers]
    frame = _Frame(parts)
    trained = [run for run in runs if len(run.updates)]
    if trained:
        parts.smoothing = charts.smoothing(trained)
        _learning(frame, trained)
        _learner(frame, trained)
    else:
        frame.section("Charts", "No update is done yet, so there is nothing to show.")
    _slots(frame, [run for run in runs if run.bars.num_seen])
    if trained:
        _batches(frame, trained)
        _completions(frame, readers)
    _machine(frame, [run for run in runs if len(run.machine)])
    _configuration(frame, readers)
    parts.frame = "\n".join(frame.sections)
    return parts


def _facts(reader: RunReader) -> RunFacts:
    run = reader.view
    return RunFacts(
        updates=run.metrics.updates,
        samples=run.metrics.samples,
        reward=run.metrics.recent_reward,
        tokens_per_s=run.summary.tokens_per_s,
        alarms=run_alarms(reader),
        is_live=reader.is_live,
    )


def run_alarms(reader: RunReader) -> list[str]:
    alarm = reader.view.summary.alarm
    return [*([f"could not learn: {_cut(alarm)}"] if alarm else []), *reader.view.metrics.alarm_messages()]


def _cut(text: str) -> str:
    """Escape control characters, and cut a text that is too long to be read."""
    return printable(text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "…")


def _arrange(readers: Sequence[RunReader]) -> None:
    """Give each run its position on the page; runs whose directories have the same name get their parent's name too."""
    names = [reader.run_dir.resolve().name for reader in readers]
    count = Counter(names)
    for position, (reader, name) in enumerate(zip(readers, names, strict=True)):
        reader.view.position = position
        parent = Path(reader.run_dir).resolve().parent.name
        reader.view.name = printable(f"{parent}/{name}" if count[name] > 1 else name)


def script_json(value: Any) -> str:
    """Return JSON for a script element, escaped so that no text can end the element."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def glossary() -> str:
    entries = "".join(f"<dt>{word}</dt><dd>{meaning}</dd>" for word, meaning in _GLOSSARY)
    return f'<section class="card" id="section-glossary"><h2>Glossary</h2><dl>{entries}</dl></section>'


# ---- sections -------------------------------------------------------------------------------------------------------


class _Frame:
    """Collects sections and the charts in them."""

    def __init__(self, parts: PageParts) -> None:
        self.parts = parts
        self.sections: list[str] = []

    def chart(self, chart: Chart) -> str:
        self.parts.captions[chart.name] = chart.caption
        figure = chart.figure
        self.parts.figures[chart.name] = figure if isinstance(figure, dict) else json.loads(figure.to_json() or "{}")
        name = html.escape(chart.name)
        title = f'<h3 class="chart-title">{html.escape(chart.title)}</h3>' if chart.title else ""
        return f'{title}<div class="chart" id="chart-{name}"></div><p class="caption" id="caption-{name}"></p>'

    def grid(self, found: Sequence[Chart]) -> str:
        """Return small charts side by side, as many as the width has room for."""
        return '<div class="grid">' + "".join(f"<div>{self.chart(chart)}</div>" for chart in found) + "</div>"

    def section(self, title: str, text: str, content: str = "", *, name: str = "") -> None:
        """Add a section. Titles are entries of the contents; `name` is for scripts that fill the section."""
        intro = f'<p class="soft">{html.escape(text)}</p>' if text else ""
        named = f' id="section-{name or len(self.sections)}"'
        self.sections.append(f'<section class="card"{named}><h2>{html.escape(title)}</h2>{intro}{content}</section>')


def _learning(frame: _Frame, runs: Sequence[RunView]) -> None:
    pair = _pair(*(frame.chart(charts.learning_chart(runs, by_time=by_time)) for by_time in (False, True)))
    text = "First against samples trained, then against wall time."
    frame.section("Learning", text, _key(runs) + pair, name="learning")


def _learner(frame: _Frame, runs: Sequence[RunView]) -> None:
    found = learner_charts(runs)
    frame.section(
        "Learner", "What each update reports, against samples trained.", _key(runs) + frame.grid(found), name="learner"
    )


def _completions(frame: _Frame, readers: Sequence[RunReader]) -> None:
    """Add an empty section that a script fills, if a run has a ledger to fill it from."""
    if any((reader.run_dir / LEDGER_NAME).is_file() for reader in readers):
        frame.section("Completions", "", '<div id="completions"></div>', name="completions")


def _machine(frame: _Frame, runs: Sequence[RunView]) -> None:
    if runs:
        frame.section(
            "Machine", "Measured after updates.", _key(runs) + frame.grid(machine_charts(runs)), name="machine"
        )


def _configuration(frame: _Frame, readers: Sequence[RunReader]) -> None:
    tables = configuration_html([(reader.view.name, read_configuration(reader.run_dir)) for reader in readers])
    if tables:
        text = "" if len(readers) == 1 else "The keys that differ."
        frame.section("Configuration", text, tables, name="configuration")


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
        text = "every token was written or verified by the version that was being updated."
        frame.section(
            "Age of trained tokens" + (": none" if names else ""), names + (text if names else text.capitalize())
        )
    frame.section(
        "Trained lengths by update",
        "If batches are harvested as answers finish, short answers of a cohort are trained first: a micro-curriculum.",
        frame.chart(charts.lengths_chart(runs)),
    )
    frame.section("Staleness", "", _key(runs) + frame.chart(charts.staleness_chart(runs)))
    if any(len(run.replays) for run in runs):
        frame.section("Prefix accepted by replays", "", _key(runs) + frame.chart(charts.replay_chart(runs)))


def _of(run: RunView, runs: Sequence[RunView]) -> str:
    return "" if len(runs) == 1 else f": {run.name}"


def _key(runs: Sequence[RunView]) -> str:
    if len(runs) == 1:
        return ""
    entries = (
        '<span><svg width="34" height="10" aria-hidden="true"><line x1="1" y1="5" x2="33" y2="5" stroke-width="3" '
        f'style="stroke:var(--run-{run.position % NUM_RUN_COLOURS})" '
        f'stroke-dasharray="{_DASH_ARRAYS[run_dash(run.position)]}"/></svg>{html.escape(run.name)}</span>'
        for run in runs
    )
    return f'<div class="key">{"".join(entries)}</div>'


def _cause_key(runs: Sequence[RunView]) -> str:
    entries = []
    for cause, (colour, hatch) in charts.CAUSE_STYLES.items():
        if max((run.slot_time.get(cause, 0.0) for run in runs), default=0.0) >= 0.0005:
            angle = {"/": "-45deg", "\\": "45deg"}.get(hatch)
            stripes = f"repeating-linear-gradient({angle}, {colour} 0 3px, #fff 3px 4.5px)" if angle else colour
            entries.append(f'<span><i style="background:{stripes}"></i>{html.escape(MEANINGS[cause])}</span>')
    return f'<div class="key">{"".join(entries)}</div>'


def _pair(left: str, right: str) -> str:
    return f'<div class="pair"><div>{left}</div><div>{right}</div></div>'


# ---- head and table -------------------------------------------------------------------------------------------------


def _head(readers: Sequence[RunReader], title: str) -> str:
    lines = [f"<header><h1>{html.escape(title)}</h1>"]
    if len(readers) == 1:
        summary = readers[0].view.summary
        lines.append(
            f'<p class="soft">{html.escape(_cut(summary.strategy))}, {number(summary.samples)} samples in '
            f"{number(summary.updates)} updates, {number(summary.slots)} slots, seed {number(summary.seed)}</p>"
        )
    for reader in readers:
        name = "" if len(readers) == 1 else f"{reader.view.name}: "
        lines += [f'<p class="alarm">Alarm: {html.escape(name + text)}</p>' for text in run_alarms(reader)]
        lines += [f'<p class="note">{html.escape(_cut(remark))}</p>' for remark in reader.remarks()]
    return "\n".join(lines) + "</header>"


def _tiles(run: RunView) -> str:
    summary, ledger = run.summary, run.summary.ledger
    tiles = (
        (number(run.metrics.recent_reward, 3), "mean reward, last updates"),
        (number(summary.tokens_per_s), "trained tokens/s"),
        (before_after(summary.accuracy_before, summary.accuracy_after), "held-out accuracy, sampled"),
        (f"{share(summary.bubble_ratio)} / {share(summary.idle_slot_steps)}", "bubble / idle slot-steps"),
        (share(summary.goodput), "goodput"),
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
    ("held-out reward, sampled", lambda s: before_after(s.heldout_reward_before, s.heldout_reward_after)),
    ("bubble", lambda s: share(s.bubble_ratio)),
    ("idle slot-steps", lambda s: share(s.idle_slot_steps)),
    ("goodput", lambda s: share(s.goodput)),
    ("trained tokens/s", lambda s: number(s.tokens_per_s)),
    ("wall time, s", lambda s: number(s.wall_s, 1)),
    ("rollout / update / publish, s", lambda s: _slashed(s.rollout_s, s.update_s, s.publish_s, digits=1)),
    ("checkpoints / ledger, s", lambda s: _slashed(s.save_s, s.ledger_s, digits=1)),
    ("mean length / mean longest seen, tokens", lambda s: _slashed(s.mean_length, s.mean_longest, digits=1)),
    ("tokens trained", lambda s: number(s.trained_tokens)),
    ("tokens discarded", lambda s: number(s.discarded_tokens)),
    ("answer tokens prefilled again", lambda s: number(s.recomputed_tokens)),
    ("staleness, mean / largest", lambda s: f"{number(s.staleness_mean, 2)} / {number(s.staleness_max)}"),
    ("accepted prefix", lambda s: share(s.accepted_prefix)),
    ("predicted lengths in the right order", lambda s: share(s.length_in_order)),
    ("replay rejections per token", lambda s: "–" if s.divergence_rate is None else f"{s.divergence_rate:.1e}"),
    ("samples without a score", lambda s: number(s.unscored_samples)),
    ("samples loaded / trained", lambda s: "–" if s.ledger is None else _slashed(s.ledger.loaded, s.ledger.trained)),
    (
        "samples lost / trained twice",
        lambda s: "–" if s.ledger is None else _slashed(s.ledger.lost, s.ledger.duplicated),
    ),
)


def _slashed(*values: float | None, digits: int = 0) -> str:
    return " / ".join(number(value, digits) for value in values)


def _table(runs: Sequence[RunView]) -> str:
    """Return the summary: a column per run, or two halves for one run. Rows without any figure are left out."""
    rows = []
    rewards = [number(run.metrics.recent_reward, 3) for run in runs]
    columns = [("mean reward, last updates", rewards)] if len(runs) > 1 else []
    columns += [(label, [_cut(render(run.summary)) for run in runs]) for label, render in _ROWS]
    for label, cells in columns:
        if any(cell.strip("–/ →") for cell in cells):
            rows.append(f"<tr><th>{label}</th>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    if len(runs) == 1:
        half = (len(rows) + 1) // 2
        tables = _pair(*(f"<table>{''.join(part)}</table>" for part in (rows[:half], rows[half:])))
    else:
        names = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
        tables = f"<table><thead><tr><th></th>{names}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<section class="card" id="section-summary"><h2>Summary</h2><div class="scroll">{tables}</div></section>'
