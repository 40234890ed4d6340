"""Context parallelism: ranks that share the tokens of a micro-batch learn what one process learns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import modeling_utils

from sortedrl.config import SortedConfig
from sortedrl.errors import ConfigError
from sortedrl.learner.sharded.context import check_heads
from sortedrl.learner.torch import recompute_layers
from tests.learner.test_ranks import SAME, check_equal, one_process, run_ranks, weights
from tests.support.learners import make_model
from tests.support.rank_cases import CONTEXT_CASES, EVERY_CASE, WIDE_CONTEXT_CASES, read_state, run_updates


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_ranks(tmp_path_factory.mktemp("pairs"), 2, tuple(CONTEXT_CASES))


@pytest.fixture(scope="module")
def fours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_ranks(tmp_path_factory.mktemp("fours"), 4, tuple(WIDE_CONTEXT_CASES))


def check_updates(folder: Path, name: str) -> None:
    """Losses, metrics and weights after all updates."""
    found, _, metrics = read_state(folder / name)
    learner = one_process(name)
    expected = run_updates(learner, 0, EVERY_CASE[name].num_updates)
    check_equal(found, weights(learner), SAME)
    assert len(metrics) == len(expected)
    for ours, theirs in zip(metrics, expected, strict=True):
        assert ours["learned_tokens"] == theirs["learned_tokens"] > 0
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=SAME, abs=SAME)
        assert ours.keys() == theirs.keys()
        for key in ours.keys() - {"computed_tokens"}:  # prompts are packed again in every micro-batch
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("name", CONTEXT_CASES)
def test_two_ranks_share_tokens(pairs: Path, name: str) -> None:
    check_updates(pairs, name)


@pytest.mark.parametrize("name", WIDE_CONTEXT_CASES)
def test_four_ranks_share_tokens(fours: Path, name: str) -> None:
    check_updates(fours, name)


def test_a_rank_out_of_memory_sends_what_the_others_wait_for(pairs: Path) -> None:
    """Rank 1 ran out of memory once forward and once backward; the results are compared above."""
    warned = [(pairs / f"rank-{rank}" / "err-0.txt").read_text() for rank in range(2)]
    for when in ("forward", "backward"):
        assert warned[1].count(f"CUDA out of memory ({when})") == 1
    assert warned[0].count("(on another rank): continuing with learner.micro_tokens") == 2


def test_inputs_of_layers_wait_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers moves them; here from the host to the host, because there is no GPU. Gradients stay the same."""
    packed: list[tuple[int, ...]] = []

    class Spy(modeling_utils.save_on_cpu):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: packed.append(tuple(tensor.shape)) or pack(tensor)

    monkeypatch.setattr(modeling_utils, "save_on_cpu", Spy)
    monkeypatch.setattr(modeling_utils, "get_current_accelerator", lambda: torch.device("cuda"))

    def gradients(*, is_offloaded: bool) -> list[torch.Tensor]:
        model = make_model().train()
        recompute_layers(model, is_offloaded=is_offloaded)
        model(torch.arange(8)[None], use_cache=False).logits.square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    kept = gradients(is_offloaded=False)
    assert packed == []
    assert all(map(torch.equal, gradients(is_offloaded=True), kept))
    assert packed.count((1, 8, 16)) == 2  # the input of each of two layers


def test_an_older_transformers_is_named() -> None:
    class Older:
        def gradient_checkpointing_enable(self, options: Any) -> None: ...

    recompute_layers(Older(), is_offloaded=False)
    with pytest.raises(ConfigError, match="offload_activations needs a newer transformers"):
        recompute_layers(Older(), is_offloaded=True)


def test_heads_must_divide() -> None:
    model_config: Any = SimpleNamespace(num_attention_heads=9)
    model_config.get_text_config = lambda: model_config
    check_heads(model_config, 3)
    with pytest.raises(ConfigError, match=r"context_parallel = 2 does not divide .* 9 attention heads: .* 3, 9"):
        check_heads(model_config, 2)


def test_ranks_must_divide() -> None:
    with pytest.raises(ConfigError, match=r"context_parallel 2 does not divide learner.ranks 3: .* such as 4"):
        SortedConfig(learner={"ranks": 3, "context_parallel": 2})
    with pytest.raises(ConfigError, match="are two names of one number"):
        SortedConfig(learner={"ranks": 4, "context_parallel": 2}, placement={"context_parallel": 4})
    placed = SortedConfig(placement={"ranks": 4, "context_parallel": 2}).in_older_keys()
    assert (placed.learner.ranks, placed.learner.context_parallel) == (4, 2)
    with pytest.raises(ConfigError, match=r"offload_activations needs learner\.recompute"):
        SortedConfig(learner={"offload_activations": True})
