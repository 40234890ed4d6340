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
from sortedrl.engine.vllm import core as vllm_core
from sortedrl.engine.vllm import shared_memory
from sortedrl.engine.vllm.memory import choose_memory, needed_kv_bytes
from sortedrl.engine.vllm.owner import VARIABLE, end_with_owner, is_running, own_mark
from sortedrl.engine.vllm.transfer import link as transfer_link
from sortedrl.engine.vllm.transfer.link import WeightLink, choose_transfer
from sortedrl.errors import ConfigError, EngineError, LearnerError
from sortedrl.learner.sharded.restarts import RanksRestarted
from sortedrl.run.builders.engine import pool_transfer
from sortedrl.weights import HERE, ModuleWeights
from tests.support.tiny_models import tiny_model

CLOSED: list[str] = []  # sessions of this process that were ended
NAMES = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]]}


class Source:
    """A learner's weights whose processes do what `send` says."""

    place = "there"

    def __init__(self) -> None:
        self.plans: list[Any] = []
        self.error: Exception | None = None
        self.why: str | None = None  # the workers did not take the weights

    def apply(self, function: Any, *arguments: Any) -> list[Any]:
        if function == "describe":
            return [types.SimpleNamespace(update_info=NAMES, host="127.0.0.1", port=29500, shared="")]
        self.plans.append(arguments[0])
        if self.error is not None:
            raise self.error
        return [self.why, None]  # of two ranks


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> WeightLink:
    sender = types.ModuleType("sender")  # the real one imports vLLM
    sender.describe, sender.send = "describe", "send"  # type: ignore[attr-defined]
    sender.SendPlan = types.SimpleNamespace  # type: ignore[attr-defined]
    sender.close = CLOSED.append  # type: ignore[attr-defined]
    CLOSED.clear()
    monkeypatch.setitem(sys.modules, "sortedrl.engine.vllm.transfer.sender", sender)
    monkeypatch.setattr(transfer_link, "_numbers", iter(range(100)))
    return WeightLink(backend="gloo", dtype=torch.bfloat16, num_workers=2, limit_s=10, is_local=True, rank_timeout_s=5)


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
    """An engine that is gone is no error: it would end the learner's ranks."""
    source = Source()
    source.why = "RuntimeError: connection reset"
    (ticket,) = link.begin(source, ["a"])
    assert link.finish() == "RuntimeError: connection reset"
    source.why = None
    (again,) = link.begin(source, ["a"])
    assert link.finish() is None
    assert again.session != ticket.session
    source.error = LearnerError("rank 1 has died")
    link.begin(source, ["a"])
    with pytest.raises(LearnerError, match="rank 1 has died"):
        link.finish()


def test_a_silent_engine_is_given_up_before_the_ranks_that_wait_meanwhile(link: WeightLink) -> None:
    source = Source()
    (ticket,) = link.begin(source, ["a"])
    assert link.finish() is None
    assert (source.plans[-1].timeout_s, ticket.init_info["timeout_s"]) == (4.0, 4.0)
    source.place = HERE  # no ranks
    link.begin(source, ["a"])
    assert link.finish() is None
    assert source.plans[-1].timeout_s == 5.0


@pytest.mark.parametrize("is_abandoned", [False, True])
def test_a_session_here_is_ended_also_after_it_broke_off(link: WeightLink, is_abandoned: bool) -> None:
    source = Source()
    source.place, source.error = HERE, RuntimeError("connection reset")
    (ticket,) = link.begin(source, ["a"])
    if is_abandoned:
        link.abandon()
    else:
        assert link.finish() == "RuntimeError: connection reset"
    link.close()
    link.close()
    assert [ticket.session] == CLOSED


def test_a_session_over_the_engines_handshake_is_ended_too(link: WeightLink) -> None:
    source = Source()
    source.place = HERE
    link.send_by(source, None, "a")
    link.close()
    assert [source.plans[0].session] == CLOSED


