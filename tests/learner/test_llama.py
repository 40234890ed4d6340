"""Compiled Llama layers compared with the model's own modules, and when the modules run instead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sortedrl.learner import llama
from sortedrl.learner import native_layers as layers
from sortedrl.learner import pack as packing
from sortedrl.learner.pack import MicroBatch, pack
from sortedrl.learner.torch import TorchLearner
from tests.support.learners import Settings, assert_same, make_batch, make_model, weights
from tests.support.packed_samples import MIXED, packed_gradients, samples_of
from tests.support.tiny_models import needs_compiler, tiny_model

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},  # heads of 8 are half a tile
    "three queries a key": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 48},
    "positions that scale": {"num_key_value_heads": 2, "head_dim": 16, "rope_parameters": YARN},
    "no small epsilon": {"num_key_value_heads": 2, "rms_norm_eps": 0.5},
}
ALONE = [(number, 1, length) for number, length in enumerate((1, 2, 15, 16, 17, 33, 50))]  # around the edges of tiles


def use_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "can_use_compiled_layers", lambda model, layout: False)


def micro_of(lengths: list[tuple[int, int, int]]) -> MicroBatch:
    (micro,) = pack(samples_of(lengths), range(len(lengths)), 1000)
    return micro


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [MIXED, ALONE], ids=["siblings", "alone"])
def test_it_gives_the_log_probs_and_gradients_of_the_modules(
    shape: str, lengths: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, micro = tiny_model("llama", **SHAPES[shape]), micro_of(lengths)
    assert llama.can_use_compiled_layers(model, micro.layout)
    ours_a, ours = packed_gradients(model, [micro])
    use_modules(monkeypatch)
    theirs_a, theirs = packed_gradients(model, [micro])
    torch.testing.assert_close(ours_a, theirs_a, rtol=1e-5, atol=1e-5)
    assert_same(ours, theirs, 1e-5)
    assert float((ours["model.norm.weight"] - theirs["model.norm.weight"]).abs().max()) > 0  # so another code path ran


@needs_compiler
def test_a_row_of_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    model, micro = tiny_model("llama-gqa"), micro_of([(0, 30, 400), (1, 5, 131)])
    ours_a, ours = packed_gradients(model, [micro])
    use_modules(monkeypatch)
    theirs_a, theirs = packed_gradients(model, [micro])
    torch.testing.assert_close(ours_a, theirs_a, rtol=1e-5, atol=1e-4)
    assert_same(ours, theirs, 1e-5)


@needs_compiler
def test_weights_that_are_not_trained_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    model, micro = tiny_model("llama-gqa"), micro_of(MIXED)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp.up" in name or "layers.1.self_attn.k" in name)
    _, ours = packed_gradients(model, [micro])
    use_modules(monkeypatch)
    _, theirs = packed_gradients(model, [micro])
    assert len(ours) == 3
    assert_same(ours, theirs, 1e-5)


@needs_compiler
def test_an_update_is_that_of_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a critic, which reads the output layer's input, and a reference model, which is scored without gradients."""

    def update() -> tuple[dict[str, Tensor], dict[str, float]]:
        model = make_model()
        learner = TorchLearner(model, Settings(algorithm="ppo", kl_coef=0.1, inner_steps=2), temperature=0.7)
        result = learner.start(make_batch(model, off_policy=0.2)).result()
        return weights(model), result.metrics

    ours, our_metrics = update()
    use_modules(monkeypatch)
    theirs, their_metrics = update()
    assert our_metrics == pytest.approx(their_metrics, rel=1e-4, abs=1e-5)
    # AdamW's first steps divide a gradient by its size, so gradients near 0 become rounding noise.
    difference = torch.cat([(ours[name] - value).flatten() for name, value in theirs.items()])
    assert float((difference.abs() > 1e-5).float().mean()) < 0.01


@needs_compiler
def test_which_models_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = micro_of(MIXED).layout

    def is_supported(kind: str = "llama", change: Callable[[Any], object] = lambda model: None, **changes: Any) -> bool:
        model = tiny_model(kind, **changes)
        change(model)
        return llama.can_use_compiled_layers(model, layout)

    assert is_supported()
    assert not is_supported("qwen2")
    assert not is_supported(attention_bias=True)
    assert not is_supported(attention_dropout=0.1)
    assert not is_supported(hidden_act="gelu")
    assert not is_supported(intermediate_size=44)  # not a multiple of the vector size
    assert not is_supported(change=lambda model: model.bfloat16())
    assert not is_supported(change=lambda model: model.gradient_checkpointing_enable())
    assert not is_supported(change=lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *_: None))
    assert is_supported(change=lambda model: model.lm_head.register_forward_hook(lambda *_: None))  # it is called
    monkeypatch.setattr(llama, "MAX_LENGTH", max(length for _, length in layout.shapes) - 1)
    assert not is_supported()
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert not is_supported()


def test_without_a_compiler_the_modules_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model, micro = tiny_model("llama"), micro_of(MIXED)
    monkeypatch.setenv("CC", "no-such-compiler")
    layers.load_layers.cache_clear()
    try:
        found_a, _ = packed_gradients(model, [micro])
        assert "no C compiler found: updates run on torch" in caplog.text
        assert layers.load_layers() is None
    finally:
        layers.load_layers.cache_clear()
    use_modules(monkeypatch)
    assert torch.equal(found_a, packed_gradients(model, [micro])[0])
