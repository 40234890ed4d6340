"""Draw what scheduling does to slots: the same answers under two schedules, as SVG.

    python -m benchmarks.schedule.draw_idea RUN docs/images/idea.svg [--slots 16] [--steps 1200]

The lengths are those of a real run (a `sync` run, whose batches are in load order). The schedules are the real ones on
the simulated engine, where every running answer gets one token per step. A row is a slot, a bar is an attempt at an
answer, and its shade is the version of the weights at its start. White means an idle slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.record import make_parser
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import Trace, load_trace
from sortedrl.telemetry.events import AttemptEnded, AttemptStarted, BatchTaken, Event

WIDTH, LEFT, ROW, GAP, TITLE = 960, 16, 9, 34, 26
SHADES = ("#08306b", "#2171b5", "#6baed6", "#bdd7e7")  # by version, repeating
INTERRUPTED = "#d94801"


@dataclass(slots=True, kw_only=True)
class Bar:
    slot: int
    start: float
    end: float
    version: int
    is_interrupted: bool


@dataclass(slots=True, kw_only=True)
class Strip:
    title: str
    bars: list[Bar]
    harvests: list[float]


def simulated_strip(trace: Trace, strategy: str, slots: int) -> Strip:
    bars, harvests = [], []
    begun: dict[int, tuple[float, int]] = {}

    def note(event: Event) -> None:
        match event:
            case AttemptStarted():
                begun[event.slot] = (event.t, event.version)
            case AttemptEnded():
                start, version = begun.pop(event.slot)
                is_cut = event.outcome == "interrupted"
                bars.append(Bar(slot=event.slot, start=start, end=event.t, version=version, is_interrupted=is_cut))
            case BatchTaken():
                harvests.append(event.t)
            case _:
                pass

    knobs: dict[str, Any] = {"cohort_batches": 4, "lookahead": 2} if strategy != "sync" else {}
    simulate(trace, strategy=strategy, slots=slots, update_batch=slots, emit=note, **knobs)
    return Strip(title=strategy, bars=bars, harvests=harvests)


def draw(strip: Strip, top: float, slots: int, steps: float) -> list[str]:
    scale = (WIDTH - 2 * LEFT) / steps
    height = slots * ROW
    busy = sum(min(bar.end, steps) - bar.start for bar in strip.bars if bar.start < steps)
    idle = 1 - busy / (slots * steps)
    trained = sum(harvest <= steps for harvest in strip.harvests)
    parts = [
        f'<text x="{LEFT}" y="{top - 8}" class="title">{escape(strip.title)}: slots idle {idle:.0%}, '
        f"{trained} updates</text>",
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH - 2 * LEFT}" height="{height}" class="frame"/>',
    ]
    for bar in strip.bars:
        if bar.start >= steps:
            continue
        x, width = LEFT + bar.start * scale, (min(bar.end, steps) - bar.start) * scale
        y = top + bar.slot * ROW + 1
        shade = SHADES[bar.version % len(SHADES)]
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.6, 0.4):.1f}" height="{ROW - 2}" fill="{shade}"/>'
        )
        if bar.is_interrupted and bar.end <= steps:
            parts.append(f'<rect x="{x + width - 2:.1f}" y="{y}" width="2" height="{ROW - 2}" fill="{INTERRUPTED}"/>')
    for harvest in strip.harvests:
        if harvest <= steps:
            x = LEFT + harvest * scale
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 3}" y2="{top + height + 3}" class="harvest"/>')
    return parts


def main() -> None:
    parser = make_parser(__doc__, has_json=False)
    parser.add_argument("run", type=Path, help="run directory whose answer lengths are used")
    parser.add_argument("out", type=Path, help="SVG file to write")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1200)
    options = parser.parse_args()
    trace = load_trace(str(options.run / "events.jsonl"))
    strips = [simulated_strip(trace, strategy, options.slots) for strategy in ("sync", "sorted-replay")]
    height = 2 * (TITLE + options.slots * ROW + GAP) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<style>text{font:14px system-ui,sans-serif;fill:#222}.title{font-weight:600}.note{font-size:12px;fill:#555}"
        ".frame{fill:#fff;stroke:#bbb}.harvest{stroke:#d94801;stroke-width:1;stroke-dasharray:3 2}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for number, strip in enumerate(strips):
        parts += draw(strip, TITLE + number * (TITLE + options.slots * ROW + GAP), options.slots, options.steps)
    notes = (
        f"The same answers on {options.slots} slots, the first {options.steps:,} decode steps.",
        "A bar is an answer; its shade is the version of the weights. A dashed line is an update, an orange end is an "
        "interruption.",
    )
    for number, note in enumerate(notes):
        parts.append(f'<text x="{LEFT}" y="{height - 26 + 16 * number}" class="note">{note}</text>')
    parts.append("</svg>")
    options.out.write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
