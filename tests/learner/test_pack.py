"""Packed micro-batches against one sample at a time, on every supported architecture."""

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
from sortedrl.learner.pack import MicroBatch, check_packing, pack, packed_attention, packed_logits
from sortedrl.records import Prompt, Sample, Segment

VOCABULARY = 23
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=True)),
    "llama-gqa": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2)),
    "qwen2-window": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2, **WINDOW)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)),
}


def make(lengths: list[tuple[int, int, int]]) -> list[Sample]:
    """Samples of (prompt id, prompt length, answer length), with random tokens that depend on their place alone."""
    samples: list[Sample] = []
    for index, (prompt, prompt_length, length) in enumerate(lengths):
        prompt_noise = torch.Generator().manual_seed(1000 + prompt)
        noise = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (length,), generator=noise).tolist()
        logprobs = (-3 * torch.rand(length, generator=noise)).tolist()
        half = length // 2
        samples.append(
            Sample(
                id=index,
                prompt=Prompt(
                    id=str(prompt),
                    tokens=tuple(torch.randint(0, VOCABULARY, (prompt_length,), generator=prompt_noise).tolist()),
                    content="",
                ),
                index=index,
                epoch=0,
                cohort=0,
                seed=index,
                budget=64,
                segments=[
                    Segment(version=0, tokens=tokens[:half], logprobs=logprobs[:half]),
                    Segment(version=1, tokens=tokens[half:], logprobs=logprobs[half:]),
                ],
            )
        )
    return samples


MIXED = [(0, 4, 9), (1, 3, 1), (0, 4, 30), (2, 7, 12), (1, 3, 8), (0, 4, 2), (3, 1, 25), (2, 7, 11)]
ADVANTAGES = [1.0, -0.5, 0.7, 2.0, -1.5, 0.3, -0.2, 0.9]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def weigh(model: nn.Module, micros: list[MicroBatch]) -> tuple[Tensor, dict[str, Tensor]]:
    """Advantage-weighted log-probs of all micro-batches, in order, and their gradient."""
    values: list[Tensor] = []
    with packed_attention(model):
        for micro in micros:
            logprobs_av = packed_logits(model, micro).log_softmax(-1)
            logprobs_a = logprobs_av.gather(-1, micro.targets_a[:, None])[:, 0]
            (logprobs_a * micro.mark_a).sum().backward()
            values.append(logprobs_a.detach())
    return torch.cat(values), gradients(model)


def weigh_alone(model: nn.Module, samples: list[Sample], advantages: list[float]) -> dict[str, Tensor]:
    for sample, advantage in zip(samples, advantages, strict=True):
        if sample.num_tokens == 0:
            continue
        tokens = torch.tensor([*sample.prompt.tokens, *sample.tokens])
        logprobs = model(tokens[None], use_cache=False).logits[0].log_softmax(-1)
        picked = logprobs[:-1].gather(-1, tokens[1:, None])[len(sample.prompt.tokens) - 1 :, 0]
        (picked.sum() * advantage).backward()
    return gradients(model)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    scale = max(float(gradient.norm()) for gradient in theirs.values())
    assert scale > 0
    for name, gradient in theirs.items():
        assert float((ours[name] - gradient).norm()) <= tolerance * scale, name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("micro_tokens", [1000, 40])
def test_packed_gradients_equal_those_of_one_sample_at_a_time(name: str, micro_tokens: int) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    samples = make(MIXED)
    _, packed = weigh(model, pack(samples, ADVANTAGES, micro_tokens))
    assert_same(packed, weigh_alone(model, samples, ADVANTAGES), 1e-5)


def plain_varlen(query: Tensor, key: Tensor, value: Tensor, edges: Tensor, *_: Any, **options: Any) -> Tensor:
    """What torch's varlen_attn does on GPUs, row by row and with a mask: key j is seen from i - left to i."""
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
def test_attention_by_edges_is_that_of_one_sample_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # GPUs take this way; the kernel is theirs, what it is given is checked here.
    monkeypatch.setattr(packing, "is_lean", lambda model, layout: False)
    monkeypatch.setattr(attention, "varlen_attn", plain_varlen)
    monkeypatch.setattr(
        attention,
        "_attend_by_bucket",
        lambda query, key, value, packing, scaling, dropout, window: attention._attend_by_edges(
            query, key, value, packing, scaling, window
        ),
    )
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    samples = make(MIXED)
    _, packed = weigh(model, pack(samples, ADVANTAGES, 60))
    assert_same(packed, weigh_alone(model, samples, ADVANTAGES), 1e-5)