def test_sessions_of_ranks_end_with_them(link: WeightLink) -> None:
    link.begin(Source(), ["a"])
    assert link.finish() is None
    link.close()
    assert CLOSED == []


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
    assert choose_memory(5, None, 7) == {"kv_bytes": 5, "memory_share": 0.01}  # nothing else must be free
    assert choose_memory(5, 0.4, 7) == {"kv_bytes": 5, "memory_share": 0.4}
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # the learner's device counts, not the machine
    model, on_gpu, pool = tiny_model(), on_device("cuda:0"), {"kind": "vllm", "replicas": 2}
    assert pool_transfer(SortedConfig(engine=pool), model) == "gloo"
    gpus = SortedConfig(engine={**pool, "replica_gpus": 1}, learner={"ranks": 2, "rank_gpus": 1})
    assert pool_transfer(gpus, model) == "nccl"
    one = SortedConfig(engine={**pool, "replica_gpus": 1})
    assert [pool_transfer(one, source) for source in (model, on_gpu)] == ["gloo", "nccl"]
    with pytest.raises(ConfigError, match=r"engine\.transfer = ipc needs engine and learner on one GPU"):
        pool_transfer(SortedConfig(engine={**pool, "transfer": "ipc"}), model)
    with pytest.raises(ConfigError, match=r"engine\.transfer = nccl needs engines and a learner that have GPUs"):
        pool_transfer(SortedConfig(engine={**pool, "replica_gpus": 1, "transfer": "nccl"}), model)


def on_device(name: str) -> Any:
    """A model as far as a transfer is chosen by it."""
    return types.SimpleNamespace(parameters=lambda: iter([types.SimpleNamespace(device=torch.device(name))]))


@pytest.mark.parametrize(
    ("device", "settings", "chosen", "refused"),
    [
        ("cpu", {}, "gloo", {"ipc": "not on a GPU", "nccl": r"in this process are not on a GPU.*placement\.mode"}),
        ("cuda", {}, "ipc", {"nccl": "on the learner's GPU"}),
        ("cuda:1", {}, "gloo", {"ipc": "another GPU"}),
        ("cuda:0", {"is_server": True}, "gloo", {"ipc": "a server takes no handles", "nccl": "on the learner's GPU"}),
        ("cuda:1", {"is_server": True}, "gloo", {"ipc": "a server takes no handles"}),
        ("cuda:0", {"tensor_parallel": 2}, "gloo", {"ipc": "another GPU", "nccl": "on the learner's GPU"}),
        ("cuda:1", {"tensor_parallel": 2}, "gloo", {"ipc": "another GPU", "nccl": "on the learner's GPU"}),
        ("cuda:2", {"tensor_parallel": 2}, "gloo", {"ipc": "another GPU"}),
    ],
)
def test_a_transfer_that_cannot_work_is_neither_chosen_nor_taken(
    device: str, settings: dict[str, Any], chosen: str, refused: dict[str, str]
) -> None:
    model = on_device(device)
    assert choose_transfer("auto", model, **settings) == chosen
    for transfer in ("gloo", "ipc", "nccl"):
        if transfer in refused:
            with pytest.raises(ConfigError, match=f"engine.transfer = {transfer} does not work.*{refused[transfer]}"):
                choose_transfer(transfer, model, **settings)
        else:
            assert choose_transfer(transfer, model, **settings) == transfer
    assert choose_transfer("nccl", on_device("meta"), **settings) == "nccl"  # as the pool has chosen


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
    end_with_owner(f"{place} {pid} 0")  # vLLM's front end has the mark in its environment too
    code = "import time; from sortedrl.engine.vllm.owner import end_with_starter; end_with_starter(); time.sleep(60)"
    environment = {**os.environ, VARIABLE: f"{place} {pid} 0"}
    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=60, env=environment)
    assert ended.returncode == 1


def test_vllms_processes_alone_inherit_what_is_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward's process, or a server of the user's, must not take pickled objects."""
    insecure = "VLLM_ALLOW_INSECURE_SERIALIZATION"
    monkeypatch.delenv(insecure, raising=False)
    monkeypatch.setenv(VARIABLE, "another")
    settings: Any = types.SimpleNamespace(transfer="ipc")
    with vllm_core._inherited(settings):
        assert (os.environ[insecure], os.environ[VARIABLE]) == ("1", own_mark())
    assert (os.environ.get(insecure), os.environ[VARIABLE]) == (None, "another")
    settings.transfer = "gloo"
    with vllm_core._inherited(settings):
        assert insecure not in os.environ
