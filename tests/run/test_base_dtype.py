"""`lora.base_dtype`: frozen weights are loaded in bfloat16, adapters are float32, and an update moves only these."""

from __future__ import annotations

import pytest
import torch

from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError
from sortedrl.run.builders.parts import build_model, choose_adapters
from sortedrl.tasks.tiny import knights_tiny_path


def test_frozen_weights_are_half_as_large() -> None:
    config = SortedConfig(lora={"rank": 2, "base_dtype": "bfloat16"})
    model = build_model(config, knights_tiny_path(), choose_adapters(config, None), None)
    formats = {is_trained: set() for is_trained in (False, True)}
    for parameter in model.parameters():
        formats[parameter.requires_grad].add(parameter.dtype)
    assert formats == {False: {torch.bfloat16}, True: {torch.float32}}
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.zeros(1, 4, dtype=torch.long)).logits.sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_weights_that_are_trained_stay_float32() -> None:
    config = SortedConfig(lora={"base_dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"is for frozen weights: set lora\.rank too"):
        build_model(config, knights_tiny_path(), choose_adapters(config, None), None)
