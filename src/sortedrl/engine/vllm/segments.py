"""Shared memory that vLLM's processes make, and leave behind when they end before they can remove it.

vLLM's processes send each other messages through it: hundreds of megabytes for each worker, of which a small part is
used. vLLM gives them about a second to end. `core.py` and `server.py` remove what is left after that, and `owner.py`
where the process that started vLLM was killed. Where all were killed at once, as Ray kills an actor, the next engine on
the machine removes it: the names are noted in the folder that `weights.py` makes.

Guarantees: only memory that vLLM's processes have mapped, under the names that vLLM gives it, is removed, and none that
the process which removes it has mapped for other reasons.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from sortedrl.engine.vllm.shared_memory import SHARED_MEMORY

_PYTHONS = "psm_"  # how names of Python's shared memory begin; vLLM's queues are made of it
_NAME = rf"(?:{_PYTHONS}|vllm_dist_)[^\s/]+"
_MAPPED = re.compile(rf" {SHARED_MEMORY}/({_NAME})$", re.MULTILINE)
_NOTE = "shared_memory"


def mapped_segments(pids: Iterable[int]) -> set[str]:
    """The names of vLLM's shared memory that these processes have mapped, without what this one has if it is none of
    them. Empty on systems without /proc.
    """
    pids = set(pids)
    own = set[str]() if os.getpid() in pids else _mapped(os.getpid())
    return set[str]().union(*map(_mapped, pids)) - own


def note_segments(folder: Path, names: set[str]) -> None:
    """Note what vLLM uses in the folder of its model, for the case that all its processes are killed."""
    if names:
        (folder / _NOTE).write_text("\n".join(names), encoding="utf-8")


def remove_noted_segments(folder: Path) -> None:
    """Remove what is noted in a folder of this user, whose processes have all ended."""
    with suppress(OSError):
        if folder.stat().st_uid == os.getuid():
            names = (folder / _NOTE).read_text(encoding="utf-8", errors="replace").split()
            remove_segments(name for name in names if re.fullmatch(_NAME, name))


def remove_segments(names: Iterable[str]) -> None:
    """Remove shared memory of processes that have ended."""
    for name in names:
        with suppress(OSError, ValueError):  # vLLM has removed it, or it has no size yet
            if name.startswith(_PYTHONS):
                segment = SharedMemory(name)  # so that Python's resource tracker hears of it, and does not warn at exit
                segment.close()
                segment.unlink()
            else:
                (SHARED_MEMORY / name).unlink()


def _mapped(pid: int) -> set[str]:
    try:
        return set(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return set()
