"""The native decoder for the Llama family: compiled code, in which each thread runs a forward pass in one call.

`decoder_choice.py` selects it on a CPU with a C compiler, for models that `LeanDecoder` can run. `kernel.c` computes;
this module lays out the weights for it and passes it the cache, the tokens' positions and the threads.
Guarantees: log-probs equal those of the lean decoder up to rounding, which is coarser with int16 (fixed point) weights.
A token's log-prob is the same to the last bit whether it is decoded or prefilled, alone or in a batch, by one thread or
by several.

Shapes: t packed tokens, r rows whose logits are wanted, i inputs, o outputs, v vocabulary, s slots, l positions,
m model size.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from sortedrl.engine.local.cache import SlotCache
from sortedrl.engine.local.lean_decoder import norm_gain, rotary_factors, supports_lean
from sortedrl.engine.sampling.noise import runs_of_numbers
from sortedrl.native.huge_pages import zeros_in_huge_pages
from sortedrl.native.kernel import MAX_THREADS, KernelLayer, KernelModel, ThreadGroup, has_wide_kernel, load_kernel
from sortedrl.native.threads import KernelThreads

# In float32 on a processor that the kernel is not written for, it is faster than torch only for models of this size.
_MAX_PARAMETERS = 2_000_000
_MIN_THREADED_WORK = 100_000_000  # parameters times tokens; a smaller call takes less time than waking threads
_BLOCK = 8  # positions whose keys are stored together
_PANEL = 16  # outputs whose weights are stored together
_PER_LAYER = 5  # weight matrices
_KEPT_LOGITS = range(2**19, 2**26)  # numbers of logits whose memory is kept from call to call: 2 to 256 MiB


@dataclass(slots=True, kw_only=True)
class KernelPlan:
    """Slots and positions of tokens, for a prefill or for any number of decode steps; needs no preparation."""

    slots_t: torch.Tensor
    positions_t: torch.Tensor
    num_early: int = sys.maxsize  # tokens from here on start at the first layer that may change (`keep_hidden`)
    num_steps: int = sys.maxsize
    group_sizes: Sequence[int] = ()

    def advance(self) -> None:
        """Move every slot to its next position."""
        self.positions_t += 1


class BlockCache(SlotCache):
    """A cache in the kernel's layout: keys of a head as [positions / 8, d, 8]. `max_length` is whole blocks.

    `hidden_slm` has the hidden states before one of the layers, if the decoder keeps them.
    """

    hidden_slm = torch.empty(0, 0, 0)

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        super().copy(source, targets, whole_blocks(length))
        for target in targets if self.hidden_slm.numel() else ():
            self.hidden_slm[target, :length].copy_(self.hidden_slm[source, :length])

    def plan_prefill(self, slots: Sequence[int], lengths: Sequence[int]) -> KernelPlan:
        slots_t = torch.from_numpy(np.array(slots, dtype=np.int64).repeat(lengths))
        return KernelPlan(slots_t=slots_t, positions_t=torch.from_numpy(runs_of_numbers([0] * len(lengths), lengths)))

    def plan_decode(self, lengths: Sequence[int], group_sizes: Sequence[int] | None = None) -> KernelPlan:
        return KernelPlan(slots_t=torch.arange(len(lengths)), positions_t=torch.tensor(lengths) - 1)


class NativeDecoder:
    name = "native"

    def __init__(self, model: nn.Module, cache: BlockCache, dtype: torch.dtype = torch.float32) -> None:
        assert supports_native(model, dtype), f"{type(model).__name__} cannot run on the native decoder"
        kernel = load_kernel()
        assert kernel is not None, "the native decoder needs the compiled kernel"
        self._kernel, self._cache = kernel, cache
        root: Any = model
        config, attention = root.config, root.model.layers[0].self_attn
        rotations_lc = rotary_factors(root.model.rotary_emb, cache.max_length, torch.device("cpu"))
        # The kernel holds plain addresses: these references keep the tensors alive.
        self._tensors = [cache.store, rotations_lc.real.contiguous(), rotations_lc.imag.contiguous()]
        self._model = KernelModel(
            num_layers=cache.num_layers,
            size=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=cache.kv_heads,
            head_dim=cache.head_dim,
            vocab=config.vocab_size,
            slots=cache.slots,
            positions=cache.max_length,
            is_fixed=dtype == torch.int16,
            floor=config.hidden_size * config.rms_norm_eps,
            head_floor=cache.head_dim * config.rms_norm_eps,
            scale=attention.scaling,
            cache=self._tensors[0].data_ptr(),
            cosines=self._tensors[1].data_ptr(),
            sines=self._tensors[2].data_ptr(),
        )
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._threads, self._thread_group = KernelThreads(), ThreadGroup()
        self._logits = torch.empty(0)
        self._memory = torch.zeros(kernel.sortedrl_memory(self._model, self._threads.max_size))
        self._allocate_weights(root)
        self.refresh(model)

    @torch.inference_mode()
    def refresh(self, module: nn.Module) -> int:
        """Overwrite the weights with the module's current ones; returns how many first layers had the same before."""
        root: Any = module
        embedding_vm = root.model.embed_tokens.weight.float()
        is_changed = [not torch.equal(self._embedding_vm, embedding_vm)]  # the embedding, then layer by layer
        self._embedding_vm.copy_(embedding_vm)
        for (weight_oi, norm), target in zip(_matrices(root), self._panels, strict=True):
            gain_i = None if norm is None else norm_gain(norm).float()
            has_changed = self._kernel.sortedrl_panels(
                weight_oi.data_ptr(),
                None if gain_i is None else gain_i.data_ptr(),
                *weight_oi.shape,
                self._model.is_fixed,
                target.data_ptr(),
            )
            is_changed.append(bool(has_changed))
        first = max(is_changed.index(True) - 1, 0) // _PER_LAYER if any(is_changed) else len(self._vectors)
        for number, (layer, vectors) in enumerate(zip(root.model.layers, self._vectors, strict=True)):
            for name, vector in _vectors(layer).items():
                if not torch.equal(vectors[name], vector.float()):
                    vectors[name].copy_(vector)
                    first = min(first, number)
        return first

    def keep_hidden(self, first_late: int) -> None:
        """Keep the hidden states before layer `first_late` of all tokens from now on; 0 keeps none."""
        cache = self._cache
        shape = (cache.slots, cache.max_length, self._model.size) if first_late else (0, 0, 0)
        if cache.hidden_slm.shape != shape:
            cache.hidden_slm = torch.zeros(shape)
        self._model.hidden = cache.hidden_slm.data_ptr() if first_late else None
        self._model.first_late = first_late

    def _allocate_weights(self, root: Any) -> None:
        """Allocate memory for the weights in the order in which a pass reads them, and tell the kernel where."""
        shapes = [weight_oi.shape for weight_oi, _ in _matrices(root)]
        sizes = [
            -(-outputs // _PANEL) * self._kernel.sortedrl_panel_size(inputs, self._model.is_fixed)
            for outputs, inputs in shapes
        ]
        self._panels = zeros_in_huge_pages(sum(sizes), dtype=torch.float32, device=torch.device("cpu")).split(sizes)
        self._embedding_vm = torch.empty(root.model.embed_tokens.weight.shape)
        self._vectors = [
            {name: torch.empty(v.shape) for name, v in _vectors(layer).items()} for layer in root.model.layers
        ]
        addresses = [panel.data_ptr() for panel in self._panels]
        self._layers = (KernelLayer * len(self._vectors))()
        for number, vectors in enumerate(self._vectors):
            qkv, out, gate_up, _, down = addresses[_PER_LAYER * number : _PER_LAYER * (number + 1)]
            named = {name: vector.data_ptr() for name, vector in vectors.items()}
            self._layers[number] = KernelLayer(qkv=qkv, out=out, gate_up=gate_up, down=down, **named)
        self._model.layers = ctypes.addressof(self._layers)
        self._model.embedding, self._model.head = self._embedding_vm.data_ptr(), addresses[-1]

    def forward(
        self, tokens_t: torch.Tensor, positions_t: torch.Tensor, rows_r: torch.Tensor | None, plan: KernelPlan
    ) -> torch.Tensor:
        """Logits [r, v] in float32 at the given rows, or at all; the next call may overwrite them."""
        num_rows = len(tokens_t) if rows_r is None else len(rows_r)
        logits_rv = self._room_for(num_rows)
        # The kernel reads a null address as "all rows", and an empty tensor has one.
        wanted_r = torch.zeros(1, dtype=torch.int64) if rows_r is not None and not num_rows else rows_r
        is_large = len(tokens_t) * self._num_parameters >= _MIN_THREADED_WORK
        size = min(self._threads.size(is_large=is_large), MAX_THREADS)
        group = self._thread_group

        def run(rank: int) -> None:
            self._kernel.sortedrl_forward(
                self._model,
                self._memory.data_ptr(),
                *(group, rank, size),
                *(len(tokens_t), min(plan.num_early, len(tokens_t))),
                *(tokens_t.data_ptr(), plan.slots_t.data_ptr(), positions_t.data_ptr()),
                *(num_rows, None if wanted_r is None else wanted_r.data_ptr(), logits_rv.data_ptr()),
            )

        self._threads.run(run, size, self._abandon_group)
        return logits_rv

    def _room_for(self, num_rows: int) -> torch.Tensor:
        """Memory for the logits of one call. Fresh memory of megabytes would cost a page fault for every 4 KiB."""
        num = num_rows * self._model.vocab
        if num not in _KEPT_LOGITS:
            return torch.empty(num_rows, self._model.vocab)
        if num > len(self._logits):
            self._logits = zeros_in_huge_pages(num, dtype=torch.float32, device=torch.device("cpu"))
        return self._logits[:num].view(num_rows, self._model.vocab)

    def _abandon_group(self) -> None:
        """Release the threads of an interrupted call, which wait for a thread that will not come."""
        self._thread_group.is_abandoned = 1
        self._thread_group = ThreadGroup()


def supports_native(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether the kernel is available, can run the model, and is faster than the lean decoder in float32."""
    if dtype not in (torch.float32, torch.int16) or not supports_lean(model):
        return False
    root: Any = model
    parameters = list(model.parameters())
    is_small = sum(parameter.numel() for parameter in parameters) <= _MAX_PARAMETERS
    return (
        all(parameter.is_cpu for parameter in parameters)
        and (is_small or dtype == torch.int16 or has_fast_int16())
        and root.model.layers[0].self_attn.head_dim % _BLOCK == 0
        and load_kernel() is not None
    )


def has_fast_int16() -> bool:
    """Whether the kernel is written for this processor: AVX2 alone, or AVX-512 with VNNI.

    With AVX-512 alone, torch has twice the vectors and the kernel has not.
    """
    return torch.backends.cpu.get_cpu_capability() == "AVX2" or has_wide_kernel()


def whole_blocks(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK


def _matrices(root: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """Weight matrices in the order in which a pass reads them (five per layer, then the head), each with the norm
    before it."""
    for layer in root.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        yield torch.cat([linear.weight.detach().float() for linear in projections]), layer.input_layernorm
        yield attention.o_proj.weight.detach().float().contiguous(), None
        yield mlp.gate_proj.weight.detach().float().contiguous(), layer.post_attention_layernorm
        yield mlp.up_proj.weight.detach().float().contiguous(), layer.post_attention_layernorm
        yield mlp.down_proj.weight.detach().float().contiguous(), None
    yield root.lm_head.weight.detach().float().contiguous(), root.model.norm


def _vectors(layer: Any) -> dict[str, torch.Tensor]:
    """The biases and gains that a layer has, by the names of the kernel's fields."""
    attention = layer.self_attn
    vectors = {}
    if attention.q_proj.bias is not None:
        bias_o = torch.cat([linear.bias for linear in (attention.q_proj, attention.k_proj, attention.v_proj)])
        vectors["qkv_bias"] = nn.functional.pad(bias_o, (0, -len(bias_o) % _PANEL))
    if hasattr(attention, "q_norm"):
        vectors["q_gain"], vectors["k_gain"] = norm_gain(attention.q_norm), norm_gain(attention.k_norm)
    return vectors
