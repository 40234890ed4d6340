"""Log-probs and entropy computed in pieces, compared with all logits at once: values, gradients, memory, exceptions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CohereConfig, CohereForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention

from sortedrl.learner import logprobs
from sortedrl.learner.logprobs import LogprobScorer, PieceSizes
from sortedrl.learner.pack import pack, packed_attention
from sortedrl.learner.precision import pass_precision
from sortedrl.learner.torch import TorchLearner
from tests.support.learners import Settings, assert_same, caught_gradients, make_batch, make_model
from tests.support.packed_samples import MIXED, SHAPE, samples_of
from tests.support.tiny_models import tiny_model


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute even the smallest logits in pieces, of two or three tokens with the tiny vocabularies."""
    monkeypatch.setattr(logprobs, "WHOLE_ELEMENTS", 0)
    monkeypatch.setattr(logprobs, "PIECE_ELEMENTS", 60)


def plain_scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float) -> Any:
    table = (nn.functional.linear(hidden, weight, bias) / temperature).log_softmax(-1)
    return table[torch.arange(len(targets)), targets], -(table.exp() * table).sum(-1)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kept", [0, 100, 1000])  # none of 13 x 23 logits, the first two pieces of seven, all
def test_values_and_gradients_are_those_of_the_whole(
    has_bias: bool, temperature: float, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "KEPT_ELEMENTS", kept)
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (13, 8), "weight": (23, 8), "bias": (23,)}
    inputs = {name: torch.randn(shape, generator=generator, requires_grad=True) for name, shape in shapes.items()}
    bias = inputs["bias"] if has_bias else None
    targets = torch.randint(0, 23, (13,), generator=generator)
    by_logprob, by_entropy = torch.randn(2, 13, generator=generator)
    found: list[tuple[Tensor, Tensor, list[Tensor]]] = []
    for is_ours in (True, False):
        if is_ours:
            values = logprobs._LogprobsInPieces.apply(
                inputs["hidden"], inputs["weight"], bias, targets, 1 / temperature, torch.float32, PieceSizes.on_cpu()
            )
        else:
            values = plain_scores(inputs["hidden"], inputs["weight"], bias, targets, temperature)
        ((values[0] * by_logprob).sum() + (values[1] * by_entropy).sum()).backward()
        gradients = [value.grad.clone() for value in inputs.values() if value.grad is not None]
        for value in inputs.values():
            value.grad = None
        found.append((values[0].detach(), values[1].detach(), gradients))
    assert len(found[0][2]) == len(found[1][2]) == 2 + has_bias
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("in_pieces")
def test_kept_pieces_are_used_up_and_computed_again_for_a_second_backward() -> None:
    hidden, weight = (torch.randn(shape, requires_grad=True) for shape in ((13, 8), (23, 8)))
    logprobs_a, _ = logprobs._LogprobsInPieces.apply(
        hidden, weight, None, torch.arange(13), 1.0, torch.float32, PieceSizes.on_cpu()
    )
    node = logprobs_a.grad_fn
    assert len(node.kept) == 7  # all pieces
    first = torch.autograd.grad(logprobs_a.sum(), (hidden, weight), retain_graph=True)
    assert node.kept == []
    second = torch.autograd.grad(logprobs_a.sum(), (hidden, weight))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.usefixtures("in_pieces")
def test_a_pass_without_gradients_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    forward = logprobs._LogprobsInPieces.forward

    def spy(ctx: Any, *args: Any) -> Any:
        returned = forward(ctx, *args)
        found.append(len(ctx.kept))
        return returned

    monkeypatch.setattr(logprobs._LogprobsInPieces, "forward", staticmethod(spy))
    (micro,) = pack(samples_of(MIXED), range(len(MIXED)), 1000)
    model = tiny_model("llama")
    with packed_attention(model):
        with torch.no_grad():
            LogprobScorer(1.0).score(model, micro)
        LogprobScorer(1.0).score(model, micro)
    assert found[0] == 0
    assert found[1] > 0


@pytest.mark.parametrize("kind", ["llama", "llama-gqa", "qwen3", "gpt-neox"])
@pytest.mark.parametrize(
    "changes", [{}, {"entropy_coef": 0.1}, {"kl_coef": 0.1}, {"algorithm": "ppo"}, {"importance": "token"}]
)
def test_an_update_in_pieces_is_that_of_the_whole(
    kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients: list[dict[str, Tensor]] = []
    metrics: list[dict[str, float]] = []
    for is_in_pieces in (False, True):
        if is_in_pieces:
            monkeypatch.setattr(logprobs, "WHOLE_ELEMENTS", 0)
            monkeypatch.setattr(logprobs, "PIECE_ELEMENTS", 60)
            monkeypatch.setattr(logprobs, "KEPT_ELEMENTS", 200)
        model = tiny_model(kind)
        batch = make_batch(model, off_policy=0.3, temperature=0.7)
        learner = TorchLearner(model, Settings(lr=1e-3, **changes), temperature=0.7)
        gradients.append(caught_gradients(learner))
        metrics.append(learner.start(batch).result().metrics)
        assert "forward" not in model.get_output_embeddings().__dict__
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)
    assert_same(gradients[1], gradients[0], 1e-5)


