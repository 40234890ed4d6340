"""Draw what scheduling does to slots: the first seconds of rollout of two runs, from their event files, as SVG.

    python benchmarks/draw_idea.py RUN_ABOVE RUN_BELOW docs/idea.svg [--slots 16] [--seconds 2.0]

A row is a slot, a bar an attempt at an answer; its shade is the version of the weights it began with. A white gap is an
idle slot. Time in updates and publications is cut out, so that the picture shows rollout alone.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from html import escape
from pathlib import Path

from sortedrl.telemetry.events import AttemptEnded, AttemptStarted, BatchTaken, RunStarted, WeightsPublished
from sortedrl.telemetry.sinks import read_events

WIDTH, LEFT, ROW, GAP, TITLE = 960, 16, 9, 34, 26
SHADES = ("#08306b", "#2171b5", "#6baed6", "#bdd7e7")  # by version, in turn
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


def read_strip(run: Path) -> Strip:
    """Attempts and harvests on a clock that stands still between a harvest and the next publication."""
    title, bars, harvests = run.name, [], []
    begun: dict[int, tuple[float, int]] = {}
    origin: float | None = None
    paused, pause_began = 0.0, 0.0
    for event in read_events(run / "events.jsonl"):
        match event:
            case RunStarted():
                title = event.strategy
            case AttemptStarted():
                origin = event.t if origin is None else origin
                begun[event.slot] = (event.t - origin - paused, event.version)
            case AttemptEnded():
                start, version = begun.pop(event.slot)
                end = event.t - (origin or 0.0) - paused
                is_cut = event.outcome == "interrupted"
                bars.append(Bar(slot=event.slot, start=start, end=end, version=version, is_interrupted=is_cut))
            case BatchTaken():
                harvests.append(event.t - (origin or 0.0) - paused)
                pause_began = event.t
            case WeightsPublished():
                paused += event.t - pause_began
            case _:
                pass
    return Strip(title=title, bars=bars, harvests=harvests)


def draw(strip: Strip, top: float, slots: int, seconds: float) -> list[str]:
    scale = (WIDTH - 2 * LEFT) / seconds
    height = slots * ROW
    busy = sum(min(bar.end, seconds) - bar.start for bar in strip.bars if bar.start < seconds)
    idle = 1 - busy / (slots * seconds)
    trained = sum(harvest <= seconds for harvest in strip.harvests)
    parts = [
        f'<text x="{LEFT}" y="{top - 8}" class="title">{escape(strip.title)}: slots idle {idle:.0%}, '
        f"{trained} updates</text>",
        f'<rect x="{LEFT}" y="{top}" width="{WIDTH - 2 * LEFT}" height="{height}" class="frame"/>',
    ]
    for bar in strip.bars:
        if bar.start >= seconds:
            continue
        x, width = LEFT + bar.start * scale, (min(bar.end, seconds) - bar.start) * scale
        y = top + bar.slot * ROW + 1
        shade = SHADES[bar.version % len(SHADES)]
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.6, 0.4):.1f}" height="{ROW - 2}" fill="{shade}"/>'
        )
        if bar.is_interrupted and bar.end <= seconds:
            parts.append(f'<rect x="{x + width - 2:.1f}" y="{y}" width="2" height="{ROW - 2}" fill="{INTERRUPTED}"/>')
    for harvest in strip.harvests:
        if harvest <= seconds:
            x = LEFT + harvest * scale
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top - 3}" y2="{top + height + 3}" class="harvest"/>')
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("above", type=Path)
    parser.add_argument("below", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    strips = [read_strip(options.above), read_strip(options.below)]
    height = 2 * (TITLE + options.slots * ROW + GAP) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<style>text{font:14px system-ui,sans-serif;fill:#222}.title{font-weight:600}.note{font-size:12px;fill:#555}"
        ".frame{fill:#fff;stroke:#bbb}.harvest{stroke:#d94801;stroke-width:1;stroke-dasharray:3 2}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for number, strip in enumerate(strips):
        parts += draw(strip, TITLE + number * (TITLE + options.slots * ROW + GAP), options.slots, options.seconds)
    note = (
        f"The first {options.seconds:g} s of rollout on {options.slots} slots. A bar is an answer, its shade the "
        "version of the weights; a dashed line is an update, an orange end an interruption."
    )
    parts += [f'<text x="{LEFT}" y="{height - 12}" class="note">{note}</text>', "</svg>"]
    options.out.write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
