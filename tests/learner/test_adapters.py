"""Publishing adapters to vLLM, tested without vLLM: supported adapters, the folder's content, merging as fallback."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from sortedrl.config import SortedConfig
from sortedrl.engine.vllm.adapter import AdapterFolder, find_adapter_fault
from sortedrl.errors import EngineError, LearnerError
from sortedrl.learner.lora import adapt
from sortedrl.run.builders.engine import engine_model
from sortedrl.run.checkpoint_folder import save_checkpoint
from sortedrl.weights import ModuleWeights, adapter_tensors, base_copy
from tests.support.tiny_models import tiny_model

peft = pytest.importorskip("peft")
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9]])


def adapted(kind: str = "llama", *, seed: int = 1, **changes: Any) -> Any:
    """A model with random adapters, because new adapters add nothing to the base."""
    settings = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    model = adapt(tiny_model(kind), peft.LoraConfig(**(settings | changes)))
    add_noise(model, seed)
    return model


def add_noise(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(TOKENS).logits


# ---- what is published ---------------------------------------------------------------------------------------------


def test_the_adapters_alone_are_what_peft_saves_and_follow_the_model(tmp_path: Path) -> None:
    model = adapted()
    source = ModuleWeights(model)
    frozen = source.snapshot()
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "adapter_model.safetensors")
    for found in (source.adapter, frozen.adapter):
        assert found is not None
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    add_noise(model, 2)
    assert source.adapter is not None
    assert frozen.adapter is not None
    assert not any(torch.equal(source.adapter[name], tensor) for name, tensor in saved.items())
    assert all(torch.equal(frozen.adapter[name], tensor) for name, tensor in saved.items())
    assert ModuleWeights(tiny_model()).adapter is None
    assert ModuleWeights(tiny_model()).snapshot().adapter is None


def test_the_base_is_the_model_without_its_adapters() -> None:
    model = adapted()
    base = base_copy(model)
    assert not {id(parameter) for parameter in base.parameters()} & {id(parameter) for parameter in model.parameters()}
    assert torch.equal(logits(base), logits(tiny_model()))
    assert base.lm_head.weight is base.model.embed_tokens.weight
    assert not torch.allclose(logits(model), logits(base), atol=1e-2)  # the model keeps its adapters


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True, "r": 3}, {"rank_pattern": {"q_proj": 9}}])
def test_the_folder_is_one_that_peft_loads(changes: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(**changes)
    folder = AdapterFolder(tmp_path / "adapter", model)
    linear = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert folder.settings.modules == linear
    assert folder.settings.rank == (16 if "rank_pattern" in changes else 8)  # the next rank that vLLM supports
    for seed in (2, 3):
        add_noise(model, seed)
        folder.write(ModuleWeights(model).adapter)
        again = peft.PeftModel.from_pretrained(tiny_model(), str(folder.path))
        assert torch.allclose(logits(again), logits(model), atol=1e-6)
    assert sorted(path.name for path in folder.path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_other_adapters_than_those_of_the_engine_are_refused(tmp_path: Path) -> None:
    folder = AdapterFolder(tmp_path / "adapter", adapted())
    for other in (None, adapter_tensors(adapted(r=5)), adapter_tensors(adapted(target_modules=["q_proj"]))):
        with pytest.raises(EngineError, match="do not match those that the engine was created with"):
            folder.write(other)


# ---- what vLLM supports --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"target_modules": ["q_proj", "v_proj"], "use_rslora": True}, None),
        ({"init_lora_weights": "gaussian"}, None),
        ({"use_dora": True}, "vLLM does not support use_dora"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = pissa changes the base model"),
        (
            {"modules_to_save": ["input_layernorm"]},
            "vLLM cannot load base_model.model.model.layers.0.input_layernorm.weight",
        ),
        (
            {"bias": "lora_only"},
            "vLLM cannot load base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias",
        ),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "lora_embedding_A"),
        ({"target_modules": ["q_proj", "lm_head"]}, "cached tokens cannot be verified with an adapter on lm_head"),
        ({"r": 513, "target_modules": ["q_proj"]}, "their rank is 513, and vLLM supports up to 512"),
    ],
)
def test_adapters_that_vllm_does_not_support_are_named(changes: dict[str, Any], fault: str | None) -> None:
    model = adapted("qwen2", **changes)  # its projections have biases
    found = find_adapter_fault(model)
    assert found is None if fault is None else fault in (found or "")


def test_two_sets_of_adapters_are_not_taken() -> None:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert find_adapter_fault(model) == "the model has 2 of them"
    other = adapt(tiny_model(), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    assert "vLLM supports LoRA" in (find_adapter_fault(other) or "")


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ({"engine": {"kind": "vllm"}}, None),
        ({"engine": {"kind": "vllm"}, "lora": {"merge": True}}, "lora.merge is set"),
        ({"engine": {"kind": "vllm", "port": 8000}}, None),
        (
            {"engine": {"kind": "vllm", "address": "http://127.0.0.1:8000"}},
            "a vLLM server that was started elsewhere takes full weights only",
        ),
        ({"engine": {"kind": "vllm", "replicas": 2}}, None),
        ({"engine": {"kind": "local"}}, ""),
    ],
)
def test_which_engines_get_adapters_and_which_get_full_weights(
    sections: dict[str, Any], reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted()
    source = ModuleWeights(model)
    with caplog.at_level(logging.INFO, logger="sortedrl"):
        built_on = engine_model(SortedConfig(**sections), model, source)
    messages = [record.getMessage() for record in caplog.records]
    if reason is None:
        assert built_on is model
        assert messages == []
        return
    assert built_on is source.module
    assert messages == ([f"adapters are merged into full weights at every publication: {reason}"] if reason else [])


def test_a_model_without_adapters_is_taken_as_it_is() -> None:
    model = tiny_model()
    assert engine_model(SortedConfig(engine={"kind": "vllm"}), model, ModuleWeights(model)) is model


def test_adapters_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    model = adapted()
    with torch.no_grad():
        next(parameter for parameter in model.parameters() if parameter.requires_grad).fill_(float("inf"))
    with pytest.raises(LearnerError, match=r"lora_.*lower learner\.lr"):
        save_checkpoint(tmp_path / "1", model, None)
    assert not (tmp_path / "1").exists()
