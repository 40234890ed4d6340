"""Processes killed while they save: at any moment, `latest` finds a whole checkpoint, the newest."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sortedrl.learner.torch import TorchLearner
from sortedrl.run.checkpoint_folder import OPTIMIZER_FILE, Checkpoints, load_model, load_state
from sortedrl.run.manifest import find_damage
from tests.run.test_checkpoint import SETTINGS, make_batch, make_model, make_tokenizer
from tests.support.forked_process import FORK_SERVER, WAIT_S, ForkedProcess

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")


def serve(folder: Path, requests: Any) -> None:
    """Fork one saver for each request (folder, version, turn, kill_at); reply with its process id and its exit code.

    With `kill_at` the saver saves once and kills itself before that file operation; with 0 it saves until it is killed.
    Every file of a save contains its turn number.
    """
    model, tokenizer = make_model(), make_tokenizer()
    learner = TorchLearner(model, SETTINGS, temperature=1.0)
    learner.start(make_batch(0))

    def save(folder: Path, version: int, turn: int) -> None:
        with torch.no_grad():
            for tensor in [*model.parameters(), *learner.state_dict()["optimizer"].values()]:
                tensor.fill_(turn)
        Checkpoints(folder, keep=1).save(
            version,
            model,
            tokenizer,
            learner=learner,
            extra={"version": version, "turn": turn},
            add=lambda folder: (folder / "ledger").write_text(str(turn) * 5000),
        )

    save(folder, 0, 0)  # what is imported at the first save is not imported in each saver
    requests.send("ready")
    while True:
        folder, version, turn, kill_at = requests.recv()
        pid = os.fork()
        if pid == 0:
            if kill_at:
                kill_before_operation(kill_at)
            save(folder, version, turn)
            while not kill_at:
                version, turn = version + 1, turn + 1
                save(folder, version, turn)
            os._exit(0)
        requests.send(pid)
        requests.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def kill_before_operation(count: int) -> None:
    def hook(event: str, _: object) -> None:
        nonlocal count
        if event in ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove"):
            count -= 1
            if count == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = lambda descriptor: None  # a killed process, not a lost machine: what was written stays written
    sys.addaudithook(hook)


class Savers:
    def __init__(self, asking: Any) -> None:
        self._asking = asking
        assert self._answer() == "ready"

    def start(self, folder: Path, version: int, turn: int, *, kill_at: int = 0) -> int:
        self._asking.send((folder, version, turn, kill_at))
        return self._answer()

    def wait(self) -> int:
        """How the saver ended: 0 if it was done, -9 if it was killed."""
        return self._answer()

    def _answer(self) -> Any:
        assert self._asking.poll(WAIT_S), "no answer"
        return self._asking.recv()


@pytest.fixture(scope="module")
def savers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Savers]:
    folder = tmp_path_factory.mktemp("warm")
    ours, theirs = FORK_SERVER.Pipe()
    with ForkedProcess(folder, serve, folder / "first", theirs):
        theirs.close()
        yield Savers(ours)


def newest_checkpoint(folder: Path) -> tuple[int, int]:
    """Version and turn of the newest checkpoint; checks that all its files are from the same save."""
    path = Checkpoints(folder).latest()
    assert path is not None
    # Half of a checkpoint, written or deleted, never has a version's name.
    assert {find_damage(folder / str(version)) for version in Checkpoints(folder).versions()} <= {None}
    extra = load_state(path)
    turn = extra["turn"]
    for name in ("model.safetensors", OPTIMIZER_FILE):
        assert all(bool((tensor == turn).all()) for tensor in load_file(path / name).values()), name
    assert (path / "ledger").read_text() == str(turn) * 5000
    return extra["version"], turn


@pytest.mark.parametrize("step", [1, 0])
def test_killed_before_each_file_operation_in_turn(savers: Savers, tmp_path: Path, step: int) -> None:
    """Kill a save of the next version, and one that replaces the same version; one checkpoint is kept."""
    savers.start(tmp_path, 1, 0, kill_at=10_000)
    assert savers.wait() == 0
    before = (1, 0)
    was_kept: list[bool] = []
    code = -signal.SIGKILL
    while code == -signal.SIGKILL:
        turn = len(was_kept) + 1
        savers.start(tmp_path, before[0] + step, turn, kill_at=turn)
        code = savers.wait()
        after = newest_checkpoint(tmp_path)
        assert after in (before, (before[0] + step, turn))
        was_kept.append(after == before)
        before = after
    assert code == 0
    # The old checkpoint was there until the new one was, and no temporary folder is left.
    assert was_kept == sorted(was_kept, reverse=True)
    assert was_kept.count(True) > 20
    assert was_kept.count(False) > 5
    assert {entry.name for entry in tmp_path.iterdir()} == {str(before[0])}


def test_killed_at_random_moments(savers: Savers, tmp_path: Path) -> None:
    choices = random.Random(0)
    newest = (0, 0)
    for _ in range(12):
        first = newest[0] + 1
        began = time.monotonic()
        pid = savers.start(tmp_path, first, newest[1] + 1)
        while max(Checkpoints(tmp_path).versions(), default=0) < first:
            time.sleep(0.001)
        # By the time that one save took, this is somewhere in the next save or two.
        time.sleep(choices.uniform(0, 2 * (time.monotonic() - began)))
        os.kill(pid, signal.SIGKILL)
        assert savers.wait() == -signal.SIGKILL
        after = newest_checkpoint(tmp_path)
        assert after[0] == after[1] >= first
        newest = after
    path = Checkpoints(tmp_path).latest()
    assert path is not None
    model, _ = load_model(path)
    assert all(bool((parameter == newest[1]).all()) for parameter in model.parameters())


def test_others_may_ask_while_a_run_saves_and_removes(
    savers: Savers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path)
    pid = savers.start(tmp_path, 1, 1)
    try:
        seen: set[Path] = set()
        while len(seen) < 6:
            if (path := checkpoints.latest()) is not None:
                seen.add(path)
    finally:
        os.kill(pid, signal.SIGKILL)
        assert savers.wait() == -signal.SIGKILL
    assert caplog.messages == []
