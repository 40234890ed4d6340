"""Weight transfer without vLLM: who gets which rank, what is sent, and what happens if it breaks off."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from sortedrl.config import SortedConfig
from sortedrl.engine.local.module_decoder import Geometry
from sortedrl.engine.pool.ray_placement import choose_bundles
from sortedrl.engine.vllm import shared_memory
from sortedrl.engine.vllm.memory import choose_memory, needed_kv_bytes
from sortedrl.engine.vllm.owner import end_with_owner, is_running, own_mark
from sortedrl.engine.vllm.transfer import link as transfer_link
from sortedrl.engine.vllm.transfer.link import WeightLink, choose_transfer
from sortedrl.errors import ConfigError, EngineError, LearnerError
from sortedrl.learner.sharded.restarts import RanksRestarted
from sortedrl.run.builders.engine import pool_transfer
from sortedrl.weights import ModuleWeights
from tests.support.tiny_models import tiny_model

NAMES = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]]}


class Source:
    """A learner's weights whose processes do what `send` says."""

    place = "there"

    def __init__(self) -> None:
        self.plans: list[Any] = []
        self.error: Exception | None = None

    def apply(self, function: Any, *arguments: Any) -> list[Any]:
        if function == "describe":
            return [types.SimpleNamespace(update_info=NAMES, host="127.0.0.1", port=29500, shared="")]
        self.plans.append(arguments[0])
        if self.error is not None:
            raise self.error
        return [None]


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> WeightLink:
    sender = types.ModuleType("sender")  # the real one imports vLLM
    sender.describe, sender.send = "describe", "send"  # type: ignore[attr-defined]
    sender.SendPlan = types.SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sortedrl.engine.vllm.transfer.sender", sender)
    monkeypatch.setattr(transfer_link, "_numbers", iter(range(100)))
    return WeightLink(backend="gloo", dtype=torch.bfloat16, num_workers=2, limit_s=10, is_local=True)


def test_engines_get_ranks_of_their_own_after_the_learners_one(link: WeightLink) -> None:
    source = Source()
    tickets = link.begin(source, ["first", "second", "third"])
    assert link.finish() is None
    assert [ticket.init_info["rank_offset"] for ticket in tickets] == [1, 3, 5]  # two workers each
    assert {ticket.init_info["world_size"] for ticket in tickets} == {7}
    assert source.plans[0].world_size == 7
    assert all(ticket.update_info == NAMES for ticket in tickets)


def test_a_group_is_kept_until_its_engines_change(link: WeightLink) -> None:
    source = Source()

    def session(*engines: str) -> str:
        (session,) = {ticket.session for ticket in link.begin(source, engines)}
        assert link.finish() is None
        return session

    first = session("a", "b")
    assert session("a", "b") == first
    assert session("a", "c") != first
    source.place = "elsewhere"
    assert session("a", "c") != first


def test_a_transfer_that_broke_off_is_told_and_begun_anew(link: WeightLink) -> None:
    source = Source()
    source.error = RuntimeError("connection reset\nby peer")
    (ticket,) = link.begin(source, ["a"])
    assert link.finish() == "RuntimeError: connection reset"
    source.error = None
    (again,) = link.begin(source, ["a"])
    assert link.finish() is None
    assert again.session != ticket.session
    source.error = LearnerError("rank 1 has died")
    link.begin(source, ["a"])
    with pytest.raises(LearnerError, match="rank 1 has died"):
        link.finish()