def test_packed_logprobs_do_not_depend_on_what_else_is_packed() -> None:
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    samples = make(MIXED)
    together, _ = weigh(model, pack(samples, ADVANTAGES, 1000))
    by_target: list[float] = []
    for micro in pack(samples, ADVANTAGES, 1):  # each alone, families in the order of their length
        by_target.extend(weigh(model, [micro])[0].tolist())
    assert sorted(together.tolist()) == pytest.approx(sorted(by_target), abs=1e-5)


def test_layout_by_hand() -> None:
    # Siblings of prompt (p q) with answers of 3 and 2 tokens: p q a b c -> the last token of an answer is never input.
    first, second = make([(0, 2, 3), (0, 2, 2)])
    (micro,) = pack([first, second], [0.5, -1.0], 100)
    prompt, answers = list(first.prompt.tokens), (first.tokens, second.tokens)
    assert micro.tokens_n.tolist() == [*prompt, *answers[0][:2], *answers[1][:1]]
    assert micro.positions_n.tolist() == [0, 1, 2, 3, 2]
    assert micro.targets_a.tolist() == [*answers[0], *answers[1]]
    assert micro.predictor_a.tolist() == [1, 2, 3, 1, 4]
    assert micro.behaviour_a.tolist() == pytest.approx([*first.logprobs, *second.logprobs])
    assert micro.mark_a.tolist() == [0.5, 0.5, 0.5, -1.0, -1.0]
    # Rows of 4 and 3 tokens are not similar enough to share a bucket.
    assert micro.layout.shapes == ((1, 4), (1, 3))
    assert micro.layout.index_p.tolist() == [0, 1, 2, 3, 0, 1, 4]
    assert micro.layout.index_p[micro.layout.slot_n].tolist() == [0, 1, 2, 3, 4]
    assert micro.layout.edges.tolist() == [0, 4, 7]
    assert micro.layout.index_t.tolist() == [0, 1, 2, 3, 0, 1, 4]
    assert micro.layout.index_t[micro.layout.place_n].tolist() == [0, 1, 2, 3, 4]


def test_budget_is_kept_and_every_answer_token_is_there_once() -> None:
    samples = make(MIXED)
    for micro_tokens in (34, 40, 64, 1000):
        micros = pack(samples, ADVANTAGES, micro_tokens)
        assert all(micro.num_tokens <= micro_tokens for micro in micros)
        targets = sorted(token for micro in micros for token in micro.targets_a.tolist())
        assert targets == sorted(token for sample in samples for token in sample.tokens)
    # Shared prompts: 4 + 8 + 29 + 1, 3 + 0 + 7, 7 + 11 + 10, 1 + 24.
    (whole,) = pack(samples, ADVANTAGES, 1000)
    assert whole.num_tokens == 42 + 10 + 28 + 25


def test_a_sample_over_the_budget_goes_alone() -> None:
    micros = pack(make([(0, 4, 30), (0, 4, 3), (1, 4, 3)]), [1.0, 1.0, 1.0], 12)
    assert sorted(micro.num_tokens for micro in micros) == [12, 33]


def test_nothing_to_learn_from_is_not_computed() -> None:
    samples = make([(0, 4, 5), (0, 4, 0), (1, 4, 6), (2, 4, 7)])
    (micro,) = pack(samples, [1.0, 1.0, 0.0, -1.0], 1000)
    assert micro.num_tokens == (4 + 4) + (4 + 6)
    assert pack(samples, [0.0] * 4, 1000) == []


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(DataError, match="no tokens"):
        pack(make([(0, 0, 3)]), [1.0], 100)


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
    with pytest.raises(ModelError, match="Linear is no transformers model"):
        check_packing(nn.Linear(2, 2))
