"""Layers with adapters and in bfloat16: gradients near those of the modules, float32 weights, and learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sortedrl.learner import llama, precision, projections
from sortedrl.learner import native_layers as layers
from sortedrl.learner import pack as packing
from sortedrl.learner.pack import MicroBatch, pack
from sortedrl.learner.precision import pass_precision
from sortedrl.learner.torch import TorchLearner
from sortedrl.native import openmp
from tests.support.learners import Settings, assert_same, make_batch, make_model, weights
from tests.support.packed_samples import MIXED, packed_gradients, samples_of
from tests.support.tiny_models import needs_compiler, tiny_model

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(autouse=True)
def all_models_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_LARGE_PARAMETERS", 1)


def adapted(model: Any, targets: list[str] = TARGETS, **changes: Any) -> Any:
    """The model with random adapters, because new ones add nothing to the base."""
    peft = pytest.importorskip("peft")
    arguments = {"task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6.0, "target_modules": targets, **changes}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**arguments)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return wrapped


def micro_of(lengths: list[tuple[int, int, int]] = MIXED) -> MicroBatch:
    (micro,) = pack(samples_of(lengths), range(len(lengths)), 1000)
    return micro


def use_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "can_use_compiled_layers", lambda model, layout: False)


def joined(values: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in values.values()])


def assert_near(found: dict[str, Tensor], exact: dict[str, Tensor], *, cosine: float, norm: float) -> None:
    assert found.keys() == exact.keys()
    assert all(value.dtype == torch.float32 for value in found.values())
    found_p, exact_p = joined(found), joined(exact)
    assert float(torch.cosine_similarity(found_p, exact_p, 0)) > cosine
    assert float(found_p.norm() / exact_p.norm()) == pytest.approx(1, abs=norm)


@needs_compiler
@pytest.mark.parametrize("targets", [TARGETS, ["q_proj", "v_proj"], ["down_proj"]], ids=["all", "attention", "down"])
def test_adapters_get_the_gradients_of_the_modules(targets: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, micro = adapted(tiny_model("llama-gqa"), targets), micro_of()
    assert llama.can_use_compiled_layers(model, micro.layout)
    ours_a, ours = packed_gradients(model, [micro])
    use_modules(monkeypatch)
    theirs_a, theirs = packed_gradients(model, [micro])
    torch.testing.assert_close(ours_a, theirs_a, rtol=1e-5, atol=1e-5)
    assert_same(ours, theirs, 1e-5)
    assert len(ours) == 2 * len(targets) * model.config.num_hidden_layers  # A and B, and no weight of the base


@needs_compiler
@pytest.mark.parametrize("has_adapters", [False, True], ids=["all weights", "adapters"])
def test_bfloat16_is_as_near_to_float32_as_in_the_modules(has_adapters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, micro = tiny_model("llama-gqa"), micro_of()
    model = adapted(model) if has_adapters else model
    exact_a, exact = packed_gradients(model, [micro])
    with torch.autocast("cpu", torch.bfloat16):
        assert llama.can_use_compiled_layers(model, micro.layout)
        found_a, found = packed_gradients(model, [micro])
        use_modules(monkeypatch)
        theirs_a, theirs = packed_gradients(model, [micro])
    assert_near(found, exact, cosine=0.998, norm=0.02)
    assert float((joined(found) - joined(exact)).norm()) < 1.2 * float((joined(theirs) - joined(exact)).norm())
    assert float((found_a - exact_a).norm()) < 1.2 * float((theirs_a - exact_a).norm())


@needs_compiler
@pytest.mark.parametrize("algorithm", ["reinforce++", "grpo"])
@pytest.mark.parametrize("has_adapters", [False, True], ids=["all weights", "adapters"])
def test_an_update_in_bfloat16_keeps_float32_weights(algorithm: str, has_adapters: bool) -> None:
    """The step of plain SGD is the gradient, so that the weights show it; AdamW would make noise of small ones."""

    def moved(dtype: str) -> dict[str, Tensor]:
        model = adapted(make_model()) if has_adapters else make_model()
        before = weights(model)
        learner = TorchLearner(model, Settings(algorithm=algorithm, dtype=dtype), temperature=1.0)
        learner.optimizer = torch.optim.SGD(
            [{"params": list(learner.optimizer.param_groups[0]["params"]), "rate": 1.0}]
        )
        learner.start(make_batch(model)).result()
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        return {name: value - before[name] for name, value in weights(model).items() if (value != before[name]).any()}

    assert_near(moved("bfloat16"), moved("float32"), cosine=0.995, norm=0.05)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_learn_which_answers_are_rewarded(dtype: str) -> None:
    model = adapted(make_model())
    batch = make_batch(model)
    learner = TorchLearner(model, Settings(dtype=dtype, lr=1e-2, lr_final=1.0), temperature=1.0)
    mean = sum(sample.reward or 0.0 for sample in batch.samples) / len(batch.samples)

    def preference() -> float:
        """The log-probs of answers above the mean reward minus those of answers below it."""
        scores, _ = learner._score(model, batch.samples, range(len(batch.samples)))
        return sum(float(t.mean()) * (1 if (batch.samples[i].reward or 0) > mean else -1) for i, t in scores.items())

    before = preference()
    for _ in range(8):  # until the clip stops it
        learner.start(batch).result()
    assert preference() > before + 0.1


@needs_compiler
def test_a_pass_sees_weights_that_moved() -> None:
    """Copies in bfloat16 are kept for frozen weights only, and made again when those are loaded anew."""
    model, micro = adapted(tiny_model("llama-gqa")), micro_of()

    def logprobs() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return packed_gradients(model, [micro])[0]

    first = logprobs()
    assert torch.equal(first, logprobs())
    layer = model.get_base_model().model.layers[0].mlp.gate_proj
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(-3)
    second = logprobs()
    assert not torch.equal(first, second)
    with torch.no_grad():
        layer.base_layer.weight.mul_(-3)
    assert not torch.equal(second, logprobs())
    assert layer in projections._frozen_copies


@needs_compiler
def test_disabled_adapters_give_the_base_model() -> None:
    """The reference model of the KL penalty is the policy without its adapters."""
    micro = micro_of()
    base, model = tiny_model("llama-gqa"), adapted(tiny_model("llama-gqa"))
    with torch.no_grad(), packing.packed_attention(base), packing.packed_attention(model):
        for dtype in ("float32", "bfloat16"):
            with pass_precision(dtype, model):
                adapted_av = packing.packed_logits(model, micro)
                with model.disable_adapter():
                    assert llama.can_use_compiled_layers(model, micro.layout)
                    assert torch.equal(packing.packed_logits(model, micro), packing.packed_logits(base, micro))
                assert torch.equal(packing.packed_logits(model, micro), adapted_av)


@needs_compiler
def test_which_adapters_it_takes() -> None:
    layout = micro_of().layout
    assert llama.can_use_compiled_layers(adapted(tiny_model()), layout)
    assert not llama.can_use_compiled_layers(adapted(tiny_model(), use_dora=True), layout)
    hooked = adapted(tiny_model())
    hooked.get_base_model().model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert not llama.can_use_compiled_layers(hooked, layout)
    merged = adapted(tiny_model())
    merged.merge_adapter()
    assert not llama.can_use_compiled_layers(merged, layout)


@needs_compiler
def test_threads_divide_the_rows_and_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, micro = tiny_model("llama-gqa"), micro_of()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    one_a, one = packed_gradients(model, [micro])
    monkeypatch.setattr(layers, "_MIN_PARALLEL", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    three_a, three = packed_gradients(model, [micro])
    torch.testing.assert_close(three_a, one_a, rtol=1e-6, atol=1e-6)
    assert_same(three, one, 1e-6)
    again_a, again = packed_gradients(model, [micro])
    assert torch.equal(again_a, three_a)
    assert all(torch.equal(again[name], value) for name, value in three.items())
    monkeypatch.setattr(openmp, "_load_openmp", lambda: None)
    alone_a, alone = packed_gradients(model, [micro])
    assert torch.equal(alone_a, three_a)
    assert all(torch.equal(alone[name], value) for name, value in three.items())


@needs_compiler
def test_the_gate_in_bfloat16_rounds_once_and_keeps_nan() -> None:
    inner_nf2 = (4 * torch.randn(5, 32, generator=torch.Generator().manual_seed(0))).bfloat16()
    inner_nf2[3, 2] = torch.nan
    out_nk = torch.zeros(5, 24, dtype=torch.bfloat16)  # wider, as with adapters
    layers.gate_low(inner_nf2, out_nk)
    gate_nf, up_nf = inner_nf2.double().chunk(2, 1)
    gate_nf.requires_grad_()
    up_nf.requires_grad_()
    exact_nf = torch.nn.functional.silu(gate_nf) * up_nf
    torch.testing.assert_close(out_nk[:, :16].double(), exact_nf, rtol=2**-8, atol=1e-9, equal_nan=True)
    assert not out_nk[:, 16:].any()
    exact_nf.sum().backward()
    assert gate_nf.grad is not None
    assert up_nf.grad is not None
    found_nf2 = layers.gate_low_backward(inner_nf2, torch.ones(5, 16)).double()
    expected_nf2 = torch.cat([gate_nf.grad, up_nf.grad], 1)
    torch.testing.assert_close(found_nf2, expected_nf2, rtol=2**-8, atol=1e-6, equal_nan=True)


def test_rows_are_divided_by_the_number_of_scores() -> None:
    layout = micro_of([(0, 1, 10), (1, 1, 6), (2, 1, 6), (3, 1, 5)]).layout
    # Rows have 10, 6, 6 and 5 tokens: 100 scores against 36 + 36 + 25.
    assert layers._divide_rows(layout, 2) == [[0], [1, 2, 3]]
    assert len(layers._divide_rows(layout, 9)) == 4


def test_errors_in_threads_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def fail(part: int) -> None:
        if part == 1:
            raise ValueError("part 1")

    with pytest.raises(ValueError, match="part 1"):
        openmp.run_in_parallel(fail, 2)


@pytest.mark.parametrize(
    ("dtype", "is_large", "is_fast", "expected"),
    [
        ("auto", True, True, True),
        ("auto", True, False, False),
        ("auto", False, True, False),
        ("float32", True, True, False),
        ("bfloat16", False, False, True),
    ],
)
def test_auto_takes_bfloat16_for_large_models_where_it_is_fast(
    dtype: Any, is_large: bool, is_fast: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_LARGE_PARAMETERS", 1 if is_large else 10**9)
    monkeypatch.setattr(precision, "has_fast_bfloat16", lambda device: is_fast)
    with pass_precision(dtype, make_model()):
        assert torch.is_autocast_enabled("cpu") == expected
