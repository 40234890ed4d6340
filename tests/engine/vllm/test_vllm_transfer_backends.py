"""Weight transfer with vLLM's own classes, without a running vLLM: both sides fit, and bytes arrive as sent."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sortedrl.engine.vllm.core import vllm_version
from sortedrl.engine.vllm.transfer.link import _init_info
from sortedrl.weights import WeightHolder
from tests.support.tiny_models import add_noise, tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed here: make test-vllm"),
]
FORKING: Any = multiprocessing.get_context("fork")


def plan_of(backend: str, **changes: Any) -> Any:
    from sortedrl.engine.vllm.transfer.sender import SendPlan

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    fields = {"session": backend, "backend": backend, "dtype": torch.bfloat16, "host": "127.0.0.1", "port": port}
    return SendPlan(**fields | {"world_size": 2, "timeout_s": 30.0} | changes)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_both_sides_of_the_handshake_are_what_vllm_takes(backend: str) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

    from sortedrl.engine.vllm.transfer import sender

    plan = plan_of(backend)
    info = WeightTransferEngineFactory._registry[backend]().init_info_cls(**_init_info(plan, rank_offset=3))
    assert (info.rank_offset, info.world_size, info.master_port) == (3, 2, plan.port)
    trainer = sender._init_info(plan, 1, sender.CastSource(tiny_model(), torch.bfloat16))
    assert isinstance(trainer, WeightTransferTrainerFactory._registry[backend]().init_info_cls)
    assert (trainer.backend, trainer.is_sender, trainer.world_size) == (backend, False, 2)


class Worker:
    """A worker's side of the transfer, with a model that keeps what it is given. It is the trainer's client too."""

    def __init__(self, num_failures: int = 0) -> None:
        from sortedrl.engine.vllm.transfer.gloo import GlooTransferEngine

        config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0), model_config=None
        )
        self.loaded: dict[str, torch.Tensor] = {}
        model: Any = SimpleNamespace(load_weights=lambda pairs: self.loaded.update(dict(pairs)))
        self.engine = GlooTransferEngine(None, config, torch.device("cpu"), model)
        self.num_failures = num_failures
        self.num_groups = 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.num_groups += 1
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self.num_failures:
            self.num_failures -= 1
            self.engine.shutdown()
            raise RuntimeError("the worker has died")
        self.engine.receive_weights(self.engine.parse_update_info(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@pytest.mark.parametrize("is_shared", [False, True], ids=["sockets", "shared"])
def test_weights_arrive_byte_for_byte_in_the_engines_format(monkeypatch: pytest.MonkeyPatch, is_shared: bool) -> None:
    from sortedrl.engine.vllm.transfer import gloo, sender

    defaults: Any = gloo.GlooTrainerInitInfo.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "bucket_bytes", 4096)  # many buckets
    model, worker = tiny_model(), Worker()
    holder = WeightHolder(rank=0, module=model)
    facts = sender.describe(holder, torch.bfloat16, True, is_shared)
    assert bool(facts.shared) == is_shared
    plan = plan_of("gloo", client=worker, shared=facts.shared, port=facts.port)
    for seed in range(2):  # the second transfer uses the same group
        add_noise(model, 0.1, seed=seed)
        sender.send(holder, plan)
        expected = {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}
        assert list(worker.loaded) == list(expected)
        assert all(torch.equal(worker.loaded[name], tensor) for name, tensor in expected.items())
        listening = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert set(listening) == {"127.0.0.1"}
    assert worker.num_groups == 1
    sender.close()
    assert not sender._memories


def test_a_transfer_that_breaks_off_raises_and_can_begin_anew() -> None:
    from sortedrl.engine.vllm.transfer import sender

    worker = Worker(num_failures=1)
    holder = WeightHolder(rank=0, module=tiny_model())
    with pytest.raises(Exception, match=r"died|closed|reset|[Cc]onnection"):
        sender.send(holder, plan_of("gloo", client=worker))
    assert not sender._sessions
    sender.send(holder, plan_of("gloo", client=worker, session="again"))
    assert set(worker.loaded) == {name for name, _ in holder.module.named_parameters()}
    sender.close()


def send_as_rank(rank: int, folder: Path, ports: list[int], limit_s: float) -> None:
    """Two transfers: in the first, the worker is gone."""
    from sortedrl.engine.vllm.transfer import sender

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    model = tiny_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    holder = WeightHolder(rank=rank, module=model)
    told = []
    for number, port in enumerate(ports):
        plan = plan_of("gloo", session=str(number), port=port, timeout_s=10.0 if number else limit_s)
        told.append(sender.send(holder, plan))
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


@pytest.mark.parametrize("joins", [False, True])
def test_a_worker_that_dies_leaves_the_ranks_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """Rank 0 tells why, no rank raises, and the next transfer reaches the worker that has come instead."""
    from sortedrl.engine.vllm.transfer import gloo

    for info in (gloo.GlooTrainerInitInfo, gloo.GlooInitInfo):
        defaults: Any = info.__init__.__kwdefaults__
        monkeypatch.setitem(defaults, "bucket_bytes", 4096)  # many buckets
    ports = [plan_of("gloo").port for _ in range(2)]
    ranks = [
        FORKING.Process(target=send_as_rank, args=(rank, tmp_path, ports, 10.0 if joins else 1.0)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    dead, alive = Worker(), Worker()
    if joins:
        dead.init_weight_transfer_engine(_init_info(plan_of("gloo", port=ports[0]), rank_offset=1))
        dead.engine.shutdown()
    names = [name for name, _ in tiny_model().named_parameters()]
    shapes = [list(parameter.shape) for parameter in tiny_model().parameters()]
    alive.init_weight_transfer_engine(_init_info(plan_of("gloo", port=ports[1]), rank_offset=1))
    alive.update_weights({"names": names, "dtype_names": ["bfloat16"] * len(names), "shapes": shapes})
    for process in ranks:
        process.join(60)
    first, second = (json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(2))
    assert "Error" in first[0]
    assert (first[1], second) == (None, [None, None])
    for name, parameter in tiny_model().named_parameters():
        assert torch.equal(alive.loaded[name], parameter.detach().to(torch.bfloat16)), name


class HangingTrainer:
    """A trainer over NCCL: a broadcast waits until its communicator is gone, and then goes on with the next."""

    def __init__(self, source: Any) -> None:
        self.source, self.is_gone = source, threading.Event()
        self.misused: list[str] = []  # calls of a communicator that is being freed
        self.model_update_group: Any = SimpleNamespace(destroy=self._destroy, broadcast=self._broadcast)

    def _destroy(self) -> None:
        if self.is_gone.is_set():
            self.misused.append("destroy")
        self.is_gone.set()
        time.sleep(0.1)  # vLLM forbids further calls only after this

    def _broadcast(self) -> None:
        if self.is_gone.is_set():
            self.misused.append("broadcast")

    def send_weights(self) -> None:
        next(iter(self.source))
        assert self.is_gone.wait(60)
        self.model_update_group.broadcast()

    def shutdown(self) -> None:
        self.model_update_group.destroy()


@pytest.mark.parametrize("raises", [False, True])
def test_a_transfer_over_nccl_is_broken_off_in_time(monkeypatch: pytest.MonkeyPatch, raises: bool) -> None:
    from sortedrl.engine.vllm.transfer import sender

    class Trainer(HangingTrainer):
        def send_weights(self) -> None:
            super().send_weights()
            if raises:
                raise RuntimeError("NCCL error: unhandled system error")

    trainers: list[Trainer] = []
    gathered: list[str] = []

    def make(info: Any, client: Any, source: Any) -> Trainer:
        trainers.append(Trainer(source))
        return trainers[-1]

    class Source(sender.CastSource):
        def _gather(self) -> Any:
            for name, tensor in super()._gather():
                gathered.append(name)
                yield name, tensor

    monkeypatch.setattr(sender, "WeightTransferTrainerFactory", SimpleNamespace(trainer_init=make))
    monkeypatch.setattr(sender, "CastSource", Source)
    monkeypatch.setattr(sender, "_device_for", lambda plan: None)
    model = tiny_model()
    why = sender.send(WeightHolder(rank=0, module=model), plan_of("nccl", timeout_s=0.05))
    assert why == "TimeoutError: the engines did not take the weights within 0.05 s"
    assert gathered == [name for name, _ in model.named_parameters()]  # the other ranks gather all of them
    assert not sender._sessions
    assert trainers[0].misused == []


def test_a_session_that_fails_late_leaves_its_successor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is lost while weights are sent to it. The next one gets them before that is noticed."""
    from sortedrl.engine.vllm.transfer import sender

    is_sending, may_fail = threading.Event(), threading.Event()

    class Trainer:
        def __init__(self, source: Any) -> None:
            self.source, self.is_late = source, not is_sending.is_set()

        def send_weights(self) -> None:
            if self.is_late:
                is_sending.set()
                assert may_fail.wait(60)
                raise RuntimeError("connection reset")

        def shutdown(self) -> None: ...

    factory = SimpleNamespace(trainer_init=lambda info, client, source: Trainer(source))
    monkeypatch.setattr(sender, "WeightTransferTrainerFactory", factory)
    holder = WeightHolder(rank=0, module=tiny_model())
    late = threading.Thread(target=sender.send, args=(holder, plan_of("nccl", session="lost")))
    monkeypatch.setattr(sender, "_device_for", lambda plan: None)
    late.start()
    assert is_sending.wait(60)
    facts = sender.describe(holder, torch.bfloat16, True, True)
    assert sender.send(holder, plan_of("gloo", session="next", shared=facts.shared, port=facts.port)) is None
    may_fail.set()
    late.join(60)
    assert list(sender._sessions) == ["next"]
    assert sender._memories
    sender.close("lost")
    assert list(sender._sessions) == ["next"]
    sender.close("next")
    assert not sender._sessions
    assert not sender._memories


