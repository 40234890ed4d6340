"""The learner whose updates run on several ranks; to the controller it is a learner like any other.

`run/builders/learner.py` makes it if `learner.ranks` is more than one. The driver keeps the whole model on the CPU.
Engines that can fetch weights from the ranks do that (`RankWeights.apply`). Whoever reads the driver's model instead,
such as an export, gets the trained weights from rank 0 first; between updates that happens once, and without a reader
never. Ranks write checkpoints themselves (`begin_save`), or the state goes through the driver (`state_dict`). Both can
be resumed with another number of ranks, or in one process.

Guarantees: the driver's model changes only when it is read after an update, in the reader's thread; weights that are
not finite stop the run at the update that made them; if a rank is lost, the ranks start again from the last checkpoint
(`restarts.py`), or the run stops with an error that names the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sortedrl.learner.base import UpdateResult
from sortedrl.learner.finite_weights import check_update, nonfinite_error
from sortedrl.learner.optimizer import LearnerSettings
from sortedrl.learner.pack import check_packing
from sortedrl.learner.sharded.restarts import Ranks, Restart, RestartingRanks, RestartPoint
from sortedrl.learner.sharded.shards import BlankWeights, skeleton_of, weights_of
from sortedrl.learner.unscored import UnscoredSamples, empty_update
from sortedrl.learner.update_runner import UpdateRunner
from sortedrl.records import Batch
from sortedrl.weights import ModuleWeights, array_of, is_adapted, tensor_of


@dataclass(slots=True, kw_only=True, frozen=True)
class ShardSave:
    """Shards that ranks are writing."""

    folder: Path
    state: dict[str, Any]  # the learner's state without tensors
    num_updates: int  # of the ranks, when the shards were copied
    wait: Callable[[], list[dict[str, dict[str, Any]]]]  # until all are on disk: size and SHA-256 of each rank's files


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
        initial: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """`initial` reads the weights of the start again, for a restart; without it the trained ones are copied."""
        check_packing(model)
        self._model: nn.Module = model
        self.inspect_dir = inspect_dir  # a batch that stops the run is saved there
        self._ranks = ranks if isinstance(ranks, RestartingRanks) else RestartingRanks(lambda: ranks, max_restarts=0)
        self._is_behind = False  # whether the driver's model lacks the last update
        self._source = RankWeights(model, self._ranks, self._fetch)
        self._unscored = UnscoredSamples()
        self._runner = UpdateRunner(overlap=overlap)
        self._ranks.call("build", skeleton_of(model), weights_of(model), settings, temperature)
        self._saved_point: tuple[RestartPoint, int] | None = None  # of the last `state_dict`
        if self._ranks.can_restart:
            weights = self._copied_weights() if initial is None else lambda _: initial()
            self._ranks.set_point(RestartPoint(name="the start of the run", weights=weights), 0)

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
        if self._ranks.can_restart:
            self._saved_point = self._point_of(state), self._ranks.num_updates
        tensors = {name: tensor_of(array, is_floating=True) for name, array in state["optimizer"].items()}
        return {**state, "optimizer": tensors, "left_out": self._unscored.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load everything except the weights: the ranks already have those of the model they were built with."""
        arrays = {name: array_of(tensor) for name, tensor in state["optimizer"].items()}
        whole = {**state, "optimizer": arrays}
        self._ranks.call("load", whole)
        self._unscored.load(state.get("left_out", []))
        if self._ranks.can_restart:
            self._ranks.set_point(self._point_of(whole), self._ranks.num_updates)

    def begin_save(self, folder: Path) -> ShardSave:
        """Let the ranks copy their shards and write them to a new folder, while updates go on."""
        self._runner.assert_idle()
        state, broken = self._ranks.call("save_shards", folder.absolute())[0]
        if broken is not None:
            raise nonfinite_error(f"the weights to save as {folder}", broken)
        wait = self._ranks.start("wait_saved")
        return ShardSave(
            folder=folder,
            state={**state, "left_out": self._unscored.state()},
            num_updates=self._ranks.num_updates,
            wait=wait,
        )

    def load_shards(self, folder: Path, state: dict[str, Any]) -> None:
        """Load weights and state from shards, of any number of ranks."""
        point = self._shard_point(folder.absolute(), state)
        point.load(self._ranks)
        self._unscored.load(state.get("left_out", []))
        self._is_behind = True
        self._ranks.set_point(point, self._ranks.num_updates)

    def mark_saved(self, save: ShardSave | None = None, *, folder: Path | None = None) -> None:
        """Restart from a checkpoint from now on: from shards, which are now in `folder`, or from the last `state_dict`.

        The checkpoint must have its name, and stay until the next one has its name.
        """
        if save is not None:
            assert folder is not None, "shards are in a folder"
            self._ranks.set_point(self._shard_point(folder.absolute(), save.state), save.num_updates)
        elif self._saved_point is not None:
            self._ranks.set_point(*self._saved_point)
            self._saved_point = None

    def take_restarts(self) -> list[Restart]:
        """The restarts since the last call of this."""
        return self._ranks.take_restarts()

    def _shard_point(self, folder: Path, state: dict[str, Any]) -> RestartPoint:
        def load(ranks: Ranks) -> None:
            ranks.call("load_shards", folder, state)

        return RestartPoint(name=f"checkpoint {folder.parent.name}", weights=BlankWeights, load=load)

    def _point_of(self, state: dict[str, Any]) -> RestartPoint:
        """A point in this process's memory: the current weights, and the learner's state."""

        def load(ranks: Ranks) -> None:
            ranks.call("load", state)

        return RestartPoint(name="the last checkpoint", weights=self._copied_weights(), load=load)

    def _copied_weights(self) -> Callable[[Any], Mapping[str, Any]]:
        self._fetch()
        trained = {
            name: array_of(parameter).copy()
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }
        return lambda _: {**weights_of(self._model), **trained}

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

    def __init__(self, model: nn.Module, ranks: RestartingRanks, fetch: Callable[[], None]) -> None:
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
        return super().place if is_adapted(self._trained) else self._ranks.place

    def apply(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call the function on every rank. Adapters are merged in this process, so their weights are here."""
        if is_adapted(self._trained):
            return super().apply(function, *arguments)
        return self._ranks.call("apply", function, *arguments)

    def snapshot(self) -> ModuleWeights:
        self._fetch()
        return super().snapshot()
