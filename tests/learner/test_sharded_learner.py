"""The learner whose ranks are Ray actors: its updates, its state, where it listens, and ranks that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from sortedrl.config import SortedConfig
from sortedrl.engine.pool.ray_cluster import connect, disconnect
from sortedrl.errors import ConfigError, LearnerError, RankLostError
from sortedrl.learner.base import UpdateResult
from sortedrl.learner.sharded.learner import ShardedLearner
from sortedrl.learner.torch import TorchLearner
from sortedrl.learner.unscored import SkippingLearner
from sortedrl.run.checkpoint_folder import load_state, save_checkpoint
from tests.cli.test_cli import QUICKSTART, SCRIPT, SMALL, WAIT_S, script
from tests.support.learners import Settings, make_model
from tests.support.rank_cases import batch_of, run_updates

SETTINGS = Settings(micro_tokens=40, weight_decay=0.1)
TIMEOUT_S = 120.0  # how long ranks wait for each other; no test waits it out
HANG_TIMEOUT_S = 20.0  # a test waits for this one


class NoTokenizer:
    """A checkpoint is saved with a tokenizer; these tests never read it."""

    def save_pretrained(self, folder: Path) -> None: ...


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        here = str(Path(__file__).parents[2])  # the ranks' processes import `Settings` from there
        patch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
        import ray  # noqa: F401  # a user's program may have imported it before: it listens on loopback all the same

        before = signal.getsignal(signal.SIGTERM)
        connect()
        assert signal.getsignal(signal.SIGTERM) == before  # Ray's own handler would end a run with another exit code
    yield
    disconnect()


def start_ranks(model: Any, timeout_s: float = TIMEOUT_S) -> tuple[ShardedLearner, Any]:
    from sortedrl.learner.sharded.ray_ranks import RayRanks

    ranks = RayRanks(2, num_cpus=0.5, num_gpus=0, threads=1, timeout_s=timeout_s)
    return ShardedLearner(model, SETTINGS, temperature=1.0, ranks=ranks), ranks


@pytest.fixture(scope="module")
def sharded(cluster: None) -> Iterator[tuple[ShardedLearner, Any]]:
    learner, ranks = start_ranks(make_model())
    yield learner, ranks
    learner.close()


def check_close(model: Any, other: Any) -> None:
    """Within a thousandth of the way from the start: AdamW makes noise of gradients that are nearly 0."""
    start, theirs = dict(make_model().named_parameters()), dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        moved = (theirs[name] - start[name]).norm()
        assert moved > 0
        assert (parameter - theirs[name]).norm() <= 1e-3 * moved, name


def test_updates_are_those_of_one_process(sharded: tuple[ShardedLearner, Any], tmp_path: Path) -> None:
    """And a checkpoint of two ranks is resumed in one process, and in two ranks."""
    learner, _ = sharded
    one = TorchLearner(make_model(), SETTINGS, temperature=1.0)
    found, wanted = run_updates(learner, 0, 2), run_updates(one, 0, 2)
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in wanted], rel=1e-5)
    check_close(learner.source.module, one.model)
    assert learner.source.module is learner.model  # so an engine built on it has nothing to copy

    save_checkpoint(tmp_path / "2", learner.model, NoTokenizer(), learner=learner)
    model = make_model()
    model.load_state_dict(load_weights(tmp_path / "2"))
    after = SkippingLearner(model, SETTINGS, temperature=1.0)
    load_state(tmp_path / "2", after)
    saved = learner.state_dict()["optimizer"]
    assert saved.keys() == one.state_dict()["optimizer"].keys()
    assert all(torch.equal(value, saved[name]) for name, value in after.state_dict()["optimizer"].items())
    load_state(tmp_path / "2", learner)
    run_updates(learner, 2, 3), run_updates(after, 2, 3)
    check_close(learner.model, after.model)


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_samples_that_could_not_be_scored_have_no_weight(sharded: tuple[ShardedLearner, Any]) -> None:
    learner, _ = sharded
    batch = batch_of(3)
    for sample in batch.samples:
        learner.skip(sample.id, sample.attempt)
    assert learner.start(batch).result().optimizer_steps == 0
    learner.skip(batch.samples[0].id, batch.samples[0].attempt)
    metrics = learner.start(batch).result().metrics
    assert metrics["num_tokens"] == sum(sample.num_tokens for sample in batch.samples[1:])


def test_ranks_that_are_stuck_in_sending_weights_are_lost(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that never joins keeps rank 0 inside NCCL: only its end helps, and a restart."""
    from sortedrl.learner.sharded import ray_ranks

    ranks = ray_ranks.RayRanks.__new__(ray_ranks.RayRanks)
    ranks.size, ranks._send_s, ranks._failure, ranks._locations = 2, 0.0, None, []
    limits: list[float | None] = []

    def wait(pending: list[Any], num_returns: int, timeout: float | None) -> Any:
        limits.append(timeout)
        return ([], pending) if timeout is not None else ([pending[0]], pending[1:])

    monkeypatch.setattr(ranks, "_send", lambda *_: {"first": 0, "second": 1})
    monkeypatch.setattr(ranks, "_end", lambda: None)
    monkeypatch.setattr(ray_ranks, "ray", types.SimpleNamespace(wait=wait, get=str))
    assert ranks.call("update") == ["first", "second"]
    with pytest.raises(RankLostError, match=r"weights were not sent within 0 s by rank 0 of 2, rank 1 of 2.*publish_s"):
        ranks.call("apply")
    assert limits == [None, None, 0.0]


