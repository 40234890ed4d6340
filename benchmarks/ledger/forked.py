"""A process that is a copy of this one, so that it has imported everything and needs no second to start.

`crash_storm.py`, `tool_storm.py` and `rank_storm.py` kill such processes. A copy never returns into its caller's code.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable


def fork(work: Callable[[], object]) -> int:
    """Do the work in a copy of this process, which ends with 0, or with 1 and a traceback; returns its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
