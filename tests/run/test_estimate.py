"""Estimates of memory and time: figures by hand, and activations against what a backward pass really keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sortedrl.config import SortedConfig
from sortedrl.errors import ModelError
from sortedrl.run.builders.parts import load_model
from sortedrl.run.estimate import estimate_run, estimate_time
from sortedrl.run.memory_formulas import activation_bytes, estimate_memory
from sortedrl.run.model_shapes import read_shape
from sortedrl.simulate.costs import ModelShape
from sortedrl.tasks.tiny import knights_tiny_path
from tests.simulate.test_costs import PLAIN, RooflineCost

# 10 weights; 2 layers of 1 head of size 3; hidden 3, feed-forward 5, vocabulary 7; engine values of 2 bytes.
TOY = ModelShape(
    params=10, layers=2, heads=1, kv_heads=1, head_dim=3, bytes_per_value=2, hidden=3, intermediate=5, vocab=7
)


def config(**sections: dict[str, object]) -> SortedConfig:
    sizes = {
        "run": {"samples": 64},
        "task": {"max_prompt_tokens": 4},
        "schedule": {"update_batch": 8},
        "engine": {"slots": 4, "max_new_tokens": 6},
        "learner": {"micro_tokens": 1000, "algorithm": "reinforce++", "group_size": 1},
        "eval": {"prompts": 0},
    }
    return SortedConfig(**{name: {**sizes.get(name, {}), **sections.get(name, {})} for name in {*sizes, *sections}})


def test_memory_by_hand() -> None:
    found = estimate_memory(config(), TOY)
    assert (found.weights, found.engine_copy, found.gradients, found.optimizer, found.reference) == (40, 20, 40, 80, 0)
    # 4 slots of 4 + 6 tokens; key and value of 3 in 2 layers, 2 bytes each.
    assert found.kv_cache == 4 * 10 * (2 * 2 * 3 * 2)
    # 8 samples of 10 tokens are fewer than a micro-batch may have; per block 6 x 3 + 3 x 3 + 3 x 3 + 4 x 5 floats.
    assert found.activations == 80 * 2 * 56 * 4
    assert found.logits == 3 * 80 * 7 * 4
    assert found.total == 40 + 20 + 40 + 80 + 960 + 35840 + 6720


def test_memory_follows_the_configuration() -> None:
    assert estimate_memory(config(learner={"kl_coef": 0.1}), TOY).reference == 40
    assert estimate_memory(config(learner={"micro_tokens": 20}), TOY).logits == 3 * 20 * 7 * 4
    assert estimate_memory(config(learner={"micro_tokens": 1}), TOY).logits == 3 * 10 * 7 * 4  # one sample has to fit
    # Inputs of 3 floats for each of 2 layers, and one layer's 56.
    assert estimate_memory(config(learner={"recompute": True}), TOY).activations == 80 * (2 * 3 + 56) * 4
    # Of 80 x 2^20 logits a piece of 2^22 is there in three forms, and 2^26 stay.
    assert estimate_memory(config(), replace(TOY, vocab=2**20)).logits == (3 * 2**22 + 2**26) * 4
    assert estimate_memory(config(), replace(TOY, vocab=2**17)).logits == (3 * 2**22 + 80 * 2**17) * 4  # all of them
    adapters = estimate_memory(config(lora={"rank": 2}, learner={"kl_coef": 0.1}), TOY)
    # Sides of the seven maps: four of 3 + 3, three of 3 + 5; rank 2, two layers.
    assert adapters.gradients == 2 * 2 * (4 * 6 + 3 * 8) * 4
    assert adapters.optimizer == 2 * adapters.gradients
    assert adapters.reference == 0  # the model without its adapters
    assert estimate_memory(config(lora={"rank": 1, "target_modules": ["q_proj"]}), TOY).gradients == 2 * 6 * 4


def test_memory_over_ranks_by_hand() -> None:
    found = estimate_memory(config(learner={"ranks": 2}), TOY)
    # All that is cut is as large as before, in all; each rank has micro-batches of its own, of its half of 8 samples.
    assert (found.weights, found.gradients, found.optimizer) == (40, 40, 80)
    assert (found.activations, found.logits) == (2 * 40 * 2 * 56 * 4, 2 * 3 * 40 * 7 * 4)
    # A layer of two and its gradients on each rank; the whole model, and what comes back, on the driver.
    assert (found.gathered, found.driver) == (2 * 2 * 20, 80)
    assert found.of_rank == 20 + 20 + 40 + 40 + 40 * 2 * 56 * 4 + 3 * 40 * 7 * 4
    assert estimate_memory(config(learner={"ranks": 2, "rank_gpus": 1}), TOY).driver == 0  # in the host's memory


def test_activations_are_what_a_backward_pass_keeps() -> None:
    model, _ = load_model(knights_tiny_path())
    shape = read_shape("knights-tiny", knights_tiny_path())
    num_tokens, kept = 64, {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.zeros(1, num_tokens, dtype=torch.long))
    real = sum(size for size, _ in kept.values())
    assert num_tokens * activation_bytes(shape) == pytest.approx(real, rel=0.25)


def test_a_shape_is_read_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((knights_tiny_path() / "config.json").read_text())
    model, _ = load_model(knights_tiny_path())
    shape = read_shape("whatever", tmp_path)
    assert shape.params == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == (3, 2, 2, 32)
    assert (shape.hidden, shape.intermediate, shape.vocab) == (64, 192, 44)


def test_a_model_that_is_not_here_has_the_shape_of_its_name() -> None:
    shape = read_shape("models/Meta-Llama-3.1-8B-Instruct", Path("nowhere"))
    assert (shape.layers, shape.vocab) == (32, 128256)
    with pytest.raises(ModelError, match=r"give a folder with a config\.json, or one of llama"):
        read_shape("models/gpt-7", Path("nowhere"))


def test_time_by_hand() -> None:
    cost = RooflineCost(hardware=PLAIN, model=TOY)
    found = estimate_time(config(eval={"prompts": 2, "samples": 1, "every_samples": 32}), cost, length=6)
    # Two rounds of four slots: prompts are taken to be half of the limit, and answers have 6 tokens.
    one_round = cost.decode_s(4, 8, 6) + cost.prefill_s([2] * 4)
    assert found.rollout_s == pytest.approx(2 * one_round)
    assert found.update_s == pytest.approx(6 * 10 * 8 * (2 + 6) / 250)
    assert (found.num_updates, found.num_evals) == (8, 3)  # at the start, after 32 samples and at the end
    assert found.eval_s == pytest.approx(one_round)
    assert found.total_s == pytest.approx(8 * (2 * one_round + found.update_s + found.publish_s) + 3 * one_round)


def test_siblings_share_their_prompt() -> None:
    cost = RooflineCost(hardware=PLAIN, model=TOY)
    found = estimate_time(config(learner={"algorithm": "grpo", "group_size": 4}), cost, length=6)
    assert found.update_s == pytest.approx(6 * 10 * (8 * 6 + 2 * 2) / 250)
    assert found.rollout_s == pytest.approx(2 * (cost.decode_s(4, 8, 6) + cost.prefill_s([2])))


def test_a_forecast_says_what_does_not_fit() -> None:
    wanted = config(model={"path": "smollm2-135m"}, learner={"micro_tokens": 8192})
    few = estimate_run(wanted, Path("nowhere"), hardware="cpu", devices=1, from_run=None)
    assert few.fits
    assert "1 x cpu" in few.memory_text
    assert few.placement_text == ""
    large = config(model={"path": "llama-3.1-8b"}, engine={"max_new_tokens": 512})
    one = estimate_run(large, Path("nowhere"), hardware="cpu", devices=1, from_run=None)
    assert not one.fits
    assert "this does not fit: lower learner.micro_tokens" in one.memory_text
    assert (one.shortest.length, one.longest.length) == (32, 512)
    assert one.seconds[1] > one.longest.total_s > one.shortest.total_s
    assert "if answers take 32 tokens" in one.time_text


def test_updates_may_run_elsewhere() -> None:
    cost = RooflineCost(hardware=PLAIN, model=TOY)
    slow, fast = (estimate_time(config(), cost, 6, replace(cost, replicas=count)) for count in (1, 4))
    assert slow.update_s == pytest.approx(4 * fast.update_s)
    assert slow.rollout_s == fast.rollout_s
