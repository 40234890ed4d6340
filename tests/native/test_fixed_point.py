"""Products in fixed point (int16): they are close, no sum overflows, and the engine's guarantees hold as in float32."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from sortedrl.config import SortedConfig
from sortedrl.engine.local import decoder_choice, native_decoder
from sortedrl.engine.local.decoder_choice import choose_dtype, make_decoder
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.errors import ConfigError, ModelError
from sortedrl.native import c_library, kernel
from sortedrl.run.builders.parts import build_engine
from sortedrl.run.checkpoint_folder import load_model
from sortedrl.tasks.tiny import knights_tiny_path
from tests.support.tiny_models import (
    Caller,
    check_replay_equals_restart,
    logprob_gaps,
    make_caller,
    make_requests,
    needs_compiler,
    needs_wide_vectors,
    serve,
    tiny_model,
)

SPAN = 192
HEADERS = c_library.SOURCES
PRODUCT = """
#include <stdlib.h>
#include "product.h"

void product(const float *x, const float *w, int64_t rows, int64_t inputs, int64_t outputs, int64_t is_fixed, float *y)
{
    const int64_t size = sortedrl_panel_size(inputs, is_fixed), stride = row_stride(spans(inputs) * FIXED.in_row);
    float *weights = calloc(panels(outputs) / PANEL * size, 4), *fixed = calloc((rows + MAX_TILE) * stride, 4);
    struct rows plain = {calloc((rows + MAX_TILE) * row_stride(inputs), 4), row_stride(inputs)}, of_x = plain;
    sortedrl_panels(w, 0, outputs, inputs, is_fixed, weights);
    for (int64_t r = 0; r < rows; r++)
        memcpy(row(plain, r), x + r * inputs, inputs * sizeof *x);
    if (is_fixed) {
        of_x = (struct rows){fixed, stride};
        for (int64_t r = 0; r < rows; r++)
            row_to_fixed(row(plain, r), panels(inputs), 1, (struct row_span *)row(of_x, r));
    }
    for (int64_t p = 0, num; p < panels(outputs) / PANEL; p += num) {
        const float *first = weights + p * size;
        num = outputs - p * PANEL > PANEL ? 2 : 1;
        const struct weights here = {first, first + (num - 1) * size};
        panel_product(of_x, 0, (struct piece){here, here, num}, 0, (struct rows){y + p * PANEL, outputs}, rows, inputs,
                      outputs - p * PANEL, 0, is_fixed);
    }
    free(weights), free(fixed), free(plain.start);
}
"""


Multiply = Callable[..., torch.Tensor]


@pytest.fixture(scope="module", params=["processor", "plain"])
def product(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Multiply:
    """x w^T by the kernel's header: with the processor's instruction for it, and in plain C."""
    flags = c_library._processor_flags() if request.param == "processor" else ()
    return compile_product(tmp_path_factory.mktemp("product"), flags)


def compile_product(folder: Path, processor_flags: Sequence[str]) -> Multiply:
    compiler = c_library._find_compiler()
    if compiler is None:
        pytest.skip("no C compiler here")
    (folder / "product.c").write_text(PRODUCT)
    flags = [*c_library._FLAGS, *processor_flags]
    command = [compiler, *flags, f"-I{HEADERS}", "-o", "product.so", "product.c", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    call = ctypes.CDLL(str(folder / "product.so")).product
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    call.argtypes = [pointer, pointer, number, number, number, number, pointer]

    def multiply(x_ri: torch.Tensor, weight_oi: torch.Tensor, *, is_fixed: bool = True) -> torch.Tensor:
        (rows, inputs), outputs = x_ri.shape, len(weight_oi)
        y_ro = torch.zeros(rows, outputs)
        call(x_ri.data_ptr(), weight_oi.data_ptr(), rows, inputs, outputs, is_fixed, y_ro.data_ptr())
        return y_ro

    return multiply


def with_outliers(*shape: int, seed: int) -> torch.Tensor:
    """Random numbers with a few large ones, like a model's activations."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * (1 + 30 * (torch.rand(shape, generator=generator) < 0.01))


