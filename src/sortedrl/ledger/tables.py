"""`sortedrl ledger RUN`: tables or JSON of a ledger file's contents, one sample's history, or a verification.

The command line calls `ledger_command`, which writes only to the console that it is given. Answers come from the model
and prompts from data sets, so markup and control characters in them are made harmless before they are printed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sortedrl.errors import ConfigError
from sortedrl.ledger.reader import Ledger, Overview
from sortedrl.ledger.sample_history import SampleHistory, conversation, read_history
from sortedrl.ledger.verdict import compare_with_summary, empty_line, proven_line
from sortedrl.ledger.verify import verify
from sortedrl.records import State
from sortedrl.reward.worker import printable

Decode = Callable[[list[int]], str]

_BAR_CELLS = 40
_MAX_COHORTS = 20  # in the table, oldest first; JSON lists all
_COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red")


def ledger_command(
    run: Path,
    *,
    verify: bool,
    sample: int | None,
    console: Console,
    as_json: bool,
    decode: Decode | None = None,
) -> int:
    """Show the ledger of a run directory, or of a ledger file; returns the exit code. `decode`: tokens to text."""
    if verify and sample is not None:
        raise ConfigError("--verify checks the whole ledger and --sample shows one sample: give only one of them")
    with Ledger(run) as ledger:
        if verify:
            return _show_verdict(ledger, console, as_json)
        if sample is not None:
            _show_history(read_history(ledger, sample), console, as_json, decode)
        else:
            _show_overview(ledger, console, as_json)
    return 0


# ---- verification ---------------------------------------------------------------------------------------------------


def _show_verdict(ledger: Ledger, console: Console, as_json: bool) -> int:
    verdict = verify(ledger)
    compare_with_summary(ledger, verdict)
    is_proven = not verdict.num_violations and verdict.counts["samples"] > 0
    if as_json:
        _write_json(
            console,
            {
                "ledger": str(ledger.path),
                "proven": is_proven,
                "counts": dict(verdict.counts),
                "num_violations": verdict.num_violations,
                "violations": [asdict(violation) for violation in verdict.violations],
            },
        )
        return 1 if verdict.num_violations else 0
    for violation in verdict.violations:
        _write(console, str(violation))
    if verdict.num_violations > len(verdict.violations):
        _write(console, f"and {verdict.num_violations - len(verdict.violations):,} more")
    if is_proven:
        _write(console, proven_line(ledger, verdict))
    elif not verdict.num_violations:
        _write(console, empty_line(ledger))
    return 1 if verdict.num_violations else 0


# ---- overview -------------------------------------------------------------------------------------------------------


def _show_overview(ledger: Ledger, console: Console, as_json: bool) -> None:
    overview = ledger.overview()
    if as_json:
        _write_json(
            console, {"ledger": str(ledger.path), "grouped": ledger.grouped, "noise": ledger.noise, **asdict(overview)}
        )
        return
    trained = f"{overview.by_state[State.TRAINED]:,} of {overview.num_loaded:,} samples trained"
    _write(console, f"{ledger.path}: {trained} in {overview.num_updates:,} updates, version {overview.version}")
    _write(console, f"all tokens were drawn with the sampling noise {ledger.noise}")
    console.print(_cohort_table(overview))
    if (oldest := overview.oldest) is not None:
        waited = overview.num_updates - oldest.since_update
        what = f"sample {oldest.sample} of cohort {oldest.cohort}, {oldest.state}, {oldest.num_tokens:,} tokens"
        _write(console, f"oldest waiting: {what}, since update {oldest.since_update} ({waited:,} updates ago)")
    if overview.staleness:
        console.print(_staleness_table(overview, "#" if console.options.ascii_only else "█"))
    for lineage in overview.lineages[1:]:
        where = f"row {lineage.cut_seq:,}, version {lineage.version}"
        changed = "".join(f"; {change}" for change in lineage.changes)
        _write(console, f"resumed as lineage {lineage.lineage} from {where}{changed}")


def _cohort_table(overview: Overview) -> Table:
    table = Table(box=None, title_justify="left", pad_edge=False)
    for name in ("cohort", "loaded at update", *State, "samples"):
        table.add_column(str(name), justify="right")
    for cohort in overview.cohorts[:_MAX_COHORTS]:
        counts = [f"{cohort.by_state[state]:,}" for state in State]
        table.add_row(str(cohort.id), f"{cohort.loaded_update:,}", *counts, f"{cohort.num_samples:,}")
    if len(overview.cohorts) > _MAX_COHORTS:
        table.add_row(f"{len(overview.cohorts) - _MAX_COHORTS:,} later", *[""] * (len(State) + 2))
    if done := overview.num_cohorts - len(overview.cohorts):
        table.add_row(f"{done:,} consumed", *[""] * (len(State) + 2))
    totals = [f"{overview.by_state[state]:,}" for state in State]
    table.add_row("all", "", *totals, f"{overview.num_loaded:,}", style="bold")
    return table


def _staleness_table(overview: Overview, block: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name, justify in (("staleness", "right"), ("trained", "right"), ("share", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # pyright: ignore[reportArgumentType]
    total, most = sum(overview.staleness.values()), max(overview.staleness.values())
    for staleness, count in overview.staleness.items():
        bar = Text(block * math.ceil(_BAR_CELLS * count / most), style="blue")
        table.add_row(str(staleness), f"{count:,}", f"{count / total:.1%}", bar)
    return table


# ---- history of one sample ------------------------------------------------------------------------------------------


def _show_history(history: SampleHistory, console: Console, as_json: bool, decode: Decode | None) -> None:
    if as_json:
        text = None if decode is None or history.tokens is None else decode(history.tokens)
        turns = None if decode is None or history.tokens is None else conversation(history, decode)
        _write_json(console, {**asdict(history), "text": text, "conversation": turns})
        return
    place = f"cohort {history.cohort}, prompt {history.prompt!r}, epoch {history.epoch}, sibling {history.index}"
    drawn = f"seed {history.seed}, noise {history.noise}, budget {history.budget:,}"
    _write(console, f"sample {history.sample}: {history.state}; {place}, {drawn}")
    console.print(_history_table(history))
    if history.tokens is None:
        _write(console, "this copy of the ledger has no tokens of this sample, since it is trained")
    elif history.tokens:
        legend, answer = _coloured(history.runs, history.tokens, decode)
        console.print(legend)
        console.print(answer)
        if decode is not None and any(history.is_fed):
            for role, text in conversation(history, decode):
                _write(console, f"{role}: {text.strip()}")


def _history_table(history: SampleHistory) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("row", "step", "attempt", "version", "gained", "kept", "thrown away", "held", ""):
        table.add_column(name, justify="left" if name in ("step", "") else "right")
    for m in history.moments:
        step = m.step if m.num_rows == 1 else f"{m.step} ({m.num_rows:,} rows)"
        figures = [f"{n:,}" if n else "" for n in (m.gained, m.kept, m.thrown)]
        cells = (
            f"{m.seq:,}",
            Text(printable(step, keep="\n")),
            str(m.attempt),
            str(m.version),
            *figures,
            f"{m.held:,}",
        )
        table.add_row(*cells, Text(printable(m.note, keep="\n")))
    return table


def _coloured(runs: list[tuple[int, int]], tokens: list[int], decode: Decode | None) -> tuple[Text, Text]:
    """A legend of colours by version, and the answer in these colours."""
    versions = sorted({version for version, _ in runs})
    style = {version: _COLOURS[number % len(_COLOURS)] for number, version in enumerate(versions)}
    legend, answer = Text("answer by version: "), Text()
    begin, shown, whole = 0, 0, "" if decode is None else decode(tokens)
    for version, length in runs:
        end = begin + length
        legend.append(f"{version} (tokens {begin} to {end - 1})  ", style=style[version])
        if decode is None:
            piece = "".join(f"{token} " for token in tokens[begin:end])
        else:
            # A character whose tokens are in two runs is shown in the later one.
            reached = len(whole) if end == len(tokens) else len(decode(tokens[:end]).rstrip("\ufffd"))
            reached = min(max(reached, shown), len(whole))
            piece, shown = whole[shown:reached], reached
        answer.append(printable(piece, keep="\n"), style=style[version])
        begin = end
    return legend, answer


# ---- writing --------------------------------------------------------------------------------------------------------


def _write(console: Console, line: str) -> None:
    console.print(printable(line, keep="\n"), markup=False, highlight=False, emoji=False, soft_wrap=True)


def _write_json(console: Console, record: dict[str, Any]) -> None:
    """Print one JSON object; NaN and infinite numbers become null."""
    console.out(json.dumps(_finite(record)), highlight=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
