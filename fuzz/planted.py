"""Defects that the fuzzer must find: `python -m fuzz --planted` plants one after the other and looks for each.

Each defect replaces a method in the process that trains, before it starts. They are what a careless change of the
package could bring: a flush left out, a bound off by one, a sample taken twice or forgotten. A defect counts as found
only by a finding of a kind that it explains; one whose target is not there any more raises `NotPlantedError`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz.finding import FindingKind

PLANTED: dict[str, Callable[[], None]] = {}
EXPECTED: dict[str, frozenset[FindingKind]] = {}  # the kinds of findings that each defect explains
ONLY_A_HOST_SHOWS = ("commit-skipped",)
ONLY_A_POWER_LOSS_SHOWS = ("flush-skipped",)


def plant(name: str) -> None:
    """Plant the defect of this name; none for an empty name. Raises NotPlantedError if its target is not there."""
    if not name:
        return
    try:
        PLANTED[name]()
    except (AttributeError, ImportError) as error:
        raise NotPlantedError(str(error)) from error


class NotPlantedError(Exception):
    """The defect could not be planted: what it replaces has another name now."""


def _defect(*kinds: FindingKind) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(plant_it: Callable[[], None]) -> Callable[[], None]:
        name = plant_it.__name__.replace("_", "-")
        PLANTED[name], EXPECTED[name] = plant_it, frozenset(kinds)
        return plant_it

    return add


def replace_method(owner: Any, method: str, by: Callable[..., Any]) -> None:
    """Replace a method of a class or a function of a module, which must be there."""
    if not hasattr(owner, method):
        raise NotPlantedError(f"{owner.__name__} has no {method} any more")
    setattr(owner, method, by)


def _after(owner: Any, method: str, then: Callable[..., None]) -> None:
    """Call `then(result, *arguments)` after each call of a method."""
    inner = getattr(owner, method, None)
    if inner is None:
        raise NotPlantedError(f"{owner.__name__} has no {method} any more")

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        then(result, *args)
        return result

    replace_method(owner, method, changed)


@_defect(FindingKind.TWICE, FindingKind.TRACEBACK)
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


@_defect(FindingKind.LOST)
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


@_defect(FindingKind.LEDGER, FindingKind.TRACEBACK)
def staleness_off_by_one() -> None:
    """An answer may be one version older than the bound."""
    from sortedrl.schedule import decisions

    def exceeds(buffer: Any, knobs: Any, sample: Any, version: int) -> bool:
        return knobs.max_staleness is not None and buffer.staleness(sample, version) > knobs.max_staleness + 1

    replace_method(decisions, "_exceeds", exceeds)


@_defect(FindingKind.LOST, FindingKind.LEDGER, FindingKind.TRACEBACK)
def commit_skipped() -> None:
    """A batch is taken before its rows are committed. The copy in a checkpoint heals that, so only a host shows it."""
    from sortedrl.ledger.store import Store

    inner = Store.add_batch

    def add_batch(store: Store, number: int, version: int, batch: Any) -> None:
        commit, store.commit = store.commit, lambda durable=False: None
        inner(store, number, version, batch)
        store.commit = commit

    replace_method(Store, "add_batch", add_batch)


@_defect(FindingKind.TWICE, FindingKind.LEDGER, FindingKind.TRACEBACK, FindingKind.WRONG_RESUME)
def no_cut() -> None:
    """Rows after the checkpoint stay in the ledger when a run is resumed."""
    from sortedrl.ledger.store import Store

    replace_method(Store, "truncate", lambda store, seq: None)


@_defect(FindingKind.WRONG_RESUME)
def optimizer_not_restored() -> None:
    from sortedrl.learner.torch import TorchLearner

    replace_method(TorchLearner, "load_state_dict", lambda learner, state: None)


@_defect(FindingKind.WRONG_RESUME)
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


@_defect(FindingKind.LOST, FindingKind.TWICE, FindingKind.LEDGER, FindingKind.WRONG_RESUME, FindingKind.TRACEBACK)
def loader_not_restored() -> None:
    """A resumed run reads its data from the beginning."""
    from sortedrl.tasks import loader

    replace_method(loader.SampleLoader, "load_state_dict", lambda loader, state: None)


@_defect(FindingKind.LEFTOVER)
def temporary_left() -> None:
    """A temporary folder of a checkpoint stays."""
    from sortedrl.run import checkpoint_folder

    inner = checkpoint_folder.written_whole

    @contextlib.contextmanager
    def written_whole(folder: Path) -> Iterator[Path]:
        with inner(folder) as temporary:
            yield temporary
        folder.with_name(f".{folder.name}.partial-1").mkdir(exist_ok=True)

    replace_method(checkpoint_folder, "written_whole", written_whole)


@_defect(FindingKind.LEFTOVER)
def unfinished_file_left() -> None:
    """A resume does not remove the temporary file that a killed process was writing."""
    from sortedrl import trainer

    replace_method(trainer, "remove_unfinished", lambda folder: None)


@_defect(FindingKind.LEFTOVER)
def process_left() -> None:
    """A helper process outlives the run."""
    subprocess.Popen(["sleep", "600"])  # noqa: S607


@_defect(FindingKind.TRACEBACK)
def traceback_on_full_disk() -> None:
    from sortedrl.ledger import schema, store

    @contextlib.contextmanager
    def named_errors(path: Path, run: Path | None = None) -> Iterator[None]:
        yield

    for module in (schema, store):
        replace_method(module, "named_errors", named_errors)


@_defect(FindingKind.TRACEBACK, FindingKind.WRONG_RESUME, FindingKind.LEDGER)
def damage_not_looked_for() -> None:
    """The checksums of a checkpoint are not compared."""
    from sortedrl.run import checkpoint_folder

    replace_method(checkpoint_folder, "find_damage", lambda *args, **kwargs: None)


@_defect(FindingKind.LOST, FindingKind.LEDGER)
def success_claimed() -> None:
    """The command exits with 0 whatever happened."""
    from sortedrl import cli

    inner = cli.main

    def main() -> None:
        try:
            inner()
        except SystemExit:
            os._exit(0)

    replace_method(cli, "main", main)


@_defect(FindingKind.LEDGER, FindingKind.TRACEBACK)
def cohort_late() -> None:
    """A cohort's last update does not wait for its last samples."""
    from sortedrl.schedule import decisions

    replace_method(decisions, "due_cohorts", lambda buffer, knobs: set())


