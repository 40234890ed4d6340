"""The speed of a decoder that computes nothing but its matrix products: an upper limit for `bench engine`.

`engine.py` measures it in the same rounds as the engines. The products are those of Llama layers with fused q, k, v and
fused gate, up, one after the other, and then that of the head. They have one row per slot, and use the faster of the
two layouts in `engine/local/linear.py`. Weights are random. As in a model, each layer has its own, so a pass reads them
from memory: one layer's weights, multiplied again and again, would stay in the processor's cache.
"""

from __future__ import annotations

import time

import torch

from sortedrl.engine.local.linear import Linear, PackedLinear, PlainLinear, can_pack
from sortedrl.engine.local.module_decoder import Geometry
from sortedrl.testing.bench.contenders import RoundTiming, SamplingJob

_MOST_ELEMENTS = 128 << 20  # of all kept layers; more layers of a larger model take as long as these
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
        num_kept = min(geometry.num_layers, _MOST_ELEMENTS // per_layer + 1)
        inputs_by_shape = [random(self._rows, inputs) for inputs, _ in shapes]
        linears_by_shape = [
            self._faster(x, [random(outputs, inputs) for _ in range(num_kept)])
            for x, (inputs, outputs) in zip(inputs_by_shape, shapes, strict=True)
        ]
        self._layers = [
            list(zip(inputs_by_shape, linears, strict=True)) for linears in zip(*linears_by_shape, strict=True)
        ]
        self._layer_times = geometry.num_layers / num_kept
        x = inputs_by_shape[0]
        self._head = [(x, linear) for linear in self._faster(x, [random(geometry.vocab, size)])]

    def _faster(self, x: torch.Tensor, weights: list[torch.Tensor]) -> list[Linear]:
        plain: list[Linear] = [PlainLinear(weight, None) for weight in weights]
        if not self._is_packed:
            return plain
        packed: list[Linear] = [PackedLinear(weight, None) for weight in weights]
        return min(
            plain, packed, key=lambda linears: min(_seconds([(x, y) for y in linears])[0] for _ in range(_TRIES))
        )

    def run(self) -> RoundTiming:
        """The time of one step, multiplied by the number of new tokens."""
        steps = [self._step() for _ in range(_TRIES)]
        wall_s, cpu_s = (min(times) * self._new_tokens for times in zip(*steps, strict=True))
        return RoundTiming(tokens=self._rows * self._new_tokens, wall_s=wall_s, cpu_s=cpu_s)

    def _step(self) -> tuple[float, float]:
        layers = _seconds([product for layer in self._layers for product in layer])
        head = _seconds(self._head)
        wall_s, cpu_s = (times * self._layer_times + once for times, once in zip(layers, head, strict=True))
        return wall_s, cpu_s


@torch.inference_mode()
def _seconds(products: list[tuple[torch.Tensor, Linear]]) -> tuple[float, float]:
    """The wall time and the processor time of these products."""
    wall, cpu = time.perf_counter(), time.process_time()
    for x, linear in products:
        linear(x)
    return time.perf_counter() - wall, time.process_time() - cpu
