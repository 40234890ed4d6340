"""The device of an update: where it comes from, that nothing stays behind, and how often the host waits for it."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from sortedrl.errors import ConfigError
from sortedrl.learner.device import choose_device, to_host
from sortedrl.learner.logprobs import PieceSizes
from sortedrl.learner.torch import TorchLearner
from tests.support.fake_device import DeviceTensor, FakeDevice, MixedDevices
from tests.support.learners import Settings, make_batch, make_model

CASES = {
    "plain": Settings(device="meta", micro_tokens=24),
    "everything": Settings(
        device="meta",
        algorithm="ppo",
        micro_tokens=24,
        kl_coef=0.1,
        kl_in="reward",
        importance="sequence",
        importance_mask="geometric",
        inner_steps=2,
        entropy_coef=0.01,
        recompute=True,
    ),
    "gspo": Settings(device="meta", algorithm="gspo", kl_coef=0.1, fp32_head=True),
    "adapters": Settings(device="meta", algorithm="reinforce++", kl_coef=0.1, kl_in="reward"),
}


@pytest.fixture
def fused_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let AdamW's fused kernel, which computes on the CPU here, take tensors of the fake device."""
    module = import_module("torch.optim.optimizer")
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["cpu", "meta"])


def model_of(name: str) -> Any:
    model = make_model()
    if name == "adapters":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model


@pytest.mark.usefixtures("fused_everywhere")
@pytest.mark.parametrize("name", CASES)
def test_nothing_of_an_update_stays_on_the_host(name: str) -> None:
    settings, batch = CASES[name], replace(make_batch(make_model(), off_policy=0.1), version=1)
    here = TorchLearner(model_of(name), replace(settings, device="cpu"), temperature=1.0)
    expected = here.start(batch).result()
    model = model_of(name)
    with FakeDevice() as device:
        learner = TorchLearner(model, settings, temperature=1.0)
        parts = [learner.model, *([learner.critic] if learner.critic is not None else [])]
        assert {type(p) for part in parts for p in part.parameters()} == {DeviceTensor}
        if learner.reference is not None:
            assert {type(value) for value in learner.reference.tensors().values()} <= {DeviceTensor}
        device.transfers.clear()
        found = learner.start(batch).result()
        num_transfers = device.transfers.total()
        assert {type(value) for state in learner.optimizer.state.values() for value in state.values()} == {DeviceTensor}
        weights = to_host([value.detach() for value in learner.model.parameters()])
    assert found.optimizer_steps == expected.optimizer_steps > 0
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    for ours, theirs in zip(weights, here.model.parameters(), strict=True):
        assert float((ours - theirs.detach()).norm()) <= 1e-3 * float(theirs.detach().norm())
    # One for each step; one for the metrics of tokens and one for their numbers; the check of the weights; penalties.
    assert num_transfers <= found.optimizer_steps + 4


@pytest.mark.usefixtures("fused_everywhere")
def test_the_number_of_transfers_does_not_depend_on_the_batch() -> None:
    counts: list[int] = []
    for num_samples in (2, 8):
        batch = make_batch(make_model(), off_policy=0.1)
        with FakeDevice() as device:
            learner = TorchLearner(make_model(), CASES["plain"], temperature=1.0)
            device.transfers.clear()
            learner.start(replace(batch, samples=batch.samples[:num_samples])).result()
            counts.append(device.transfers.total())
    assert counts[0] == counts[1]


def test_the_fake_device_refuses_what_cuda_refuses() -> None:
    """So the tests above can fail."""
    with FakeDevice() as device:
        there = torch.ones(3).to("meta")
        with pytest.raises(MixedDevices):
            there + torch.ones(3)
        assert there.sum().item() == 3
        assert to_host([there * 2])[0].tolist() == [2, 2, 2]
        assert device.transfers.total() == 2


def test_the_device_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", model) == torch.device("cuda", 0)
    assert choose_device("cuda:1", model) == torch.device("cuda", 1)
    assert choose_device("cpu", model) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"cuda:2, but torch sees 2 CUDA devices here: set learner.device = auto"):
        choose_device("cuda:2", model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", model) == torch.device("cpu")
    with pytest.raises(ConfigError, match="sees 0 CUDA devices"):
        choose_device("cuda", model)


def test_pieces_of_logits_grow_with_the_memory_of_a_gpu() -> None:
    assert PieceSizes.on(torch.device("cpu")) == PieceSizes.on_cpu()
    sizes = PieceSizes.on_gpu(80 * 10**9)
    assert (sizes.piece // 152_064, sizes.piece // 128_256) == (2_055, 2_436)  # tokens
    assert 8 * sizes.piece < 0.04 * 80 * 10**9
    assert PieceSizes.on_gpu(10**6).piece == PieceSizes.on_cpu().piece


def test_values_come_back_as_they_are() -> None:
    with FakeDevice() as device:
        values = [torch.arange(6).view(2, 3), torch.tensor(0.5), torch.ones(0), torch.tensor([7])]
        found = to_host([value.to("meta") for value in values])
        assert device.transfers.total() == 2  # one for each type of number
    for value, back in zip(values, found, strict=True):
        assert back.dtype == value.dtype
        np.testing.assert_array_equal(back.numpy(), value.numpy())


@pytest.mark.usefixtures("fused_everywhere")
def test_an_offloaded_learner_is_on_the_host_between_updates() -> None:
    settings, batch = CASES["plain"], make_batch(make_model(), off_policy=0.1)
    with FakeDevice():
        stays = TorchLearner(make_model(), settings, temperature=1.0)
        for _ in range(2):
            stays.start(batch).result()
        expected = to_host([value.detach() for value in stays.model.parameters()])
        learner = TorchLearner(make_model(), replace(settings, offload=True), temperature=1.0)
        parameters = list(learner.model.parameters())
        for _ in range(2):
            assert not any(isinstance(value.data, DeviceTensor) for value in parameters)
            learner.start(batch).result()
        states = [value for state in learner.optimizer.state.values() for value in state.values()]
        assert not any(isinstance(value, DeviceTensor) for value in states)
        assert list(map(id, learner.model.parameters())) == list(map(id, parameters))
    for ours, theirs in zip(learner.model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=0, atol=0)
