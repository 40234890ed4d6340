"""The Triton kernel that verifies cached tokens, in Triton's interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sortedrl.engine.sampling.noise import KERNEL_MARGIN, gumbel
from sortedrl.engine.vllm.verify_rows import CachedRows, VerifiedRows, verify_rows_with_torch
from tests.engine.vllm.test_verify_rows import make_rows
from tests.support.interpreted_vllm import MARKS

pytestmark = MARKS
NUM_SHAPES = 200
TYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGEST = 152_064  # the vocabulary of Qwen2.5


def on_triton(rows: CachedRows) -> VerifiedRows:
    from sortedrl.engine.vllm.verify_kernel import verify_rows_with_triton

    return verify_rows_with_triton(rows)


def check_same(rows: CachedRows, found: VerifiedRows, expected: VerifiedRows) -> None:
    """Tokens are equal unless the two scores are a tie within the margin of vLLM's noise; log-probs are close."""
    scaled_rv = rows.logits_rv.float() / torch.where(rows.temperatures_r > 0, rows.temperatures_r, 1.0).unsqueeze(1)
    for row in (found.tokens_r2 != expected.tokens_r2).any(1).nonzero().flatten().tolist():
        noise_v = gumbel(rows.seeds_r[row : row + 1], rows.positions_r[row : row + 1], scaled_rv.shape[1])[0]
        ours, theirs = (scaled_rv[row] + noise_v)[[int(expected.tokens_r2[row, 1]), int(found.tokens_r2[row, 1])]]
        assert abs(float(ours - theirs)) <= KERNEL_MARGIN + float(rows.tolerances_r[row] > 0) * 1e-5
    same = (found.tokens_r2 == expected.tokens_r2).all(1)
    assert torch.allclose(found.logprobs_r2[same], expected.logprobs_r2[same], atol=3e-5, rtol=1e-5)


def test_200_random_shapes_agree_with_the_reference() -> None:
    rng, num_kept, num_rows = random.Random(0), 0, 0
    for number in range(NUM_SHAPES):
        is_large = number % 40 == 39  # the interpreter takes a second for such a row
        vocab = rng.choice([LARGEST, 128_256, 151_936]) if is_large else int(2 ** rng.uniform(1, 13))
        rows, _ = make_rows(
            1 if is_large else rng.randint(1, 6), vocab, seed=number, tolerance=rng.choice([0.0, 0.0, 0.5])
        )
        rows = replace(rows, logits_rv=rows.logits_rv.to(rng.choice(TYPES)))
        found, expected = on_triton(rows), verify_rows_with_torch(rows)
        check_same(rows, found, expected)
        num_kept += int((found.tokens_r2[:, 0] == found.tokens_r2[:, 1]).sum())
        num_rows += len(found.tokens_r2)
    assert 0.2 < num_kept / num_rows < 0.8, "both verdicts must occur"


def test_filtered_logits_and_rows_of_a_larger_tensor() -> None:
    """Whole blocks may be filtered, and the rows of a padded vocabulary are not contiguous."""
    rows, _ = make_rows(6, 9000)
    padded_rv = torch.full((6, 9100), 7.0)
    padded_rv[:, :9000] = rows.logits_rv
    padded_rv[:3, :8500] = -torch.inf
    padded_rv[3:, 100:9000] = -torch.inf
    filtered = replace(rows, logits_rv=padded_rv[:, :9000], is_shaped=True, temperatures_r=torch.ones(6))
    found, expected = on_triton(filtered), verify_rows_with_torch(filtered)
    assert torch.equal(found.tokens_r2, expected.tokens_r2)
    assert torch.allclose(found.logprobs_r2, expected.logprobs_r2, atol=1e-5)


def test_nan_logits_give_nan_logprobs() -> None:
    rows, _ = make_rows(2, 100)
    broken_rv = rows.logits_rv.clone()
    broken_rv[0, 50] = torch.nan
    found = on_triton(replace(rows, logits_rv=broken_rv))
    assert found.logprobs_r2[0].isnan().all()
    assert found.logprobs_r2[1].isfinite().all()


@contextmanager
def counted_traffic() -> Iterator[dict[str, int]]:
    """Counts the bytes that kernels load and store in the interpreter; lanes that are masked out do not count."""
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    load, store, moved = builder.create_masked_load, builder.create_masked_store, {"loaded": 0, "stored": 0}

    def count_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        found = load(self, ptrs, mask, *rest)
        moved["loaded"] += int(mask.data.sum()) * found.data.dtype.itemsize
        return found

    def count_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        moved["stored"] += int(mask.data.sum()) * value.data.dtype.itemsize
        return store(self, ptrs, value, mask, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", count_load)
        patch.setattr(builder, "create_masked_store", count_store)
        yield moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_moves_little_more_than_one_read_of_its_logits(dtype: torch.dtype) -> None:
    from sortedrl.engine.vllm.verify_kernel import bytes_per_row

    rows, _ = make_rows(3, 20_000)
    rows = replace(rows, logits_rv=rows.logits_rv.to(dtype))
    with counted_traffic() as moved:
        on_triton(rows)
    per_row = (moved["loaded"] + moved["stored"]) / 3
    assert per_row == bytes_per_row(20_000, dtype.itemsize)
    assert per_row <= 1.3 * 20_000 * dtype.itemsize
    for vocab in (1_000, 32_000, 128_256, LARGEST):
        assert bytes_per_row(vocab, dtype.itemsize) <= 1.3 * vocab * dtype.itemsize


COMPILE = Path(__file__).parents[3] / "tools" / "compile_kernels.py"


def test_the_kernel_compiles_for_gpus() -> None:
    """Triton's compiler needs no GPU: Ampere, Hopper and Blackwell, in the types of logits."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run([sys.executable, COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiled") == 9, done.stdout
