"""Packed micro-batches compared with one sample at a time, on every supported architecture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sortedrl.errors import DataError, ModelError
from sortedrl.learner import attention
from sortedrl.learner import pack as packing
from sortedrl.learner.pack import check_packing, pack
from tests.support.learners import assert_same
from tests.support.packed_samples import (
    MIXED,
    SHAPE,
    VOCABULARY,
    gradients_one_by_one,
    packed_gradients,
    samples_of,
)

WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=True)),
    "llama-gqa": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2)),
    "qwen2-window": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2, **WINDOW)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("micro_tokens", [1000, 40])
def test_packed_gradients_equal_those_of_one_sample_at_a_time(name: str, micro_tokens: int) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    samples = samples_of(MIXED)
    _, packed = packed_gradients(model, pack(samples, range(len(samples)), micro_tokens))
    assert_same(packed, gradients_one_by_one(model, samples), 1e-5)


def plain_varlen(query: Tensor, key: Tensor, value: Tensor, edges: Tensor, *_: Any, **options: Any) -> Tensor:
    """torch's varlen_attn, which needs a GPU, row by row with a mask: query i sees keys i - left to i."""
    left, right = options["window_size"]
    assert right == 0
    outputs: list[Tensor] = []
    for start, stop in itertools.pairwise(edges.tolist()):
        query_hld, key_hld, value_hld = (states[start:stop].transpose(0, 1) for states in (query, key, value))
        group = query_hld.shape[0] // key_hld.shape[0]
        assert options["enable_gqa"] is (group > 1)
        places = torch.arange(stop - start)
        behind = places[:, None] - places[None, :]
        is_hidden = (behind < 0) | ((behind > left) if left >= 0 else torch.zeros_like(behind, dtype=torch.bool))
        scores = query_hld @ key_hld.repeat_interleave(group, 0).mT * options["scale"]
        shares = scores.masked_fill(is_hidden, -math.inf).softmax(-1)
        outputs.append((shares @ value_hld.repeat_interleave(group, 0)).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-window", "gpt-neox"])
def test_attention_without_padding_is_that_of_one_sample_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Only GPUs run this path. The kernel is replaced; the test checks what it is given.
    monkeypatch.setattr(packing, "can_use_compiled_layers", lambda model, layout: False)
    monkeypatch.setattr(attention, "varlen_attn", plain_varlen)
    monkeypatch.setattr(
        attention,
        "_attend_in_buckets",
        lambda query, key, value, packing, scaling, dropout, window: attention._attend_without_padding(
            query, key, value, packing, scaling, window
        ),
    )
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    samples = samples_of(MIXED)
    _, packed = packed_gradients(model, pack(samples, range(len(samples)), 60))
    assert_same(packed, gradients_one_by_one(model, samples), 1e-5)


def test_packed_logprobs_do_not_depend_on_what_else_is_packed() -> None:
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    samples = samples_of(MIXED)
    together, _ = packed_gradients(model, pack(samples, range(len(samples)), 1000))
    by_target: list[float] = []
    for micro in pack(samples, range(len(samples)), 1):  # each sample alone, prompts in the order of their length
        by_target.extend(packed_gradients(model, [micro])[0].tolist())
    assert sorted(together.tolist()) == pytest.approx(sorted(by_target), abs=1e-5)


def test_layout_by_hand() -> None:
    # Siblings of prompt (p q) with answers of 3 and 2 tokens: p q a b c -> the last token of an answer is never input.
    first, second = samples_of([(0, 2, 3), (0, 2, 2)])
    (micro,) = pack([first, second], range(2), 100)
    prompt, answers = list(first.prompt.tokens), (first.tokens, second.tokens)
    assert micro.tokens_n.tolist() == [*prompt, *answers[0][:2], *answers[1][:1]]
    assert micro.positions_n.tolist() == [0, 1, 2, 3, 2]
    assert micro.targets_a.tolist() == [*answers[0], *answers[1]]
    assert micro.predictor_a.tolist() == [1, 2, 3, 1, 4]
    assert micro.behaviour_a.tolist() == pytest.approx([*first.logprobs, *second.logprobs])
    assert micro.sample_a.tolist() == [0, 0, 0, 1, 1]
    assert (micro.indices, micro.lengths) == ([0, 1], [3, 2])
    # Rows of 4 and 3 tokens are not similar enough to share a bucket.
    assert micro.layout.shapes == ((1, 4), (1, 3))
    assert micro.layout.padded_p.tolist() == [0, 1, 2, 3, 0, 1, 4]
    assert micro.layout.padded_p[micro.layout.in_padded_n].tolist() == [0, 1, 2, 3, 4]
    assert micro.layout.edges.tolist() == [0, 4, 7]
    assert micro.layout.unpadded_t.tolist() == [0, 1, 2, 3, 0, 1, 4]
    assert micro.layout.unpadded_t[micro.layout.in_unpadded_n].tolist() == [0, 1, 2, 3, 4]


def test_budget_is_kept_and_every_answer_token_is_there_once() -> None:
    samples = samples_of(MIXED)
    for micro_tokens in (34, 40, 64, 1000):
        micros = pack(samples, range(len(samples)), micro_tokens)
        assert all(micro.num_tokens <= micro_tokens for micro in micros)
        targets = sorted(token for micro in micros for token in micro.targets_a.tolist())
        assert targets == sorted(token for sample in samples for token in sample.tokens)
    # Shared prompts: 4 + 8 + 29 + 1, 3 + 0 + 7, 7 + 11 + 10, 1 + 24.
    (whole,) = pack(samples, range(len(samples)), 1000)
    assert whole.num_tokens == 42 + 10 + 28 + 25


def test_a_sample_over_the_budget_goes_alone() -> None:
    micros = pack(samples_of([(0, 4, 30), (0, 4, 3), (1, 4, 3)]), range(3), 12)
    assert sorted(micro.num_tokens for micro in micros) == [12, 33]


def test_only_the_chosen_samples_with_tokens_are_computed() -> None:
    samples = samples_of([(0, 4, 5), (0, 4, 0), (1, 4, 6), (2, 4, 7)])
    (micro,) = pack(samples, [0, 1, 3], 1000)
    assert micro.num_tokens == (4 + 4) + (4 + 6)
    assert pack(samples, [], 1000) == []
    assert pack(samples, [1], 1000) == []


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="no tokens"):
        pack(samples_of([(0, 0, 3)]), [0], 100)


@pytest.mark.parametrize("name", MODELS)
def test_check_packing_accepts(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    before = model.config._attn_implementation
    check_packing(model)
    assert model.training
    assert model.config._attn_implementation == before


def test_check_packing_refuses_what_mixes_samples() -> None:
    torch.manual_seed(0)
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4))
    state: dict[str, Any] = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    hybrid = FalconH1ForCausalLM(FalconH1Config(**SHAPE, num_key_value_heads=4, **state))
    for model in (recurrent, hybrid):
        with pytest.raises(ModelError, match=f"{type(model).__name__} mixes samples"):
            check_packing(model)


def test_check_packing_refuses_what_it_cannot_pack() -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="softcap"):
        check_packing(Gemma2ForCausalLM(Gemma2Config(**SHAPE, num_key_value_heads=4, head_dim=8)))
    with pytest.raises(ModelError, match="Linear is not a transformers model"):
        check_packing(nn.Linear(2, 2))
