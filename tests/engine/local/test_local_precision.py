"""The lean decoder's copies of the weights: packed or plain, float32 or bfloat16, updated at publication."""

from __future__ import annotations

import pytest
import torch

from sortedrl.config import SortedConfig
from sortedrl.engine.base import Sampling
from sortedrl.engine.local import decoder_choice, linear
from sortedrl.engine.local.decoder_choice import choose_dtype
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.local.linear import PackedLinear, PlainLinear, make_linear
from sortedrl.errors import ConfigError, ModelError
from sortedrl.run.builders.parts import build_engine
from sortedrl.run.checkpoint_folder import load_model
from sortedrl.tasks.tiny import knights_tiny_path
from tests.support.tiny_models import (
    Caller,
    add_noise,
    check_replay_equals_restart,
    logprob_gaps,
    make_caller,
    make_requests,
    serve,
    source,
    teacher_forced,
    tiny_model,
    tokens_of,
)

CPU = torch.device("cpu")


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat tiny models like large ones: pack all matrices, and search candidates in all vocabularies."""
    if not linear.can_pack(CPU, torch.float32):
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr("sortedrl.engine.local.linear._PACK_ELEMENTS", 1)
    monkeypatch.setattr("sortedrl.engine.sampling.draw._MIN_CANDIDATE_VOCAB", 1)
    monkeypatch.setattr("sortedrl.engine.sampling.draw.load_kernel", lambda: None)  # otherwise the kernel would draw


@pytest.mark.parametrize("kind", [PlainLinear, PackedLinear])
def test_products_equal_those_of_a_linear_layer(kind: type) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(40, 24, generator=generator), torch.randn(40, generator=generator)
    for rows in (1, 7, 64):
        x, residual = torch.randn(rows, 24, generator=generator), torch.randn(rows, 40, generator=generator)
        for given in (None, bias):
            expected = torch.nn.functional.linear(x, weight, given)
            torch.testing.assert_close(kind(weight, given)(x), expected, atol=1e-5, rtol=1e-5)
            added = kind(weight, given).add_to(residual, x)
            torch.testing.assert_close(added, residual + expected, atol=1e-5, rtol=1e-5)


def test_the_layout_depends_on_the_size() -> None:
    assert isinstance(make_linear(torch.zeros(64, 192), None, torch.float32), PlainLinear)
    large = make_linear(torch.zeros(1024, 576), None, torch.float32)
    assert isinstance(large, PackedLinear if linear.can_pack(CPU, torch.float32) else PlainLinear)


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("kind", ["llama-gqa", "qwen2", "qwen3"])
def test_packed_and_plain_weights_write_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, requests = tiny_model(kind), make_requests(6)
    found = serve(model, requests, path="lean")
    monkeypatch.undo()
    expected = serve(model, requests, path="lean")
    for sample, answer in expected.items():
        assert found[sample].tokens == answer.tokens
        assert found[sample].logprobs == pytest.approx(answer.logprobs, abs=1e-4)


@pytest.mark.usefixtures("packed")
def test_a_publication_reaches_the_packed_weights_and_is_counted() -> None:
    model, other, requests = tiny_model(), tiny_model(), make_requests(4)
    add_noise(other, 0.1, seed=5)
    caller = make_caller(model, path="lean")
    before = tokens_of(caller.serve(requests))
    caller.answers.clear()
    caller.engine.publish(1, source(other)).wait()
    for request in requests:
        answer = caller.serve([request])[request.sample]
        assert answer.logprobs == pytest.approx(teacher_forced(other, request, answer.tokens), abs=1e-4)
    assert tokens_of(caller.answers) != before
    assert caller.engine.stats().extra["refreshes"] == 1


@pytest.mark.usefixtures("packed")
def test_replay_equals_restart_with_packed_weights() -> None:
    check_replay_equals_restart(path="lean")


def test_bfloat16_is_close_and_reports_inexact_replay() -> None:
    model, _ = load_model(knights_tiny_path())
    engine = LocalEngine(model, slots=8, max_length=128, dtype=torch.bfloat16)
    assert not engine.capabilities.exact_replay
    assert engine.stats().extra["dtype"] == "bfloat16"
    requests = make_requests(8, budget=30)
    answers = Caller(engine).serve(requests)
    gaps = logprob_gaps(model, requests, answers)
    assert len(gaps) == 240
    assert 1e-5 < sum(gaps) / len(gaps) < 0.05


def test_a_model_on_its_own_modules_keeps_their_precision() -> None:
    with pytest.raises(ModelError, match=r"engine\.dtype = auto"):
        LocalEngine(tiny_model("gpt-neox"), slots=1, max_length=32, dtype=torch.bfloat16)


def test_auto_dtype_depends_on_processor_model_size_and_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    assert choose_dtype(model, "bfloat16", needs_exact_replay=True) == torch.bfloat16
    monkeypatch.setattr(decoder_choice, "has_fast_bfloat16", lambda device: False)
    monkeypatch.setattr(decoder_choice, "has_fast_int16", lambda: False)
    monkeypatch.setattr(decoder_choice, "_MIN_16_BIT_PARAMETERS", 1)
    assert choose_dtype(model, "auto", needs_exact_replay=False) == torch.float32
    monkeypatch.setattr(decoder_choice, "has_fast_bfloat16", lambda device: True)
    assert choose_dtype(model, "auto", needs_exact_replay=False) == torch.bfloat16
    assert choose_dtype(model, "auto", needs_exact_replay=True) == torch.float32
    assert choose_dtype(tiny_model("gpt-neox"), "auto", needs_exact_replay=False) == torch.float32
    monkeypatch.setattr(decoder_choice, "_MIN_16_BIT_PARAMETERS", 10_000_000)
    assert choose_dtype(model, "auto", needs_exact_replay=False) == torch.float32


def test_replay_in_bfloat16_is_refused() -> None:
    config = SortedConfig(engine={"dtype": "bfloat16", "max_new_tokens": 64}, schedule={"strategy": "sorted-replay"})
    with pytest.raises(ConfigError, match=r"[Ss]et engine\.dtype = float32"):
        build_engine(config, tiny_model(), config.knobs)


def test_greedy_equals_generate_on_200_prompts() -> None:
    model = tiny_model("llama-gqa")
    prompts = torch.randint(23, (200, 9), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        options = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
        expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)[:, 9:].tolist()
    base = make_requests(1, budget=24, sampling=Sampling(temperature=0.0))[0]
    requests = [
        type(base)(sample=row, attempt=0, prompt=prompt, budget=24, seed=0, sampling=base.sampling)
        for row, prompt in enumerate(prompts.tolist())
    ]
    answers = serve(model, requests, slots=48)
    assert [answers[row].tokens for row in range(200)] == expected