class BrokenRanks:
    """Ranks whose update makes weights that are not finite."""

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [(UpdateResult(optimizer_steps=1), "lm_head.weight")] if method == "update" else [None]

    def close(self) -> None: ...


def test_weights_of_ranks_that_are_not_finite_stop_the_run() -> None:
    learner = ShardedLearner(make_model(), SETTINGS, temperature=1.0, ranks=BrokenRanks())
    with pytest.raises(
        LearnerError, match=r"weights after update 0 .*not finite \(lm_head\.weight\).*lower learner\.lr"
    ):
        learner.start(batch_of(0)).result()


def test_ranks_listen_on_loopback(sharded: tuple[ShardedLearner, Any]) -> None:
    _, ranks = sharded
    addresses = {
        connection.laddr.ip
        for _, pid in ranks.locations
        for connection in psutil.Process(pid).net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert addresses
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_a_rank_that_is_killed_in_the_update(
    sharded: tuple[ShardedLearner, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the last test with the shared ranks, because it ends them."""
    from sortedrl.learner.sharded import ray_ranks

    learner, ranks = sharded
    before = {name: parameter.clone() for name, parameter in learner.model.named_parameters()}
    pids = [pid for _, pid in ranks.locations]
    os.kill(pids[1], signal.SIGSTOP)  # so that the update cannot finish before the rank is killed
    wait = ray_ranks.ray.wait

    def kill_and_wait(*args: Any, **options: Any) -> Any:
        """The driver waits once all ranks have been called."""
        if psutil.pid_exists(pids[1]):
            os.kill(pids[1], signal.SIGKILL)
        return wait(*args, **options)

    monkeypatch.setattr(ray_ranks.ray, "wait", kill_and_wait)
    with pytest.raises(LearnerError, match=rf"rank 1 of 2 \(process {pids[1]} on .*has died.*resume"):
        learner.start(batch_of(4))
    assert all(torch.equal(value, before[name]) for name, value in learner.model.named_parameters())
    with pytest.raises(LearnerError, match="has died"):
        learner.start(batch_of(4))
    deadline = time.monotonic() + WAIT_S
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "the ranks are still running"
        time.sleep(0.1)


def test_more_ranks_than_processors() -> None:
    from sortedrl.run.builders.learner import check_room

    config = SortedConfig(learner={"ranks": 2, "rank_cpus": 4096.0})
    with pytest.raises(ConfigError, match=r"8192 processors .* lower learner.rank_cpus"):
        check_room(config)
    check_room(SortedConfig(learner={"ranks": 2, "rank_cpus": 0.25}, engine={"replicas": 2, "replica_cpus": 0.25}))


def test_ranks_have_the_device_that_was_asked_for() -> None:
    from sortedrl.run.builders.learner import check_rank_device

    with pytest.raises(ConfigError, match=r"device = cuda, but learner.rank_gpus = 0 .* set learner.rank_gpus = 1"):
        check_rank_device(SortedConfig(learner={"ranks": 2, "device": "cuda"}))
    with pytest.raises(ConfigError, match="device = cpu does not use"):
        check_rank_device(SortedConfig(learner={"ranks": 2, "device": "cpu", "rank_gpus": 1.0}))
    check_rank_device(SortedConfig(learner={"ranks": 2, "rank_gpus": 1.0}))
    with pytest.raises(ConfigError, match=r"learner\.device"):
        SortedConfig(learner={"device": "gpu"})


@pytest.mark.slow
def test_a_rank_that_hangs(cluster: None) -> None:
    learner, ranks = start_ranks(make_model(), timeout_s=HANG_TIMEOUT_S)
    os.kill(ranks.locations[1][1], signal.SIGSTOP)
    with pytest.raises(LearnerError, match=r"rank 0 of 2 .* failed .*; rank 1 of 2 .* did not answer.*rank_timeout_s"):
        learner.start(batch_of(0))
    learner.close()


@pytest.mark.slow
def test_an_error_of_one_rank_names_it(cluster: None) -> None:
    learner, _ = start_ranks(make_model())
    state = learner.state_dict()
    state["optimizer"] = {"no.such.weight/exp_avg": torch.zeros(3)}
    with pytest.raises(LearnerError, match=r"rank [01] of 2 \(process \d+ on .*\): the optimizer state names 'no.such"):
        learner.load_state_dict(state)
    learner.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_whose_rank_was_killed_goes_on_in_one_process(tmp_path: Path) -> None:
    settings = [*SMALL, "run.dir=out", "run.report=false", "checkpoint.every_updates=2", "run.samples=100000"]
    with subprocess.Popen(
        [
            SCRIPT,
            "train",
            str(QUICKSTART),
            *settings,
            "learner.ranks=2",
            "learner.rank_cpus=0.5",
            "learner.max_restarts=0",
        ],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        try:
            victim = wait_for_rank(run, tmp_path / "out" / "quickstart" / "metrics.jsonl", after_updates=3)
            victim.kill()
            _, err = run.communicate(timeout=WAIT_S)
        finally:
            run.kill()
    assert run.returncode == 2, err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert f"(process {victim.pid} on 127.0.0.1) has died" in line
    assert "sortedrl train --resume out/quickstart" in err
    resume = ["train", "--resume", "out/quickstart", "learner.ranks=1", "run.samples=160", "--json"]
    done = script(*resume, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ledger = json.loads(done.stdout)["runs"][0]["ledger"]
    assert [ledger[key] for key in ("loaded", "trained", "lost", "duplicated")] == [160, 160, 0, 0]
    assert script("ledger", "out/quickstart", "--verify", cwd=tmp_path).returncode == 0


def wait_for_rank(run: subprocess.Popen[str], metrics: Path, *, after_updates: int) -> psutil.Process:
    """Wait until the run has made `after_updates` updates; the process of one of its ranks."""
    deadline = time.monotonic() + 2 * WAIT_S
    while not metrics.is_file() or metrics.read_text().count("\n") < after_updates:
        assert run.poll() is None, "the run ended before it was killed"
        assert time.monotonic() < deadline, "the run made too few updates"
        time.sleep(0.05)
    children = psutil.Process(run.pid).children(recursive=True)
    return next(child for child in children if " ".join(child.cmdline()).startswith("ray::_RankActor"))