def test_engines_connect_to_ranks_that_were_started_again(link: WeightLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the connection is opened, and while weights are sent; then another place has them."""
    source = Source()
    (first,) = link.begin(source, ["a"])
    assert link.finish() is None
    apply, failures = source.apply, ["describe", "send"]

    def restart(function: Any, *arguments: Any) -> list[Any]:
        if failures[:1] == [function]:
            source.place = f"after {failures.pop(0)}"
            raise RanksRestarted("the ranks of the learner were started again")
        return apply(function, *arguments)

    monkeypatch.setattr(source, "apply", restart)
    source.place = "elsewhere"
    (second,) = link.begin(source, ["a"])
    assert link.finish() == "RanksRestarted: the ranks of the learner were started again"
    (third,) = link.begin(source, ["a"])
    assert link.finish() is None
    assert len({first.session, second.session, third.session}) == 3
    assert source.plans[-1].session == third.session


def test_weights_are_held_by_this_process() -> None:
    model = tiny_model()
    source = ModuleWeights(model)
    (held,) = source.apply(lambda holder, scale: (holder.rank, holder.module, scale), 3)
    assert held == (0, model, 3)


# Where engines run, and with how much memory


def test_memory_is_bytes_or_a_share_of_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two layers, four heads of 8: 512 bytes a token; a half of the heads on each of two devices.
    geometry = Geometry.of(tiny_model())
    assert needed_kv_bytes(geometry, 3, 40, torch.float32, 2) == 7 * 32 * 256
    assert needed_kv_bytes(geometry, 3, 40, torch.float32, 8) == 7 * 32 * 128  # each device holds a whole head
    assert choose_memory(None, None, 7) == {"kv_bytes": 7, "memory_share": None}
    assert choose_memory(5, None, 7) == {"kv_bytes": 5, "memory_share": None}
    assert choose_memory(None, 0.4, 7) == {"kv_bytes": None, "memory_share": 0.4}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_memory(None, None, 7) == {"kv_bytes": None, "memory_share": 0.85}


def test_an_engine_is_placed_on_one_machine_if_one_is_large_enough() -> None:
    one = choose_bundles(4, 2.0, [4.0, 8.0])
    assert (one.bundles, one.is_spread) == (({"CPU": 2.0, "GPU": 4.0},), False)
    two = choose_bundles(3, 2.0, [2.0, 2.0])
    assert two.is_spread
    assert two.bundles == ({"CPU": 3.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0})
    with pytest.raises(EngineError, match=r"engine\.tensor_parallel = 8 needs as many GPUs.*has 4"):
        choose_bundles(8, 1.0, [2.0, 2.0])


def test_the_transfer_is_chosen_by_where_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_transfer("auto", tiny_model()) == "gloo"
    assert choose_transfer("nccl", tiny_model()) == "nccl"
    pool = {"kind": "vllm", "replicas": 2}
    assert pool_transfer(SortedConfig(engine=pool)) == "gloo"
    gpus = SortedConfig(engine={**pool, "replica_gpus": 1}, learner={"ranks": 2, "rank_gpus": 1})
    assert pool_transfer(gpus) == "nccl"
    with pytest.raises(ConfigError, match=r"engine\.transfer = ipc needs engine and learner on one GPU"):
        pool_transfer(SortedConfig(engine={**pool, "transfer": "ipc"}))


def test_shared_memory_that_is_too_small_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = types.SimpleNamespace(free=64 << 20)  # what a container has by default
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(EngineError, match=r"64 MB free, and engine\.tensor_parallel = 2 needs 256 MB: .*--shm-size"):
        shared_memory.check_room(2, tmp_path)
    shared_memory.check_room(1, tmp_path)
    assert not shared_memory.has_room(tmp_path, 65 << 20)
    assert shared_memory.has_room(tmp_path, 64 << 20)


def test_a_process_ends_with_its_owner_but_not_with_one_elsewhere() -> None:
    place, pid, started = own_mark().rsplit(" ", 2)
    assert int(pid) == os.getpid()
    assert is_running(os.getpid(), started)
    assert not is_running(os.getpid(), "0")  # the number was given to another process
    end_with_owner(f"another-machine 1 {started}")  # would end this process
    code = (
        "import sys, time; from sortedrl.engine.vllm.owner import end_with_owner; "
        "end_with_owner(sys.argv[1]); time.sleep(60)"
    )
    gone = f"{place} {pid} 0"
    assert subprocess.run([sys.executable, "-c", code, gone], check=False, timeout=60).returncode == 1
