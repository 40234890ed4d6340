"""What TRL logs about its updates, under the names of our learner, so that reports draw the same curves of both.

`grpo.py` and `async_grpo.py` pass the result to `HostRun.publish`. Guarantees: only finite numbers, and
a figure that TRL does not log is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NAMES = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "entropy": "entropy",
    "clip_ratio/region_mean": "clip_fraction",
    "completions/clipped_ratio": "truncated_fraction",
}
KL_OF_GRPO = {"kl": "kl_reference"}  # logged if beta is not 0
KL_OF_ASYNC_GRPO = {"kl": "kl_behaviour", "ratio": "ratio_mean"}


def learner_metrics(logged: Mapping[str, Any], kl_names: Mapping[str, str]) -> dict[str, float]:
    """Our names and values for the figures of one update; of a list of values since TRL logged last, their mean."""
    found: dict[str, float] = {}
    for theirs, ours in {**NAMES, **kl_names}.items():
        value = logged.get(theirs)
        values = value if isinstance(value, list) else [value]
        known = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
        if known:
            found[ours] = sum(known) / len(known)
    return found
