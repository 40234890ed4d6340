"""How often Python looks for garbage while a run goes on: samples by the thousand are no cycles, and a look costs time.

The trainer and the simulator wrap their loop in one of these. Left to itself the collector goes through every living
sample again and again; with 16,384 slots that was a fifth of the controller's time and most of its longest pauses.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARE = (100_000, 20, 50)  # new objects before a look at the youngest; such looks before older ones are looked at


@contextmanager
def rare_collections() -> Iterator[None]:
    """What is there already is never looked at, and what comes seldom: models do make cycles, but few."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
