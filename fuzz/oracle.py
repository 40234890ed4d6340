"""What must and what may be refused: asked of the package's own reader of configurations, in the fuzzer's process.

`judge.py` compares it with what a process did. A mistake that was planted on purpose must be refused whatever the
reader says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from fuzz.draw import MISTAKES, REFUSED_CHANGES
from fuzz.programs import Program
from fuzz.scenario import Kind


def must_refuse_start(program: Program) -> bool:
    """Whether a first process must refuse its configuration: it has a mistake, or cannot be loaded."""
    from sortedrl.config import SortedConfig
    from sortedrl.config.needs import check_extras
    from sortedrl.errors import SortedRLError

    if program.scenario.kind == Kind.TRL:
        return False
    if not set(MISTAKES).isdisjoint(program.scenario.overrides):
        return True
    name, *overrides = program.arguments
    try:
        with contextlib.chdir(program.home):
            config = SortedConfig.load(name, overrides)
            config.check_startable()
            check_extras(config)
    except SortedRLError:
        return True
    return False


def must_refuse_changes(run_dir: Path, changes: Sequence[str]) -> bool:
    """Whether a resume must refuse these overrides: one of them changes what a run may not change."""
    from sortedrl.config import SortedConfig
    from sortedrl.errors import SortedRLError

    refused = [change for change in changes if change in REFUSED_CHANGES]
    if not refused:
        return False
    saved = SortedConfig.load(run_dir / "config.toml").resolved()
    try:
        return SortedConfig.load(run_dir / "config.toml", refused).resolved() != saved
    except SortedRLError:
        return True
