"""The learner whose work is done by ranks: the controller's end of it, which looks like any other learner.

`build/learner.py` makes it where `learner.ranks` asks for more than one. The model that it is given stays whole in this
process, on the CPU: after each update the trained weights come back from rank 0 and are written into it in place, so
that engines, checkpoints and exports take it as they take a model that is trained here. Its state is that of one
process: a run that was saved by so many ranks goes on with another number, or with none.

What it keeps true: the model changes only at the end of an update, never while engines read it; a rank that fails ends
them all, and the run, with an error that says which.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from sortedrl.learner.base import UpdateResult
from sortedrl.learner.optimizer import LearnerSettings
from sortedrl.learner.pack import check_packing
from sortedrl.learner.sharded.shards import skeleton_of, weights_of
from sortedrl.learner.unscored import LeftOut, nothing_done
from sortedrl.records import Batch
from sortedrl.weights import ModuleWeights, array_of, tensor_of


class Ranks(Protocol):
    """Processes that do the same thing at the same time, such as `ray_ranks.RayRanks`."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank; what they return, by rank. What one of them raises is raised."""
        ...

    def close(self) -> None: ...


class ShardedLearner:
    """Trains a transformers causal language model over ranks, which it owns from then on."""

    optimizer = None  # every rank has a share of it

    def __init__(
        self, model: Any, settings: LearnerSettings, *, temperature: float, ranks: Ranks, overlap: bool = False
    ) -> None:
        check_packing(model)
        self.model: nn.Module = model
        self.inspect_dir: Path | None = None  # where a batch that stops the run is saved
        self._ranks = ranks
        self._source = ModuleWeights(model)
        self._left_out = LeftOut()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="sortedrl-learner") if overlap else None
        self._update: Future[UpdateResult] | None = None
        ranks.call("build", skeleton_of(model), weights_of(model), settings, temperature)

    @property
    def source(self) -> ModuleWeights:
        return self._source

    def skip(self, sample: int, attempt: int) -> None:
        """Leave a sample out of its update; if it is answered anew before, that attempt counts."""
        self._left_out.add(sample, attempt)

    def start(self, batch: Batch) -> Future[UpdateResult]:
        assert self._update is None or self._update.done(), "an update is under way: wait for its result first"
        kept = self._left_out.kept(batch)
        if kept is None:
            return nothing_done()
        if self._worker is not None:
            self._update = self._worker.submit(self._work, kept)
        else:
            result = self._work(kept)
            self._update = Future()
            self._update.set_result(result)
        return self._update

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        self._ranks.close()

    def state_dict(self) -> dict[str, Any]:
        """As `TorchLearner` has it."""
        assert self._update is None or self._update.done(), "an update is under way: its state cannot be saved"
        state = self._ranks.call("state")[0]
        tensors = {name: tensor_of(array, is_floating=True) for name, array in state["optimizer"].items()}
        return {**state, "optimizer": tensors, "left_out": self._left_out.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The weights are those that the ranks were built with."""
        arrays = {name: array_of(tensor) for name, tensor in state["optimizer"].items()}
        self._ranks.call("load", {**state, "optimizer": arrays})
        self._left_out.load(state.get("left_out", []))

    def _work(self, batch: Batch) -> UpdateResult:
        inspect_dir = None if self.inspect_dir is None else self.inspect_dir.absolute()
        result, arrays = self._ranks.call("update", batch, inspect_dir)[0]
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, array in arrays.items():
                parameters[name].copy_(tensor_of(array, is_floating=True))
        return result
