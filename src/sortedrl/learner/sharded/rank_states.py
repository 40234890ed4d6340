"""What a rank saves and loads as shards: its rows of the weights, and of the optimizer's state.

Names are those of a whole checkpoint behind a prefix (`shard_files.py`), so either form can be turned into the other.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from sortedrl.errors import LearnerError, first_line
from sortedrl.learner.sharded.rank import RankLearner
from sortedrl.learner.sharded.shard_files import OPTIMIZER, WEIGHTS, load_shards, shard_metadata
from sortedrl.learner.torch import TorchLearner


def shard_tensors(learner: RankLearner) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's shards by name, not copied, and the learner's state without tensors."""
    state = TorchLearner.state_dict(learner)
    tensors: dict[str, Tensor] = {f"{WEIGHTS}{name}": value for name, value in learner.model.named_parameters()}
    tensors |= {f"{OPTIMIZER}{path}": value for path, value in state.pop("optimizer").items()}
    return tensors, state


@torch.no_grad()
def load_shard_tensors(
    learner: RankLearner, folder: Path, state: dict[str, Any], group: dist.ProcessGroup | None
) -> None:
    """Set weights and state of this rank to a folder of shards. Every rank must call it."""
    weights = {f"{WEIGHTS}{name}": value.detach() for name, value in learner.model.named_parameters()}
    known: dict[str, Tensor] = {**learner._parameters(), **learner._extra_tensors()}
    optimizer: dict[str, Tensor] = {}
    for name, found in shard_metadata(folder).items():
        if name.startswith(OPTIMIZER):
            like = known.get(name.removeprefix(OPTIMIZER).rpartition("/")[0])
            if like is not None and like.shape == found.size:
                optimizer[name] = torch.zeros_like(like.detach())
            else:
                optimizer[name] = torch.zeros(found.size, dtype=found.properties.dtype)
    try:
        load_shards(folder, {**weights, **optimizer}, group)
    except CheckpointException as error:
        why = next((first_line(cause[0]) for cause in error.failures.values()), first_line(error))
        raise LearnerError(
            f"the shards in {folder} do not fit the model ({why}): resume the run that wrote them"
        ) from error
    tensors = {name.removeprefix(OPTIMIZER): value for name, value in optimizer.items()}
    TorchLearner.load_state_dict(learner, {**state, "optimizer": tensors})