@pytest.mark.parametrize("inputs", [1, 24, SPAN, SPAN + 16, 576, 1000, 1536])
def test_products_are_close_and_each_row_alone_is_the_same(product, inputs: int) -> None:
    for rows, outputs in ((1, 16), (7, 40), (64, 23)):
        x_ri, weight_oi = with_outliers(rows, inputs, seed=inputs), with_outliers(outputs, inputs, seed=rows)
        expected = x_ri.double() @ weight_oi.double().T
        found = product(x_ri, weight_oi)
        size = x_ri.double().norm(dim=1, keepdim=True) * weight_oi.double().norm(dim=1)
        assert ((found - expected).abs() / size).max() < 1e-4, "bfloat16 would be 4e-3 off"
        assert (product(x_ri, weight_oi, is_fixed=False) - expected).abs().max() < 1e-4 * expected.abs().max()
        for row in range(rows):
            assert torch.equal(product(x_ri[row : row + 1].contiguous(), weight_oi)[0], found[row])


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_largest_sums_there_can_be_do_not_overflow(product, scale: float) -> None:
    """A vector times itself fills its norm's bound; one number alone fills 16 bits; alternating signs do both ways."""
    signs = torch.ones(2 * SPAN)
    signs[::2] = -1
    peak = torch.zeros(2 * SPAN)
    peak[5] = 1
    spread = torch.randn(2 * SPAN, generator=torch.Generator().manual_seed(1))
    rows = torch.stack([torch.ones(2 * SPAN), signs, peak, -peak, spread, spread.abs()]) * scale
    expected = rows.double() @ rows.double().T
    found = product(rows, rows)
    assert ((found - expected).abs() / expected.diagonal().max()).max() < 4e-4
    assert (found.diagonal() > 0).all()


def test_what_is_not_finite_stays_so_and_zero_stays_zero(product) -> None:
    x_ri, weight_oi = torch.randn(4, 400), torch.randn(16, 400)
    x_ri[0, 7], x_ri[1, 300], x_ri[2] = float("nan"), float("inf"), 0
    weight_oi[3, 9] = float("nan")
    found = product(x_ri, weight_oi)
    assert found[:2].isnan().all()
    assert found[2:, 3].isnan().all()
    kept = [output for output in range(16) if output != 3]
    assert (found[2, kept] == 0).all()
    assert found[3, kept].isfinite().all()


@needs_compiler
def test_logprobs_are_far_closer_than_in_bfloat16() -> None:
    model, _ = load_model(knights_tiny_path())
    requests = make_requests(8, budget=30)
    gaps = {}
    for dtype in (torch.int16, torch.bfloat16):
        engine = LocalEngine(model, slots=8, max_length=128, dtype=dtype)
        answers = Caller(engine).serve(requests)
        gaps[dtype] = logprob_gaps(model, requests, answers)
        assert engine.stats().extra["dtype"] == str(dtype).removeprefix("torch.")
    fixed, half = (sum(found) / len(found) for found in gaps.values())
    assert 1e-7 < fixed < min(half / 10, 2e-3)


@needs_compiler
@pytest.mark.parametrize("kind", ["llama-gqa", "qwen2", "qwen3"])
def test_prefill_equals_decoding_to_the_last_bit_with_any_number_of_threads(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_decoder, "_MIN_THREADED_WORK", 0)
    model = tiny_model(kind, intermediate_size=208)  # more than a span
    tokens_t = torch.randint(23, (100,), generator=torch.Generator().manual_seed(0))
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        cache, decoder = make_decoder(model, "native", slots=3, max_length=104, dtype=torch.int16)
        with torch.inference_mode():
            whole = cache.plan_prefill([1], [100])
            found.append(decoder.forward(tokens_t, whole.positions_t, None, whole))
            for position in range(100):
                step = cache.plan_decode([position + 1] * 3)
                others_t = torch.tensor([int(tokens_t[position]), (position * 7) % 23, int(tokens_t[position])])
                one = decoder.forward(others_t, step.positions_t, None, step)
                assert torch.equal(one[0], found[-1][position])
                assert torch.equal(one[2], found[-1][position])
    assert torch.equal(*found)
    with torch.inference_mode():
        gap = (found[0].log_softmax(-1) - model(tokens_t[None]).logits[0].log_softmax(-1)).abs()
    assert 1e-7 < gap.mean() < 5e-3


@needs_compiler
def test_replay_equals_restart_after_a_publication() -> None:
    assert make_caller(tiny_model(), dtype=torch.int16).engine.capabilities.exact_replay
    check_replay_equals_restart(dtype=torch.int16)


