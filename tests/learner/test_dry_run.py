"""A dry run with fake tensors counts what real tensors of the same learner take, part by part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig

from sortedrl.config import SortedConfig
from sortedrl.errors import LearnerError
from sortedrl.learner import dry_run
from sortedrl.learner.dry_run import MicroShape, RankMemory, measure_update

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
# Embedding and output layer; per layer q, k, v, o, three of the feed-forward block, two norms; the last norm.
OUTPUT = 1000 * 64
LAYER = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64
MICRO = MicroShape(prompt_tokens=8, answer_tokens=24, num_tokens=100)


def model_config(layers: int = 3) -> Any:
    return LlamaConfig(num_hidden_layers=layers, vocab_size=1000, tie_word_embeddings=False, **SHAPE)


def settings(**learner: Any) -> Any:
    return SortedConfig(learner={"algorithm": "reinforce++", "group_size": 1, "dtype": "float32", **learner}).learner


def measured(num_ranks: int | None, layers: int | None = None, depth: int = 3, **learner: Any) -> RankMemory:
    return measure_update(
        model_config(depth), settings(**learner), MICRO, num_ranks=num_ranks, device_bytes=2**30, layers=layers
    )


def test_the_longest_micro_batch_is_full_of_answers() -> None:
    samples = MICRO.samples
    assert [len(sample.prompt.tokens) for sample in samples] == [8, 8, 8]  # 3 x 32 tokens; 4 more hold no answer
    assert [sample.num_tokens - 1 for sample in samples] == [24, 24, 24]
    assert len({sample.prompt.tokens for sample in samples}) == 3
    assert [s.num_tokens - 1 for s in MicroShape(prompt_tokens=8, answer_tokens=24, num_tokens=50).samples] == [24, 10]


def test_ranks_share_what_stays() -> None:
    params = 2 * OUTPUT + 3 * LAYER + 64
    before = torch.UntypedStorage.resize_
    one, four = measured(None, kl_coef=0.1), measured(4, kl_coef=0.1)
    assert (one.weights, one.reference, one.gradients) == (4 * params,) * 3
    # AdamW: two moments, and a step count of 4 bytes for each of 3 x 9 + 3 tensors.
    assert one.optimizer == 8 * params + 4 * 30
    assert one.gathers == 0
    assert (four.weights, four.reference, four.gradients) == (params,) * 3
    assert four.peak == sum(four.parts.values())
    assert four.resident == four.weights + four.reference + four.optimizer
    assert not dist.is_initialized()
    assert torch.UntypedStorage.resize_ is before


def test_a_short_micro_batch_peaks_where_weights_are_gathered() -> None:
    short = MicroShape(prompt_tokens=1, answer_tokens=1, num_tokens=2)
    found = measure_update(model_config(1), settings(), short, num_ranks=4, device_bytes=2**30)
    assert found.gathers >= 4 * OUTPUT  # the output layer as a whole
    assert found.gathers > found.activations


def test_layers_that_are_not_measured_are_added() -> None:
    whole, extended = measured(2, depth=4, recompute=True), measured(2, layers=1, depth=4, recompute=True)
    assert extended.parts == pytest.approx(whole.parts, rel=0.01)


def test_ranks_that_share_a_micro_batch_hold_their_part_of_it() -> None:
    long = MicroShape(prompt_tokens=8, answer_tokens=4088, num_tokens=4096)

    def peak(**learner: Any) -> RankMemory:
        return measure_update(model_config(2), settings(ranks=2, **learner), long, num_ranks=2, device_bytes=2**22)

    alone, shared = peak(), peak(context_parallel=2)
    assert 0.45 * alone.activations < shared.activations < 0.6 * alone.activations
    assert shared.resident == alone.resident
    kept, offloaded = peak(recompute=True), peak(recompute=True, offload_activations=True)
    # At the output layer, where the peak is, the inputs of both layers (4,096 tokens x 64 numbers) are elsewhere.
    assert kept.activations - offloaded.activations == 2 * 4 * 64 * 4096


class NamedStorage:
    """As a storage of torch, at a given address."""

    def __init__(self, address: int, size: int) -> None:
        self._cdata = address
        self._size = size

    def nbytes(self) -> int:
        return self._size


def test_a_storage_at_the_address_of_another_is_counted() -> None:
    known = NamedStorage(1, 100)
    tracker = dry_run._Tracker({1: known})
    first, second = NamedStorage(2, 10), NamedStorage(2, 30)
    tracker._count(known, None)
    tracker._count(first, "gathers")
    tracker._count(second, None)  # the first is gone, and Python has not said so yet
    del first
    third = NamedStorage(3, 5)
    tracker._count(third, None)
    assert tracker.peaks == [{"activations": 35, "gathers": 0}]
    del second
    tracker._count(third, "gathers")
    assert tracker._now == {"activations": 0, "gathers": 5}


def test_fake_tensors_take_what_real_ones_take(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = measured(None, depth=1)

    class NoMode:
        def __init__(self, **options: Any) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    monkeypatch.setattr(dry_run, "FakeTensorMode", NoMode)
    assert measured(None, depth=1).parts == fake.parts


def test_a_critic_and_adapters_are_counted() -> None:
    critic = measured(None, depth=1, algorithm="ppo")
    assert critic.weights == 4 * (2 * OUTPUT + LAYER + 64 + 64 + 1)
    lora = SortedConfig(lora={"rank": 2, "base_dtype": "bfloat16"}).lora
    adapted = measure_update(model_config(1), settings(), MICRO, num_ranks=None, device_bytes=2**30, lora=lora)
    sides = 2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128)
    assert adapted.gradients == 4 * 2 * sides
    assert adapted.weights == 2 * (2 * OUTPUT + LAYER + 64) + 4 * 2 * sides


def test_a_process_with_ranks_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(LearnerError, match="needs a process without"):
        measured(2)