@_defect(FindingKind.LEDGER, FindingKind.WRONG_RESUME, FindingKind.TRACEBACK)
def lost_at_interrupt() -> None:
    """The tokens of an interrupted answer are cut by one."""
    from sortedrl.buffer import Buffer

    def cut(_: None, buffer: Buffer, sample: Any, *__: Any) -> None:
        if sample.segments and len(sample.segments[-1].tokens) > 1:
            sample.segments[-1].tokens.pop()
            sample.segments[-1].logprobs.pop()
            sample.held = sample.held - 1

    _after(Buffer, "interrupt", cut)


@_defect(FindingKind.LEDGER, FindingKind.WRONG_RESUME, FindingKind.TRACEBACK)
def reward_lost() -> None:
    """Now and then a score is replaced by 0 after the ledger has recorded it."""
    from sortedrl.ledger.store import DurableBuffer

    def forget(sample: Any, *_: Any) -> None:
        if sample is not None and sample.id % 7 == 0 and sample.reward:
            sample.reward = 0.0

    _after(DurableBuffer, "score", forget)


@_defect(FindingKind.WRONG_RESUME, FindingKind.LEDGER, FindingKind.LOST)
def flush_skipped() -> None:
    """The files of a checkpoint are renamed before they are on disk. `python -m fuzz --disk` must find it."""
    from sortedrl.run import atomic_folder

    replace_method(atomic_folder, "_flush", lambda folder: None)
