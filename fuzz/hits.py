"""What lasting faults did: a function that misbehaves notes it in a file, and the judge counts only what was noted.

`child.py` names the folder in the environment. Workers get only some variables of it, among them those of Python: hence
the name.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "PYTHON_FUZZ_HITS"
FOLDER = "hits"  # in the home of a scenario


def note(fault: str) -> None:
    """Note that a fault happened; does nothing outside of the fuzzer."""
    path = Path(os.environ.get(VARIABLE, ""), fault)
    if VARIABLE in os.environ and not path.exists():
        path.touch()


def noted(home: Path) -> list[str]:
    """The faults that were noted below `home`."""
    return sorted(path.name for path in (home / FOLDER).glob("*"))
