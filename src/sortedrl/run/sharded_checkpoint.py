"""Checkpoints that ranks write themselves, in the background: nothing large passes through this process.

`RunSaver` begins one between two updates. At that moment the run's state and a copy of the ledger are written, and the
ranks copy their shards of weights and optimizer state to host memory. They write the copies while the run goes on
(`learner/sharded/shard_files.py`). A thread of this process waits for them and gives the checkpoint its name.

Guarantees: everything in a checkpoint belongs to the same version; one save at a time; a checkpoint gets its name only
after the files of every rank and all others are flushed to disk, and only then are older ones removed and do restarts
begin from it. So a run that is killed at any moment resumes from the last checkpoint that has its name. A save that
lost a rank is given up with a warning, because the ranks start again.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from sortedrl.errors import RankLostError
from sortedrl.learner.model import no_progress_bars
from sortedrl.learner.sharded.learner import ShardedLearner, ShardSave
from sortedrl.learner.sharded.shard_files import SHARDS_FOLDER
from sortedrl.run.atomic_folder import begin_folder, complete_folder
from sortedrl.run.checkpoint_folder import Checkpoints, write_state, writing
from sortedrl.run.manifest import write_manifest
from sortedrl.run.saved_run import SHARDED

log = logging.getLogger(__name__)


class SaveInFlight:
    """A checkpoint that is being written. Everything it holds was copied when this was made."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        version: int,
        learner: ShardedLearner,
        model: Any,
        tokenizer: Any,
        *,
        extra: dict[str, Any],
        add: Callable[[Path], object],
    ) -> None:
        """`model` gives its configuration alone. `add` is called with the temporary folder, to write further files."""
        self.version = version
        self._checkpoints = checkpoints
        self._learner = learner
        self._folder = checkpoints.prepare(version, model, has_learner=True)
        with writing(self._folder):
            self._temporary = begin_folder(self._folder)
        try:
            with writing(self._folder), no_progress_bars():
                model.config.save_pretrained(self._temporary)
                if getattr(model, "generation_config", None) is not None:
                    model.generation_config.save_pretrained(self._temporary)
                tokenizer.save_pretrained(self._temporary)
                add(self._temporary)
            save = learner.begin_save(self._temporary / SHARDS_FOLDER)
            with writing(self._folder):
                write_state(self._temporary, dict(save.state), extra, SHARDED)
        except BaseException:
            shutil.rmtree(self._temporary, ignore_errors=True)
            raise
        self._result: Future[bool] = Future()
        threading.Thread(target=self._complete, args=(save,), name="sortedrl-save", daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._result.done()

    def wait(self) -> bool:
        """Wait until the checkpoint has its name; False if it was given up, because a rank was lost."""
        return self._result.result()

    def _complete(self, save: ShardSave) -> None:
        try:
            self._result.set_result(self._name(save))
        except BaseException as error:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._result.set_exception(error)

    def _name(self, save: ShardSave) -> bool:
        try:
            written = save.wait()
        except RankLostError as error:
            log.warning("checkpoint %d is given up: %s", self.version, error.what)
            shutil.rmtree(self._temporary, ignore_errors=True)
            return False
        known = {f"{SHARDS_FOLDER}/{name}": entry for files in written for name, entry in files.items()}
        with writing(self._folder):
            write_manifest(self._temporary, known)
            complete_folder(self._temporary, self._folder)
        self._learner.mark_saved(save, folder=self._folder / SHARDS_FOLDER)
        self._checkpoints.drop_others(self.version)
        return True
