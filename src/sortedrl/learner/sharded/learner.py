"""The learner whose updates run on several ranks; to the controller it is a learner like any other.

`run/builders/learner.py` makes it if `learner.ranks` is more than one. The driver keeps the whole model on the CPU.
Engines that can fetch weights from the ranks do that (`RankWeights.apply`). Whoever reads the driver's model instead,
such as a checkpoint or an export, gets the trained weights from rank 0 first; between updates that happens once, and
without a reader never. The state is that of one process: a run can resume with another number of ranks, or with none.

Guarantees: the driver's model changes only when it is read after an update, in the reader's thread; weights that are
not finite stop the run at the update that made them; if a rank fails, all ranks end and the run stops with an error
that names the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sortedrl.learner.base import UpdateResult
from sortedrl.learner.finite_weights import check_update, nonfinite_error
from sortedrl.learner.optimizer import LearnerSettings
from sortedrl.learner.pack import check_packing
from sortedrl.learner.sharded.shards import skeleton_of, weights_of
from sortedrl.learner.unscored import UnscoredSamples, empty_update
from sortedrl.learner.update_runner import UpdateRunner
from sortedrl.records import Batch
from sortedrl.weights import ModuleWeights, array_of, is_adapted, tensor_of


class Ranks(Protocol):
    """Processes that all run the same method at the same time, such as `ray_ranks.RayRanks`."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every rank and return their results by rank. Raises if a rank raises."""
        ...

    @property
    def gpus(self) -> list[tuple[str, int]]:
        """The machine and the GPU of each rank that has one."""
        ...

    def close(self) -> None: ...


class ShardedLearner:
    """Trains a transformers causal language model on ranks. `close` ends the ranks."""

    optimizer = None  # it is sharded over the ranks

    def __init__(
        self,
        model: Any,
        settings: LearnerSettings,
        *,
        temperature: float,
        ranks: Ranks,
        overlap: bool = False,
        inspect_dir: Path | None = None,
    ) -> None:
        check_packing(model)
        self._model: nn.Module = model
        self.inspect_dir = inspect_dir  # a batch that stops the run is saved there
        self._ranks = ranks
        self._is_behind = False  # whether the driver's model lacks the last update
        self._source = RankWeights(model, ranks, self._fetch)
        self._unscored = UnscoredSamples()
        self._runner = UpdateRunner(overlap=overlap)
        ranks.call("build", skeleton_of(model), weights_of(model), settings, temperature)

    @property
    def model(self) -> nn.Module:
        """The driver's model, with the weights of the last finished update."""
        self._fetch()
        return self._model

    @property
    def source(self) -> ModuleWeights:
        return self._source

    @property
    def gpus(self) -> list[tuple[str, int]]:
        """The machine and the GPU of each rank that has one, for engines that share them."""
        return self._ranks.gpus

    def skip(self, sample: int, attempt: int) -> None:
        """Leave this attempt of a sample out of its update. A later attempt of the sample counts again."""
        self._unscored.add(sample, attempt)

    def start(self, batch: Batch) -> Future[UpdateResult]:
        self._runner.assert_idle()
        scored = self._unscored.remove_from(batch)
        return empty_update() if scored is None else self._runner.start(lambda: self._update(scored))

    def close(self) -> None:
        self._runner.close()
        self._ranks.close()

    def state_dict(self) -> dict[str, Any]:
        """As of `TorchLearner.state_dict`."""
        self._runner.assert_idle()
        state = self._ranks.call("state")[0]
        tensors = {name: tensor_of(array, is_floating=True) for name, array in state["optimizer"].items()}
        return {**state, "optimizer": tensors, "left_out": self._unscored.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load everything except the weights: the ranks already have those of the model they were built with."""
        arrays = {name: array_of(tensor) for name, tensor in state["optimizer"].items()}
        self._ranks.call("load", {**state, "optimizer": arrays})
        self._unscored.load(state.get("left_out", []))

    def _update(self, batch: Batch) -> UpdateResult:
        inspect_dir = None if self.inspect_dir is None else self.inspect_dir.absolute()
        result, broken = self._ranks.call("update", batch, inspect_dir)[0]
        self._is_behind = True
        check_update(batch.update, result, ())
        if broken is not None and result.optimizer_steps:
            raise nonfinite_error(f"the weights after update {batch.update}", broken)
        return result

    def _fetch(self) -> None:
        """Copy the trained weights of rank 0 into the driver's model, if it lacks them."""
        if not self._is_behind:
            return
        self._runner.assert_idle()  # the ranks compute: a call now would reach them in different orders
        self._is_behind = False
        arrays = self._ranks.call("trained_weights")[0]
        parameters = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, array in arrays.items():
                parameters[name].copy_(tensor_of(array, is_floating=True))


class RankWeights(ModuleWeights):
    """The weights of a sharded learner. `fetch` brings the driver's model up to date."""

    __slots__ = ("_fetch", "_ranks")

    def __init__(self, model: nn.Module, ranks: Ranks, fetch: Callable[[], None]) -> None:
        super().__init__(model)
        self._ranks = ranks
        self._fetch = fetch

    @property
    def module(self) -> nn.Module:
        self._fetch()
        return super().module

    @property
    def adapter(self) -> dict[str, Tensor] | None:
        self._fetch()
        return super().adapter

    @property
    def place(self) -> Hashable:
        return super().place if is_adapted(self._trained) else "ranks"

    def apply(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call the function on every rank. Adapters are merged in this process, so their weights are here."""
        if is_adapted(self._trained):
            return super().apply(function, *arguments)
        return self._ranks.call("apply", function, *arguments)

    def snapshot(self) -> ModuleWeights:
        self._fetch()
        return super().snapshot()
