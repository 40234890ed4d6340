"""verl's sampler on a real TransferQueue: 512 groups from simulated producers, failures, and a kill -9 half-way."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from sortedrl.errors import ConfigError
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.verify import verify

pytestmark = pytest.mark.verl
pytest.importorskip("verl", reason="verl has an environment of its own: make verl")
tq = pytest.importorskip("transfer_queue", reason="verl has an environment of its own: make verl")

from tests.adapters.verl_trainer import BATCH, make_sampler  # noqa: E402

NUM_GROUPS, SIBLINGS = 512, 2


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    import ray

    # TransferQueue reserves processors for its actors; Ray is told of eight, which cost nothing.
    context = ray.init(num_cpus=8, namespace="verl", include_dashboard=False, log_to_driver=False)
    tq.init()
    yield context.address_info["address"]
    tq.close()
    ray.shutdown()


def produce(names: list[str], rng: random.Random, step: int) -> list[str]:
    """Simulated rollouts: prompts with their answers, some of which fail; returns those that failed."""
    failed = [name for name in names if rng.random() < 0.1]
    for name in names:
        if name not in failed:
            keys = [f"{name}_{sibling}_0" for sibling in range(SIBLINGS)]
            tags = [
                {
                    "status": "success",
                    "response_len": rng.randint(1, 200),
                    "min_global_steps": step,
                    "max_global_steps": step,
                }
                for _ in keys
            ]
            tq.kv_batch_put(keys=keys, partition_id="train", tags=tags)
        status = "failure" if name in failed else "finished"
        tag = {"is_prompt": True, "status": status, "global_steps": step}
        tq.kv_put(key=name, partition_id="train", tag=tag)
    return failed


def start_trainer(folder: Path, first: int, last: int, address: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.adapters.verl_trainer", str(folder), str(first), str(last), address]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


def steps_of(folder: Path) -> dict[int, list[str]]:
    path = folder / "steps.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return {entry["step"]: entry["uids"] for entry in map(json.loads, lines)}


def test_each_group_is_consumed_once_in_spite_of_a_kill(address: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    last = NUM_GROUPS // BATCH
    todo = [f"g{number}" for number in range(NUM_GROUPS)]
    trainer = start_trainer(tmp_path, 1, last, address)
    was_killed, until, copies = False, time.monotonic() + 240, 0
    names: dict[str, str] = {}  # the uids of a prompt's later attempts
    while trainer.poll() is None or not was_killed or todo:
        assert time.monotonic() < until, f"{len(steps_of(tmp_path))} of {last} steps"
        if todo:
            now, todo = todo[:24], todo[24:]
            for failed in produce(now, rng, step=max(steps_of(tmp_path), default=0)):
                copies += 1
                again = f"{failed.partition('x')[0]}x{copies}"
                names[again] = failed
                todo.append(again)  # verl's refill: the prompt again, under a new uid
        time.sleep(0.05)
        if not was_killed and len(steps_of(tmp_path)) >= last // 2:
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()
            was_killed = True
            done = max(steps_of(tmp_path))  # the checkpoint that the next process continues from
            trainer = start_trainer(tmp_path, done + 1, last, address)
    assert trainer.returncode == 0
    consumed = Counter(uid.partition("x")[0] for uids in steps_of(tmp_path).values() for uid in uids)
    lost = set(consumed) ^ {f"g{number}" for number in range(NUM_GROUPS)}
    assert not lost, lost
    assert set(consumed.values()) == {1}
    with Ledger(tmp_path / "run") as ledger:
        assert verify(ledger).violations == []


def test_dropping_what_is_stale_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set it to wait"):
        make_sampler(tmp_path, max_off_policy_threshold=2, max_off_policy_strategy="drop")
    with pytest.raises(ConfigError, match="unknown sampler_kwargs ordre"):
        make_sampler(tmp_path, sampler_kwargs={"ordre": "shuffled"})
