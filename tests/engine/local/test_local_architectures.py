"""The local engine compared with transformers, for every architecture and decoder."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from sortedrl.engine.base import Sampling
from sortedrl.engine.local.decoder_choice import make_decoder
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.local.lean_decoder import supports_lean
from sortedrl.errors import ModelError
from tests.support.tiny_models import (
    KINDS,
    PATHS,
    VOCAB,
    Caller,
    make_requests,
    needs_compiler,
    serve,
    teacher_forced,
    tiny_model,
    tokens_of,
)

LLAMA_KINDS = [kind for kind in KINDS if kind != "gpt-neox"]
CASES = [
    *((kind, "module") for kind in KINDS),
    *((kind, "lean") for kind in LLAMA_KINDS),
    *(pytest.param(kind, "native", marks=needs_compiler) for kind in LLAMA_KINDS),
]


@torch.no_grad()
def generate(model, prompt, count) -> list[int]:
    """transformers' own greedy decoding."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("kind", "path"), CASES)
def test_greedy_equals_generate(kind: str, path: str) -> None:
    model = tiny_model(kind)
    requests = make_requests(6, sampling=Sampling(temperature=0.0))
    answers = serve(model, requests, slots=3, path=path)
    for request in requests:
        answer = answers[request.sample]
        assert answer.tokens == generate(model, request.prompt, request.budget)
        assert answer.logprobs == pytest.approx(teacher_forced(model, request, answer.tokens), abs=1e-4)


@pytest.mark.parametrize(("kind", "path"), CASES)
def test_logprobs_equal_a_teacher_forced_pass(kind: str, path: str) -> None:
    model = tiny_model(kind)
    requests = make_requests(6, sampling=Sampling(temperature=0.7))
    answers = serve(model, requests, slots=3, path=path)
    for request in requests:
        answer = answers[request.sample]
        assert len(set(answer.tokens)) > 2
        assert answer.logprobs == pytest.approx(teacher_forced(model, request, answer.tokens), abs=1e-4)


def logits_of(path: str, model) -> torch.Tensor:
    """Logits of a prefill of three slots with different lengths, and of four steps after it."""
    cache, decoder = make_decoder(model, path, slots=3, max_length=61, dtype=torch.float32)
    assert decoder.name == path
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 5, 31]
    plan = cache.plan_prefill([2, 0, 1], lengths)
    tokens_t = torch.randint(VOCAB, (sum(lengths),), generator=generator)
    with torch.inference_mode():
        found = [decoder.forward(tokens_t, plan.positions_t, None, plan)]
        for step in range(4):
            plan = cache.plan_decode([5 + step + 1, 31 + step + 1, 5 + step + 1])
            tokens_b = torch.randint(VOCAB, (3,), generator=generator)
            found.append(decoder.forward(tokens_b, plan.positions_t, None, plan))
    return torch.cat(found)


def exact_logits(model) -> torch.Tensor:
    """The logits of `logits_of` in float64, without a cache."""
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 5, 31]
    rows = list(torch.randint(VOCAB, (sum(lengths),), generator=generator).split(lengths))
    model = copy.deepcopy(model).double()
    with torch.inference_mode():
        found = [model(row[None]).logits[0] for row in rows]
        for _ in range(4):
            tokens_b = torch.randint(VOCAB, (3,), generator=generator)
            for slot, row in enumerate([1, 2, 0]):
                rows[row] = torch.cat([rows[row], tokens_b[slot : slot + 1]])
            found.append(torch.stack([model(rows[row][None]).logits[0, -1] for row in [1, 2, 0]]))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama-gqa", {}),
        ("llama", {"rms_norm_eps": 0.1}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
        ),
        ("llama-gqa", {"attention_bias": False, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("llama", {"hidden_size": 40, "intermediate_size": 50, "num_attention_heads": 5, "num_key_value_heads": 5}),
        ("llama-gqa", {"head_dim": 40, "num_attention_heads": 8}),
    ],
)
@pytest.mark.parametrize("path", PATHS[:2])
def test_fast_decoders_are_as_exact_as_the_models_own_modules(path: str, kind: str, changes: dict) -> None:
    """Against float64, because how far two roundings are apart depends on the processor."""
    model = tiny_model(kind, **changes)
    exact, own = exact_logits(model), logits_of("module", model)
    assert exact.dtype == torch.float64
    assert exact.std() > 0.3
    assert (own - exact).norm() < 1e-5 * exact.norm()
    assert (logits_of(path, model) - exact).norm() < 2 * (own - exact).norm()


def test_which_models_run_on_the_lean_decoder() -> None:
    assert supports_lean(tiny_model("llama"))
    assert not supports_lean(tiny_model("gpt-neox"))
    assert not supports_lean(tiny_model("llama", mlp_bias=True))
    assert not supports_lean(tiny_model("llama", hidden_act="gelu"))
    assert not supports_lean(tiny_model("llama").bfloat16())
    with pytest.raises(ModelError, match="path='module'"):
        LocalEngine(tiny_model("gpt-neox"), slots=1, max_length=32, path="lean")


@pytest.mark.parametrize("changes", [{"mlp_bias": True}, {"attention_bias": True}, {"hidden_act": "gelu"}])
def test_other_models_run_on_their_own_modules(changes: dict) -> None:
    model = tiny_model("llama", **changes)
    engine = LocalEngine(model, slots=2, max_length=128)
    assert engine.stats().extra["path"] == "module"
    request = make_requests(1, sampling=Sampling(temperature=0.0))[0]
    answer = Caller(engine).serve([request])[0]
    assert answer.tokens == generate(model, request.prompt, request.budget)


def test_half_precision_reports_inexact_replay() -> None:
    model = tiny_model("llama").bfloat16()
    engine = LocalEngine(model, slots=2, max_length=128)
    assert not engine.capabilities.exact_replay
    requests = make_requests(3)
    answers = Caller(engine).serve(requests)
    for request in requests:
        answer = answers[request.sample]
        assert len(answer.tokens) == request.budget
        assert answer.logprobs == pytest.approx(teacher_forced(model, request, answer.tokens), abs=0.3)


def test_unsupported_models_are_refused() -> None:
    window = tiny_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ModelError, match="sliding"):
        LocalEngine(window, slots=1, max_length=32)
    dynamic = tiny_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    with pytest.raises(ModelError, match="dynamic"):
        LocalEngine(dynamic, slots=1, max_length=32)
    with pytest.raises(ModelError, match="AutoModelForCausalLM"):
        LocalEngine(torch.nn.Linear(2, 2), slots=1, max_length=32)
    with pytest.raises(ModelError, match="512 positions"):
        LocalEngine(tiny_model("llama"), slots=1, max_length=513)


def test_a_model_without_the_attention_interface_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2)
    config.max_position_embeddings = 64
    with pytest.raises(ModelError, match="the local engine runs"):
        LocalEngine(transformers.BloomForCausalLM(config), slots=1, max_length=32)


@pytest.mark.parametrize("path", PATHS)
def test_a_shared_module_keeps_its_settings(path: str) -> None:
    model = tiny_model("llama", attention_dropout=0.5)
    requests = make_requests(4)
    expected = serve(model, requests, path=path)
    model.train()
    model.model.layers[0].eval()  # a learner may freeze a layer
    flags = [module.training for module in model.modules()]
    attention = model.config._attn_implementation
    found = serve(model, requests, path=path)
    assert tokens_of(found) == tokens_of(expected)
    assert [module.training for module in model.modules()] == flags
    assert model.config._attn_implementation == attention
    assert all(parameter.requires_grad for parameter in model.parameters())
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
