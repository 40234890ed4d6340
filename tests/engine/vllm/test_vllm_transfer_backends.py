"""Weight transfer with vLLM's own classes, without a running vLLM: both sides fit, and bytes arrive as sent."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sortedrl.engine.vllm.core import vllm_version
from sortedrl.engine.vllm.transfer.link import _init_info
from sortedrl.weights import WeightHolder
from tests.support.tiny_models import add_noise, tiny_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed here: make test-vllm"),
]


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
    trainer = sender._init_info(plan, rank=1)
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
    plan = plan_of("gloo", client=worker, shared=facts.shared)
    for seed in range(2):  # the second transfer uses the same group
        add_noise(model, 0.1, seed=seed)
        sender.send(holder, plan)
        expected = {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}
        assert list(worker.loaded) == list(expected)
        assert all(torch.equal(worker.loaded[name], tensor) for name, tensor in expected.items())
    assert worker.num_groups == 1
    sender.close(holder)
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
    sender.close(holder)


def test_adapters_are_left_out_of_the_base() -> None:
    from sortedrl.engine.vllm.transfer.source import plain_name

    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    assert plain_name(f"{prefix}.base_layer.weight") == "model.layers.0.self_attn.q_proj.weight"
    assert plain_name(f"{prefix}.lora_A.default.weight") is None
    assert plain_name("model.norm.weight") == "model.norm.weight"
