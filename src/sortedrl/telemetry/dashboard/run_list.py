"""Finds the runs under the folders of the dashboard, and reads the main figures of each.

Guarantees: only directories with an event file are runs, and the dashboard reads only the runs found here. The figures
of a run cost a few kilobytes of reading, however large the run is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sortedrl.errors import RunDirError
from sortedrl.ledger.run_lock import is_being_written
from sortedrl.reward.worker import printable
from sortedrl.telemetry.event_file import FILE_NAME, Record, parse_json
from sortedrl.telemetry.run_reader import last_record
from sortedrl.telemetry.summary import Summary

_HEAD_BYTES = 65536
_MAX_TEXT = 500  # characters of an alarm


@dataclass(slots=True, kw_only=True)
class RunLine:
    """A run in the list; unknown figures are None."""

    key: str  # names the run in addresses
    state: str  # running, complete, stopped, or ended (without a summary)
    changed: float = 0.0  # when its events were last written
    strategy: str | None = None
    updates: int | None = None
    samples: int | None = None
    total_samples: int | None = None
    reward: float | None = None
    accuracy: float | None = None
    tokens_per_s: float | None = None
    alarms: list[str] = field(default_factory=list)
    problem: str = ""


def check_folders(folders: Sequence[Path]) -> None:
    """Raise RunDirError if one of the paths is not a directory."""
    for folder in folders:
        if not folder.is_dir():
            raise RunDirError(f"{folder} is not a directory; pass run directories, or a folder that contains some")


def find_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Return run directories by key: each folder that is a run itself, and the runs inside the other folders."""
    found: dict[Path, None] = {}
    for folder in folders:
        for run_dir in [folder] if (folder / FILE_NAME).is_file() else _children(folder):
            found[run_dir.resolve()] = None
    count = Counter(path.name for path in found)
    runs: dict[str, Path] = {}
    for path in found:
        both = printable(f"{path.parent.name}/{path.name}")
        key = both if count[path.name] > 1 else printable(path.name)
        number = 2
        while key in runs:
            key, number = f"{both} ({number})", number + 1
        runs[key] = path
    return runs


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(child for child in folder.iterdir() if (child / FILE_NAME).is_file())
    except OSError:
        return []


def run_line(key: str, run_dir: Path) -> RunLine:
    line = RunLine(key=key, state="ended")
    try:
        line.changed = (run_dir / FILE_NAME).stat().st_mtime
        if is_being_written(run_dir):
            line.state = "running"
        started, latest = _first(run_dir / FILE_NAME), last_record(run_dir / "metrics.jsonl")
        line.strategy, line.total_samples = _text(started.get("strategy")), _count(started.get("total_samples"))
        line.updates = None if (update := _count(latest.get("update"))) is None else update + 1
        line.samples = _count(latest.get("samples_trained"))
        reward = latest.get("reward_recent", latest.get("reward_mean"))  # runs of earlier versions have the second only
        line.reward, line.tokens_per_s = _figure(reward), _figure(latest.get("tokens_per_s"))
        line.alarms = _texts(latest.get("alarms"))
        if (run_dir / "summary.json").is_file():
            summary = Summary.read(run_dir / "summary.json")
            line.state = summary.status or "complete"
            line.updates, line.samples, line.tokens_per_s = summary.updates, summary.samples, summary.tokens_per_s
            line.accuracy = summary.accuracy_after
            if summary.alarm:
                line.alarms.insert(0, printable(f"could not learn: {summary.alarm[:_MAX_TEXT]}"))
    except OSError as error:  # shown in the line of this run, without effect on the others
        line.problem = printable(str(error))
    return line


def _first(path: Path) -> Record:
    with path.open("rb") as file:
        line = file.readline(_HEAD_BYTES)
    if not line.endswith(b"\n"):  # still being written, or too long
        return {}
    try:
        record = parse_json(line)
    except ValueError as error:
        raise RunDirError(f"{path}, line 1: {error}; restore the file from a copy") from error
    return record if isinstance(record, dict) else {}


def _text(value: object) -> str | None:
    return printable(value[:_MAX_TEXT]) if isinstance(value, str) else None


def _texts(values: object) -> list[str]:
    """Return the strings of a list, as far as a line has room for them."""
    return (
        [printable(text[:_MAX_TEXT]) for text in values[:8] if isinstance(text, str)]
        if isinstance(values, list)
        else []
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _figure(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
