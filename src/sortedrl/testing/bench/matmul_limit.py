"""The speed of a decoder that computes nothing but its matrix products: an upper limit for `bench engine`.

`engine.py` measures it in the same rounds as the engines. The products are those of the head and of a Llama layer with
fused q, k, v and fused gate, up. They have one row per slot, and use the faster of the two layouts in
`engine/local/linear.py`. Weights are random and, like a model's, too large for the processor's cache.
"""

from __future__ import annotations

import time

import torch

from sortedrl.engine.local.linear import Linear, PackedLinear, PlainLinear, can_pack
from sortedrl.engine.local.module_decoder import Geometry
from sortedrl.testing.bench.contenders import RoundTiming, SamplingJob

_CACHE_ELEMENTS = 16 << 20
_TRIES = 3


class MatmulLimit:
    def __init__(self, job: SamplingJob) -> None:
        config, geometry = job.model.config, Geometry.of(job.model)
        size, inner = config.hidden_size, config.intermediate_size
        heads, kv_heads = geometry.heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim
        shapes = [(size, heads + 2 * kv_heads), (heads, size), (size, 2 * inner), (inner, size)]
        self._rows, self._new_tokens = len(job.prompts), job.new_tokens
        self._is_packed = can_pack(torch.device("cpu"), job.peer_dtype)
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(job.peer_dtype)

        per_layer = sum(inputs * outputs for inputs, outputs in shapes)
        num_kept = min(geometry.num_layers, _CACHE_ELEMENTS // per_layer + 1)
        groups = [*((shape, num_kept, geometry.num_layers) for shape in shapes), ((size, geometry.vocab), 1, 1)]
        self._groups: list[tuple[torch.Tensor, list[Linear], float]] = []
        for (inputs, outputs), count, total in groups:
            x = random(self._rows, inputs)
            weights = [random(outputs, inputs) for _ in range(count)]
            self._groups.append((x, self._faster(x, weights), total / count))

    def _faster(self, x: torch.Tensor, weights: list[torch.Tensor]) -> list[Linear]:
        plain: list[Linear] = [PlainLinear(weight, None) for weight in weights]
        if not self._is_packed:
            return plain
        packed: list[Linear] = [PackedLinear(weight, None) for weight in weights]
        return min(plain, packed, key=lambda linears: min(_seconds(x, linears)[1] for _ in range(_TRIES)))

    def run(self) -> RoundTiming:
        """The time of one step, multiplied by the number of new tokens."""
        wall_s = cpu_s = 0.0
        for x, linears, times in self._groups:
            tries = [_seconds(x, linears) for _ in range(_TRIES)]
            wall_s += times * min(wall for wall, _ in tries)
            cpu_s += times * min(cpu for _, cpu in tries)
        steps = self._new_tokens
        return RoundTiming(tokens=self._rows * steps, wall_s=wall_s * steps, cpu_s=cpu_s * steps)


@torch.inference_mode()
def _seconds(x: torch.Tensor, linears: list[Linear]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    for linear in linears:
        linear(x)
    return time.perf_counter() - wall, time.process_time() - cpu
