"""Defects that the fuzzer must find: `python -m fuzz --planted` plants one after the other and looks for each.

Each defect replaces a method in the process that trains, before it starts. They are what a careless change of the
package could bring: a flush left out, a bound off by one, a sample taken twice or forgotten.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PLANTED: dict[str, Callable[[], None]] = {}
ONLY_A_HOST_SHOWS = ("commit-skipped",)
ONLY_A_POWER_LOSS_SHOWS = ("flush-skipped",)


def plant(name: str) -> None:
    """Plant the defect of this name; none for an empty name."""
    if name:
        PLANTED[name]()


def _defect(plant_it: Callable[[], None]) -> Callable[[], None]:
    PLANTED[plant_it.__name__.replace("_", "-")] = plant_it
    return plant_it


def replace_method(owner: Any, method: str, by: Callable[..., Any]) -> None:
    setattr(owner, method, by)


def _after(owner: Any, method: str, then: Callable[..., None]) -> None:
    """Call `then(result, *arguments)` after each call of a method."""
    inner = getattr(owner, method)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        then(result, *args)
        return result

    setattr(owner, method, changed)


@_defect
def double_take() -> None:
    """A trained sample stays in the buffer."""
    from sortedrl.buffer import Buffer
    from sortedrl.records import State

    def put_back(batch: list[Any], buffer: Buffer, *_: Any) -> None:
        if not buffer.grouped:
            sample = batch[0]
            sample.state, buffer.samples[sample.id], buffer.scored[sample.id] = State.SCORED, sample, sample
            buffer.num_ready += 1

    _after(Buffer, "take", put_back)


@_defect
def lost_requeue() -> None:
    """A sample that is to continue after an update is forgotten now and then."""
    from sortedrl.buffer import Buffer

    def forget(_: int, buffer: Buffer, sample: Any, *__: Any) -> None:
        if sample.id % 5 == 0 and not buffer.grouped:
            for held in (buffer.pending, buffer.waiting, buffer.unverified, buffer.samples):
                held.pop(sample.id, None)
            cohort = buffer.cohorts[sample.cohort]
            cohort.num_left -= 1
            if cohort.num_left == 0:
                del buffer.cohorts[cohort.id]

    _after(Buffer, "requeue", forget)


@_defect
def staleness_off_by_one() -> None:
    """An answer may be one version older than the bound."""
    from sortedrl.schedule import decisions

    def exceeds(buffer: Any, knobs: Any, sample: Any, version: int) -> bool:
        return knobs.max_staleness is not None and buffer.staleness(sample, version) > knobs.max_staleness + 1

    decisions._exceeds = exceeds


@_defect
def commit_skipped() -> None:
    """A batch is taken before its rows are committed. The copy in a checkpoint heals that, so only a host shows it."""
    from sortedrl.ledger.store import Store

    inner = Store.add_batch

    def add_batch(store: Store, number: int, version: int, batch: Any) -> None:
        commit, store.commit = store.commit, lambda durable=False: None
        inner(store, number, version, batch)
        store.commit = commit

    replace_method(Store, "add_batch", add_batch)


@_defect
def no_cut() -> None:
    """Rows after the checkpoint stay in the ledger when a run is resumed."""
    from sortedrl.ledger.store import Store

    replace_method(Store, "truncate", lambda store, seq: None)


@_defect
def optimizer_not_restored() -> None:
    from sortedrl.learner.torch import TorchLearner

    replace_method(TorchLearner, "load_state_dict", lambda learner, state: None)


@_defect
def other_noise_in_later_attempts() -> None:
    """A sample draws other noise when it runs again."""
    from sortedrl.controller import Controller

    inner = Controller.start

    def start(controller: Controller, sample: Any) -> Any:
        request = inner(controller, sample)
        if sample.attempt > 1:
            request.seed += sample.attempt
        return request

    replace_method(Controller, "start", start)


@_defect
def loader_not_restored() -> None:
    """A resumed run reads its data from the beginning."""
    from sortedrl.tasks import loader

    for value in vars(loader).values():
        if isinstance(value, type) and hasattr(value, "load_state_dict"):
            value.load_state_dict = lambda loader, state: None


@_defect
def temporary_left() -> None:
    """A temporary folder of a checkpoint stays."""
    from sortedrl.run import checkpoint_folder

    inner = checkpoint_folder.written_whole

    @contextlib.contextmanager
    def written_whole(folder: Path) -> Iterator[Path]:
        with inner(folder) as temporary:
            yield temporary
        folder.with_name(f".{folder.name}.partial-1").mkdir(exist_ok=True)

    checkpoint_folder.written_whole = written_whole


@_defect
def unfinished_file_left() -> None:
    """A resume does not remove the temporary file that a killed process was writing."""
    from sortedrl import trainer

    trainer.remove_unfinished = lambda folder: None


@_defect
def process_left() -> None:
    """A helper process outlives the run."""
    subprocess.Popen(["sleep", "600"])  # noqa: S607


@_defect
def traceback_on_full_disk() -> None:
    from sortedrl.ledger import schema, store

    @contextlib.contextmanager
    def named_errors(path: Path, run: Path | None = None) -> Iterator[None]:
        yield

    schema.named_errors = store.named_errors = named_errors


@_defect
def damage_not_looked_for() -> None:
    """The checksums of a checkpoint are not compared."""
    from sortedrl.run import checkpoint_folder

    checkpoint_folder.find_damage = lambda *args, **kwargs: None


@_defect
def success_claimed() -> None:
    """The command exits with 0 whatever happened."""
    from sortedrl import cli

    inner = cli.main

    def main() -> None:
        try:
            inner()
        except SystemExit:
            os._exit(0)

    cli.main = main


@_defect
def cohort_late() -> None:
    """A cohort's last update does not wait for its last samples."""
    from sortedrl.schedule import decisions

    decisions.due_cohorts = lambda buffer, knobs: set()


@_defect
def lost_at_interrupt() -> None:
    """The tokens of an interrupted answer are cut by one."""
    from sortedrl.buffer import Buffer

    def cut(_: None, buffer: Buffer, sample: Any, *__: Any) -> None:
        if sample.segments and len(sample.segments[-1].tokens) > 1:
            sample.segments[-1].tokens.pop()
            sample.segments[-1].logprobs.pop()
            sample.held = sample.held - 1

    _after(Buffer, "interrupt", cut)


@_defect
def reward_lost() -> None:
    """Now and then a score is replaced by 0 after the ledger has recorded it."""
    from sortedrl.ledger.store import DurableBuffer

    def forget(sample: Any, *_: Any) -> None:
        if sample is not None and sample.id % 7 == 0 and sample.reward:
            sample.reward = 0.0

    _after(DurableBuffer, "score", forget)


@_defect
def flush_skipped() -> None:
    """The files of a checkpoint are renamed before they are on disk. `python -m fuzz --disk` must find it."""
    from sortedrl.run import atomic_folder

    atomic_folder._flush = lambda folder: None
