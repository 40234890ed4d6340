"""Runs commands, each with its output in a file, and says what became of each.

`rehearsal.py` and `gpu_acceptance.py` use it. A command may report figures: the last line of its output that is a JSON
object. Guarantees: every step gets a result, also one that cannot start, hangs, or comes after the time is up.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Fate(StrEnum):
    PASSED = "passed"
    FAILED = "FAILED"
    NOT_RUN = "not run"


@dataclass(slots=True, kw_only=True, frozen=True)
class Step:
    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""  # why it cannot run here: it is then skipped, and says so


@dataclass(slots=True, kw_only=True, frozen=True)
class StepResult:
    step: Step
    fate: Fate
    seconds: float = 0.0
    why: str = ""
    log: Path | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


def run_steps(
    steps: Sequence[Step], *, root: Path, out: Path, limit_s: float, step_limit_s: float = math.inf, at_once: int = 1
) -> list[StepResult]:
    """Run all steps in `root`, so many at once, with logs in `out`. Together they may take `limit_s`."""
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + limit_s
    with ThreadPoolExecutor(at_once) as threads:
        return list(threads.map(lambda step: _run(step, root, out / f"{step.name}.log", deadline, step_limit_s), steps))


def _run(step: Step, root: Path, log: Path, deadline: float, step_limit_s: float) -> StepResult:
    if step.missing:
        return StepResult(step=step, fate=Fate.NOT_RUN, why=step.missing)
    left = deadline - time.monotonic()
    if left <= 0:
        return StepResult(step=step, fate=Fate.NOT_RUN, why="the time was up before it began")
    began = time.monotonic()
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                list(step.command),
                cwd=root,
                env={**os.environ, **step.environment},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return StepResult(step=step, fate=Fate.FAILED, why=str(error), log=log)
        why = _wait(process, min(left, step_limit_s))
    seconds = time.monotonic() - began
    fate = Fate.FAILED if why else Fate.PASSED
    return StepResult(step=step, fate=fate, seconds=seconds, why=why, log=log, figures=read_figures(log))


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Wait for a command; returns why it failed, or "". Whatever it started in its group ends with it."""
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"it was ended after {limit_s:.0f} s, when the time was up"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"exit code {code}" if code else ""


def read_figures(log: Path) -> dict[str, Any]:
    """The last JSON object that fills a line of the output; {} if there is none."""
    for line in reversed(log.read_text(encoding="utf-8", errors="replace").splitlines()):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except ValueError:
                continue
    return {}