def test_weights_are_sent_from_the_gpu_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from sortedrl.engine.vllm.transfer import sender

    current = [torch.device("cuda:0")]

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(sender, "_send", lambda holder, plan: str(current[-1]))
    weights = [SimpleNamespace(device=torch.device("cuda:1"))]
    module: Any = SimpleNamespace(parameters=lambda: iter(weights))
    assert sender.send(WeightHolder(rank=0, module=module), plan_of("nccl")) == "cuda:1"
    assert sender.send(WeightHolder(rank=0, module=tiny_model()), plan_of("nccl")) == "cuda:0"


def test_a_rank_that_cannot_begin_raises() -> None:
    """The others pack and send to it, which gathering one by one would not answer."""
    from sortedrl.engine.vllm.transfer import sender

    with pytest.raises(OSError, match="cannot open the learner's memory"):
        sender.send(WeightHolder(rank=0, module=tiny_model()), plan_of("gloo", shared="/nowhere"))
    assert not sender._sessions


def test_a_rank_that_cannot_gather_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the ranks are out of step, whoever waits for them."""
    from sortedrl.engine.vllm.transfer import gloo, sender

    def fail(*_: Any) -> Any:
        raise RuntimeError("rank 1 has gone")
        yield

    monkeypatch.setattr(gloo.BucketPacker, "pack", fail)
    monkeypatch.setattr(gloo.GlooTrainerEngine, "_join", lambda _: None)
    monkeypatch.setattr(gloo.GlooTrainerEngine, "_broadcast", lambda _, buckets: list(buckets))
    with pytest.raises(RuntimeError, match="rank 1 has gone"):
        sender.send(WeightHolder(rank=0, module=tiny_model()), plan_of("gloo"))


def test_ipc_has_room_for_the_largest_tensor() -> None:
    from sortedrl.engine.vllm.transfer import sender

    source: Any = SimpleNamespace(largest_bytes=5 << 30)
    assert sender._init_info(plan_of("ipc"), 0, source).packed_buffer_size_bytes == 5 << 30
    source.largest_bytes = 1
    assert sender._init_info(plan_of("ipc"), 0, source).packed_buffer_size_bytes == 1 << 30
    largest = max(parameter.numel() for parameter in tiny_model().parameters())
    assert sender.CastSource(tiny_model(), torch.bfloat16).largest_bytes == 2 * largest


def test_a_large_model_is_received_bucket_by_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    from sortedrl.engine.vllm.transfer import gloo

    monkeypatch.setattr(gloo, "_KEPT_BYTES", 10)
    worker = Worker()
    buckets: Any = [SimpleNamespace(sizes=[8]), SimpleNamespace(sizes=[8])]
    assert [memory.numel() for memory in worker.engine._memory_for(buckets)] == [8, 8]
    assert len(worker.engine._buffers) == 0  # nothing is kept
    assert [memory.numel() for memory in worker.engine._memory_for(buckets[:1])] == [8]
    assert len(worker.engine._buffers) == 1


def test_adapters_are_left_out_of_the_base() -> None:
    from sortedrl.engine.vllm.transfer.source import plain_name

    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    assert plain_name(f"{prefix}.base_layer.weight") == "model.layers.0.self_attn.q_proj.weight"
    assert plain_name(f"{prefix}.lora_A.default.weight") is None
    assert plain_name("model.norm.weight") == "model.norm.weight"
