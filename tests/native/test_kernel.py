"""The compiled kernel: compilation and caching, the fallback to torch, and bit-equal results."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest
import torch

from sortedrl.engine.base import Sampling
from sortedrl.engine.local import native_decoder
from sortedrl.engine.local.decoder_choice import make_decoder
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.errors import ModelError
from sortedrl.native import kernel
from tests.support.tiny_models import Caller, make_requests, needs_compiler, serve, tiny_model, tokens_of


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A cache folder of the test, in a process that has not loaded the kernel yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kernel.load_kernel.cache_clear()
    yield tmp_path / "cache" / "sortedrl"
    kernel.load_kernel.cache_clear()


@needs_compiler
def test_the_kernel_is_compiled_once_and_cached(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel.load_kernel() is not None
    (library,) = empty_cache.iterdir()
    assert (library.stat().st_mode & 0o777, empty_cache.stat().st_mode & 0o777) == (0o700, 0o700)
    kernel.load_kernel.cache_clear()
    monkeypatch.setattr(subprocess, "run", None)  # compiling again would fail
    assert kernel.load_kernel() is not None


@needs_compiler
def test_a_cached_kernel_that_others_can_write_is_not_loaded(empty_cache: Path) -> None:
    assert kernel.load_kernel() is not None
    (library,) = empty_cache.iterdir()
    written = library.stat().st_ino
    library.chmod(0o720)
    kernel.load_kernel.cache_clear()
    assert kernel.load_kernel() is not None
    (library,) = empty_cache.iterdir()
    assert library.stat().st_ino != written
    assert library.stat().st_mode & 0o777 == 0o700


def test_without_a_compiler_the_engine_runs_on_torch(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CC", "no-such-compiler")
    model, requests = tiny_model(), make_requests(3)
    engine = LocalEngine(model, slots=3, max_length=64)
    assert engine.stats().extra["path"] == "lean"
    assert "no C compiler found" in caplog.text
    answers = Caller(engine).serve(requests)
    own = serve(model, requests, path="module")
    assert tokens_of(answers) == tokens_of(own)
    with pytest.raises(ModelError, match="a C compiler"):
        LocalEngine(model, slots=3, max_length=64, path="native")


def test_a_failing_compiler_is_logged(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "false")
    assert kernel.load_kernel() is None
    assert "could not be compiled" in caplog.text
    assert list(empty_cache.iterdir()) == []


@needs_compiler
def test_which_models_run_on_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def decoder_of(model, dtype=torch.float32) -> str:
        return make_decoder(model, "auto", slots=1, max_length=16, dtype=dtype)[1].name

    assert decoder_of(tiny_model("llama")) == "native"
    assert decoder_of(tiny_model("llama"), torch.bfloat16) == "lean"
    assert decoder_of(tiny_model("llama", num_attention_heads=8, num_key_value_heads=8)) == "lean"  # heads of 4
    assert decoder_of(tiny_model("gpt-neox")) == "module"
    large = tiny_model("llama", vocab_size=70_000)  # 2.2 million parameters
    monkeypatch.setattr(native_decoder, "has_wide_kernel", lambda: False)
    for capability, expected in (("AVX2", "native"), ("AVX512", "lean"), ("DEFAULT", "lean")):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        assert decoder_of(large) == expected
    monkeypatch.setattr(native_decoder, "has_wide_kernel", lambda: True)  # AVX-512 with VNNI
    assert decoder_of(large) == "native"


@needs_compiler
@pytest.mark.parametrize("sharing", [1, 2, 4])  # query heads per key head: 4, 2 or 1 tokens attend together
def test_prefill_equals_decoding_to_the_last_bit(sharing: int) -> None:
    """40 tokens at once, as part of a pack of several sequences, after such a pack, and one by one."""
    model = tiny_model("llama", num_attention_heads=4, num_key_value_heads=4 // sharing)
    tokens_t = torch.randint(23, (40,), generator=torch.Generator().manual_seed(0))
    cache, decoder = make_decoder(model, "native", slots=3, max_length=40, dtype=torch.float32)
    with torch.inference_mode():
        whole = cache.plan_prefill([1], [40])
        expected = decoder.forward(tokens_t, whole.positions_t, None, whole)
        for position in range(40):
            step = cache.plan_decode([position + 1] * 3)
            others_t = torch.tensor([int(tokens_t[position]), (position * 7) % 23, int(tokens_t[position])])
            found = decoder.forward(others_t, step.positions_t, None, step)
            assert torch.equal(found[0], expected[position])
            assert torch.equal(found[2], expected[position])
        several = cache.plan_prefill([0, 1, 2], [11, 20, 40])
        packed_t = torch.cat([tokens_t[:11], tokens_t[:20], tokens_t])
        rows_r = torch.tensor([0, 10, 11, 30, 31, 50, 70])
        found = decoder.forward(packed_t, several.positions_t, rows_r, several)
        assert torch.equal(found, expected[torch.tensor([0, 10, 0, 19, 0, 19, 39])])
        step = cache.plan_decode([12, 21, 40])  # over keys and values of tokens whose logits were not wanted
        found = decoder.forward(tokens_t[step.positions_t], step.positions_t, None, step)
        assert torch.equal(found, expected[torch.tensor([11, 20, 39])])


@needs_compiler
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (3, 1), (4, 1), (6, 1)])  # 1 to 6 query heads share a key head
def test_threads_do_not_change_results(monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int]) -> None:
    """A prefill of two chunks and steps of 1 to 9 slots: one thread, three threads and the model's modules agree."""
    model = tiny_model("llama", num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=24, hidden_size=48)
    tokens_t = torch.randint(23, (120,), generator=torch.Generator().manual_seed(0))
    rows_r = torch.tensor([0, 7, 95, 96, 119])

    def logits(num_threads: int) -> list[torch.Tensor]:
        monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
        cache, decoder = make_decoder(model, "native", slots=9, max_length=128, dtype=torch.float32)
        whole = cache.plan_prefill([8], [120])
        found = [decoder.forward(tokens_t, whole.positions_t, rows_r, whole)]
        for slots in range(1, 10):
            step = cache.plan_decode([1] * slots)
            found.append(decoder.forward(tokens_t[:slots], step.positions_t, None, step))
        return found

    monkeypatch.setattr(native_decoder, "_MIN_THREADED_WORK", 0)
    with torch.inference_mode():
        alone, together = logits(1), logits(3)
        assert all(torch.equal(one, three) for one, three in zip(alone, together, strict=True))
        own = model(tokens_t[None]).logits[0, rows_r]
        torch.testing.assert_close(alone[0], own, rtol=0, atol=1e-4)


@needs_compiler
def test_an_interrupted_call_leaves_no_thread_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_decoder, "_MIN_THREADED_WORK", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    cache, decoder = make_decoder(tiny_model(), "native", slots=2, max_length=16, dtype=torch.float32)
    assert isinstance(decoder, native_decoder.NativeDecoder)
    tokens_t, step = torch.tensor([1, 2]), cache.plan_decode([1, 1])
    expected = decoder.forward(tokens_t, step.positions_t, None, step)
    pool, started = decoder._threads._others, []
    submit = pool.submit

    def interrupted(*arguments):
        started.append(submit(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.forward(tokens_t, step.positions_t, None, step)
    assert started[0].done()
    assert torch.equal(decoder.forward(tokens_t, step.positions_t, None, step), expected)


@needs_compiler
def test_long_greedy_answers_equal_those_of_the_model() -> None:
    """Answers that span several blocks of keys and chunks of tokens."""
    model = tiny_model("llama")
    requests = make_requests(5, budget=90, sampling=Sampling(temperature=0.0))
    found, own = (serve(model, requests, slots=5, path=path) for path in ("native", "module"))
    assert tokens_of(found) == tokens_of(own)