@needs_wide_vectors
@pytest.mark.parametrize("is_fixed", [False, True])
def test_wide_vectors_give_the_same_sums_to_the_last_bit(tmp_path: Path, is_fixed: bool) -> None:
    """Every number of rows up to two tiles and one more, so that every tile size occurs."""
    flags = c_library._processor_flags()
    for name in ("wide", "narrow"):
        (tmp_path / name).mkdir()
    wide = compile_product(tmp_path / "wide", flags)
    narrow = compile_product(tmp_path / "narrow", (*flags, "-DNO_WIDE_VECTORS"))
    for rows in range(1, 18):
        for inputs, outputs in ((16, 16), (576, 40), (1000, 23)):
            x_ri, weight_oi = with_outliers(rows, inputs, seed=rows), with_outliers(outputs, inputs, seed=outputs)
            found, expected = (multiply(x_ri, weight_oi, is_fixed=is_fixed) for multiply in (wide, narrow))
            assert torch.equal(found, expected)
            assert found.abs().min() > 0


@needs_wide_vectors
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_a_model_on_wide_vectors_writes_the_same_answers_to_the_last_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1, 5, 12 and 17 answers at once; the log-probs too. So a run may move to a processor without AVX-512."""
    model = tiny_model("llama-gqa", intermediate_size=208)
    flags = c_library._processor_flags()

    def answers() -> list[tuple[list[int], list[float]]]:
        kernel.load_kernel.cache_clear()
        served = [serve(model, make_requests(slots, budget=20), slots=slots, dtype=dtype) for slots in (1, 5, 12, 17)]
        return [(answer.tokens, answer.logprobs) for answers in served for answer in answers.values()]

    try:
        wide = answers()
        assert kernel.has_wide_kernel()
        monkeypatch.setattr(c_library, "_processor_flags", lambda: (*flags, "-DNO_WIDE_VECTORS"))
        assert answers() == wide
        assert not kernel.has_wide_kernel()
    finally:
        kernel.load_kernel.cache_clear()


@needs_compiler
def test_auto_chooses_int16_where_the_kernel_has_wide_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """AVX-512 with VNNI: int16 is as fast as bfloat16, and exact. AMX multiplies bfloat16 faster, which is not."""
    model = tiny_model()
    monkeypatch.setattr(decoder_choice, "_MIN_16_BIT_PARAMETERS", 1)
    monkeypatch.setattr(decoder_choice, "has_fast_bfloat16", lambda device: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    for is_wide, has_amx, is_exact, expected in (
        (True, False, False, torch.int16),
        (True, False, True, torch.int16),
        (True, True, False, torch.bfloat16),
        (True, True, True, torch.int16),
        (False, False, False, torch.bfloat16),
        (False, False, True, torch.float32),
    ):
        monkeypatch.setattr(native_decoder, "has_wide_kernel", lambda is_wide=is_wide: is_wide)
        monkeypatch.setattr(decoder_choice, "has_matrix_unit", lambda device, has_amx=has_amx: has_amx)
        assert choose_dtype(model, "auto", needs_exact_replay=is_exact) == expected


@needs_compiler
def test_auto_chooses_int16_for_large_models_on_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    monkeypatch.setattr(decoder_choice, "has_fast_bfloat16", lambda device: False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert choose_dtype(model, "auto", needs_exact_replay=False) == torch.float32
    monkeypatch.setattr(decoder_choice, "_MIN_16_BIT_PARAMETERS", 1)
    for is_exact in (False, True):
        assert choose_dtype(model, "auto", needs_exact_replay=is_exact) == torch.int16
    assert choose_dtype(model, "auto", needs_exact_replay=False, is_this_machine=False) == torch.float32
    assert choose_dtype(tiny_model("gpt-neox"), "auto", needs_exact_replay=False) == torch.float32
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(native_decoder, "has_wide_kernel", lambda: False)
    assert choose_dtype(model, "auto", needs_exact_replay=False) == torch.float32
    assert make_decoder(model, "auto", slots=1, max_length=16, dtype=torch.int16)[1].name == "native"  # if asked for


def test_unsupported_int16_is_refused() -> None:
    with pytest.raises(ModelError, match=r"set engine\.dtype = auto"):
        LocalEngine(tiny_model("gpt-neox"), slots=1, max_length=32, dtype=torch.int16)
    with pytest.raises(ConfigError, match="for vllm set auto"):
        SortedConfig(engine={"kind": "vllm", "dtype": "int16"})


@needs_compiler
def test_a_configuration_with_replay_may_use_int16() -> None:
    config = SortedConfig(engine={"dtype": "int16", "max_new_tokens": 64}, schedule={"strategy": "sorted-replay"})
    engine = build_engine(config, tiny_model(max_position_embeddings=2048), config.knobs)
    assert engine.stats().extra["dtype"] == "int16"
    engine.close()
