"""Run Python's cyclic garbage collector less often during a run.

The trainer and the simulator wrap their loops in `rare_collections`. By default the collector scans every live sample
again and again, although samples form no cycles; with 16,384 slots that took a fifth of the controller's time and
caused most of its longest pauses.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARE = (100_000, 20, 50)  # arguments of `gc.set_threshold`


@contextmanager
def rare_collections() -> Iterator[None]:
    """Exclude existing objects from collection and scan new ones rarely: models do make a few cycles."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
