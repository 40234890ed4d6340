"""Checks that trained weights are finite. A run must stop at the first update that breaks them.

Learners call `check_update` at the end of each update; `run/checkpoint_folder.py` calls `check_weights` before a
checkpoint is written, so that broken weights never replace sound ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from sortedrl.errors import LearnerError
from sortedrl.learner.base import UpdateResult
from sortedrl.learner.device import to_host

_REMEDY = "lower learner.lr, and resume from the last checkpoint"

log = logging.getLogger(__name__)


def check_update(update: int, result: UpdateResult, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Warn if an update skipped steps; raise LearnerError if its steps made trained weights that are not finite."""
    num_skipped = int(result.metrics.get("skipped_steps", 0))
    if num_skipped:
        log.warning(
            "update %d skipped %d of %d steps, because their loss or gradient was not finite: if this repeats, lower "
            "learner.lr and check the rewards",
            update,
            num_skipped,
            num_skipped + result.optimizer_steps,
        )
    if result.optimizer_steps:
        check_weights(f"the weights after update {update}", parameters)


def check_weights(
    what: str,
    parameters: Iterable[tuple[str, Tensor]],
    *,
    remedy: str = _REMEDY,
) -> None:
    """Raise LearnerError if a trained weight is infinite or not a number. Weights without gradient are not read."""
    trained = [(name, parameter.detach()) for name, parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    # The extremes of a tensor are finite only if all its values are, and finding them needs no further memory.
    extremes = [torch.stack(tensor.aminmax()).float() for _, tensor in trained if tensor.numel()]
    joined = torch.stack([pair.to(extremes[0].device) for pair in extremes])
    if bool(to_host([joined])[0].isfinite().all()):
        return
    broken = next(name for name, tensor in trained if not bool(to_host([tensor])[0].isfinite().all()))
    raise LearnerError(f"{what} are not finite ({broken}): {remedy}")