@pytest.mark.usefixtures("in_pieces")
def test_no_logits_of_all_tokens_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    sizes: list[int] = []
    linear = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *args: sizes.append(linear(*args).numel()) or linear(*args))
    (micro,) = pack(samples_of(MIXED), range(len(MIXED)), 1000)
    with packed_attention(model):
        scores = LogprobScorer(1.0).score(model, micro)
        scores.logprobs_a.sum().backward()
    rows_of_vocabulary = [size for size in sizes if size % 23 == 0]
    assert max(rows_of_vocabulary) <= 60 < micro.targets_a.numel() * 23
    assert scores.entropy.requires_grad is False


@pytest.mark.usefixtures("in_pieces")
def test_a_model_that_scales_its_logits_is_computed_as_a_whole() -> None:
    torch.manual_seed(0)
    config = CohereConfig(
        **SHAPE, num_key_value_heads=4, logit_scale=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    model = CohereForCausalLM(config).eval()
    (sample,) = samples_of([(0, 4, 9)])
    (micro,) = pack([sample], [0], 1000)
    with packed_attention(model):
        found = LogprobScorer(1.0).score(model, micro)
    tokens = torch.tensor([[*sample.prompt.tokens, *sample.tokens]])
    table = model(tokens, use_cache=False).logits[0, 3:-1].log_softmax(-1)
    expected = table[torch.arange(9), torch.tensor(sample.tokens)]
    torch.testing.assert_close(found.logprobs_a, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("in_pieces")
def test_adapters_on_the_output_layer_are_not_left_out() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model(), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    (sample,) = make_batch(make_model()).samples[1:2]
    (micro,) = pack([sample], [0], 1000)
    with packed_attention(model), torch.no_grad():
        found = LogprobScorer(1.0).score(model, micro).logprobs_a
        tokens = torch.tensor([*sample.prompt.tokens, *sample.tokens])
    with torch.no_grad():
        table = model(tokens[None], use_cache=False).logits[0, 2:-1].log_softmax(-1)
    torch.testing.assert_close(found, table[torch.arange(9), tokens[3:]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_in_pieces", [False, True])
def test_bfloat16_passes_keep_float32_weights(is_in_pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_in_pieces:
        monkeypatch.setattr(logprobs, "WHOLE_ELEMENTS", 0)
    gradients: list[dict[str, Tensor]] = []
    for dtype in ("float32", "bfloat16"):
        model = make_model()
        learner = TorchLearner(model, Settings(dtype=dtype), temperature=1.0)
        gradients.append(caught_gradients(learner))
        learner.start(make_batch(model))
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    exact, rounded = gradients
    assert all(value.dtype == torch.float32 for value in rounded.values())
    assert_same(rounded, exact, 3e-2)
    with pytest.raises(AssertionError):  # so it really was another precision
        assert_same(rounded, exact, 1e-5)


def test_recomputed_activations_give_the_same_update_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    attend = GPTNeoXAttention.forward
    monkeypatch.setattr(
        GPTNeoXAttention, "forward", lambda self, *args, **kw: calls.append(self.training) or attend(self, *args, **kw)
    )
    gradients: list[dict[str, Tensor]] = []
    num_calls: list[int] = []
    for is_recomputed in (False, True):
        model = tiny_model("gpt-neox", hidden_dropout=0.5, attention_dropout=0.5)
        learner = TorchLearner(model, Settings(recompute=is_recomputed), temperature=1.0)
        gradients.append(caught_gradients(learner))
        batch = make_batch(model)
        calls.clear()
        learner.start(batch)
        num_calls.append(len(calls))
        assert not any(calls)
        assert not any(module.training for module in model.modules())
    assert num_calls == [2, 4]  # two layers, each once more for its gradient
    assert_same(gradients[1], gradients[0], 1e-6)


@pytest.mark.parametrize("is_in_pieces", [False, True])
def test_the_output_layer_in_float32(is_in_pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a pass in bfloat16, logits are the product of the hidden states and the weights in float32."""
    if is_in_pieces:
        monkeypatch.setattr(logprobs, "WHOLE_ELEMENTS", 0)
    model = make_model()
    (micro,) = pack(make_batch(model).samples, range(8), 1000)
    seen: list[Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0][0]))
    found: list[Tensor] = []
    for is_fp32 in (True, False):
        with packed_attention(model), pass_precision("bfloat16", model):
            found.append(LogprobScorer(1.0, is_fp32=is_fp32).score(model, micro).logprobs_a)
    table = nn.functional.linear(seen[0].float(), model.lm_head.weight).log_softmax(-1)
    expected = table.gather(1, micro.targets_a[:, None])[:, 0]
    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=1e-6)
    assert float((found[1] - expected).detach().abs().max()) > 1e-4
    found[0].sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.float32
    assert "forward" not in model.lm_head.__dict__
