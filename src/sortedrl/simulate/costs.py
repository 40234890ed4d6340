"""Cost models of the simulator: the seconds that decoding, prefill, verification, updates and publications take.

`compare.py` and the planner make one with `load_cost`. The model `unit` counts decode steps. The model `roofline` takes
the larger of memory time and arithmetic time. Guarantees: time is additive over steps, and sums over steps are exact
and in closed form. (Within one call the context grows linearly, so the larger of the two changes at most once.)

Simplifications of the roofline: replicas are balanced and run in step; prefill stops decoding; siblings do not share
the prefill of their prompt; training uses the same devices and takes 6 x params x tokens operations; memory for
training is not subtracted from the KV cache.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

from sortedrl.engine.sim.cost import DecodeCost, UnitCost
from sortedrl.errors import ConfigError

LOGIT_BYTES = 4  # engines sample from float32 logits
DRAFT_ROWS = 8  # positions of a sequence that a pass with drafts computes: the next one and those of 7 draft tokens


class CostModel(DecodeCost, Protocol):
    def update_s(self, tokens: int) -> float:
        """Seconds of one update on `tokens` tokens, including prompts."""
        ...


@dataclass(slots=True, kw_only=True, frozen=True)
class Hardware:
    """One accelerator; presets/hardware.toml explains the fields."""

    flops: float
    bandwidth: float
    memory: float
    link_bandwidth: float
    bandwidth_share: float
    decode_flops_share: float
    prefill_flops_share: float
    train_flops_share: float
    memory_share: float
    step_overhead_s: float
    reduce_s: float
    network_bandwidth: float = 25e9  # this and the next are for clusters (cluster_cost.py)
    network_latency_s: float = 20e-6


@dataclass(slots=True, kw_only=True, frozen=True)
class ModelShape:
    params: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    bytes_per_value: float
    hidden: int = 0  # this and the following are only for estimates of memory (run/estimate.py, run/device_memory.py)
    intermediate: int = 0
    vocab: int = 0
    model_type: str = "llama"  # of transformers
    is_tied: bool = False  # the output layer is the embedding

    @property
    def weight_bytes(self) -> float:
        return self.params * self.bytes_per_value

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token: a key and a value per layer and KV head."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_value

    @property
    def attention_flops(self) -> float:
        """Operations of one token that attends to one other: multiply and add, for score and weighted sum."""
        return 4 * self.layers * self.heads * self.head_dim


@dataclass(slots=True, kw_only=True, frozen=True)
class RooflineCost:
    hardware: Hardware
    model: ModelShape
    tensor_parallel: int = 1
    replicas: int = 1
    draft_tokens: float = 1.0  # tokens that a sequence gains by a pass with drafts; 1: no drafts

    @property
    def kv_tokens(self) -> int:
        room = self.hardware.memory * self.hardware.memory_share * self.tensor_parallel - self.model.weight_bytes
        return max(int(room // self.model.kv_bytes), 0) * self.replicas

    def decode_s(self, running: int, context: int, steps: int) -> float:
        """The seconds in which every sequence gains `steps` tokens, with drafts if those make it faster.

        Drafts are used for all of the call or not at all.
        """
        plain_s = self._passes_s(running, context, steps, positions=1)
        if self.draft_tokens == 1:
            return plain_s
        return min(plain_s, self._passes_s(running, context, steps, positions=DRAFT_ROWS) / self.draft_tokens)

    def _passes_s(self, running: int, context: int, steps: int, positions: int) -> float:
        """The seconds of `steps` passes. Pass i has `context + i * running` tokens in the cache.

        Each pass takes the larger of its memory time and its arithmetic time, plus overheads. It computes `positions`
        positions of each sequence and reads the cache once.
        """
        rows, tokens = running / self.replicas, context / self.replicas
        hardware, model = self.hardware, self.model
        speed = hardware.bandwidth * hardware.bandwidth_share * self.tensor_parallel
        flops = hardware.flops * hardware.decode_flops_share * self.tensor_parallel
        memory = ((model.weight_bytes + model.kv_bytes * tokens) / speed, model.kv_bytes * rows / speed)
        arithmetic = (
            positions * (2 * model.params * rows + model.attention_flops * tokens) / flops,
            positions * model.attention_flops * rows / flops,
        )
        return _sum_of_larger(memory, arithmetic, steps) + steps * (hardware.step_overhead_s + self._reduce_s)

    def prefill_s(self, lengths: Iterable[int]) -> float:
        """The arithmetic of all tokens with causal attention, but at least the time to read the weights once."""
        lengths = list(lengths)
        if not lengths:
            return 0.0
        hardware, model = self.hardware, self.model
        tokens, pairs = sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
        work = (2 * model.params * tokens + model.attention_flops * pairs) / self.replicas
        flops = hardware.flops * hardware.prefill_flops_share * self.tensor_parallel
        read = model.weight_bytes / (hardware.bandwidth * hardware.bandwidth_share * self.tensor_parallel)
        return max(work / flops, read) + hardware.step_overhead_s + self._reduce_s

    def verify_s(self, tokens: int) -> float:
        """A replay writes the logits of every cached token and reads them twice: for its log-prob and for the draw."""
        speed = self.hardware.bandwidth * self.hardware.bandwidth_share * self.tensor_parallel * self.replicas
        return 3 * LOGIT_BYTES * self.model.vocab * tokens / speed

    def update_s(self, tokens: int) -> float:
        devices = self.tensor_parallel * self.replicas
        flops = self.hardware.flops * self.hardware.train_flops_share * devices
        return 6 * self.model.params * tokens / flops

    def publish_s(self) -> float:
        """Every device receives its share of the weights over its link."""
        return self.model.weight_bytes / (self.hardware.link_bandwidth * self.tensor_parallel)

    @property
    def _reduce_s(self) -> float:
        return 2 * self.model.layers * self.hardware.reduce_s if self.tensor_parallel > 1 else 0.0


def _sum_of_larger(first: tuple[float, float], second: tuple[float, float], steps: int) -> float:
    """The sum over i < steps of max(a + b i, c + d i), for (a, b) and (c, d)."""
    (a, b), (c, d) = first, second
    if a < c or (a == c and b < d):
        (a, b), (c, d) = (c, d), (a, b)  # so that (a, b) is the larger at i = 0
    split = steps
    if d > b:
        split = min(steps, math.ceil((a - c) / (d - b)))
    later = steps - split
    begin = split * a + b * split * (split - 1) / 2
    return begin + later * (c + d * split) + d * later * (later - 1) / 2


def load_cost(
    kind: str = "unit",
    *,
    hardware: str = "h100",
    model: str = "llama-3.1-8b",
    tensor_parallel: int = 1,
    replicas: int = 1,
    longest: int = 0,
    draft_tokens: float = 1.0,
) -> CostModel:
    """A cost model by name. `longest` is the number of tokens of the longest sequence; the KV cache must hold it."""
    if kind not in ("unit", "roofline"):
        raise ConfigError(f"unknown cost model {kind!r}{_nearest(kind, ['unit', 'roofline'])}")
    for name, value in (("tensor-parallel", tensor_parallel), ("replicas", replicas)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}: raise --{name}")
    if not 1 <= draft_tokens <= DRAFT_ROWS:
        raise ConfigError(
            f"drafts give a sequence 1 to {DRAFT_ROWS} tokens a pass, not {draft_tokens:g}: change --drafts"
        )
    if kind == "unit":
        if draft_tokens != 1:
            raise ConfigError("--drafts needs a cost model in which positions cost time: add --cost roofline")
        return UnitCost()
    cost = RooflineCost(
        hardware=load_hardware(hardware),
        model=load_model_shape(model),
        tensor_parallel=tensor_parallel,
        replicas=replicas,
        draft_tokens=draft_tokens,
    )
    room = cost.kv_tokens // replicas
    if room < max(longest, 1):
        raise ConfigError(
            f"{model} on {tensor_parallel} x {hardware} has memory for {room:,} tokens of KV cache, but one answer "
            f"may need {longest:,}: raise --tensor-parallel, lower --cap, or choose other hardware"
        )
    return cost


def load_hardware(name: str) -> Hardware:
    return Hardware(**_preset("hardware", name))


def load_model_shape(name: str) -> ModelShape:
    return ModelShape(**_preset("models", name))


def preset_names(table: str) -> list[str]:
    """The names of the presets in presets/<table>.toml."""
    return sorted(_presets(table))


def _preset(table: str, name: str) -> dict[str, Any]:
    presets = _presets(table)
    if name.lower() not in presets:
        kind = {"models": "model"}.get(table, table)
        raise ConfigError(f"unknown {kind} {name!r}{_nearest(name.lower(), sorted(presets))}")
    return presets[name.lower()]


def _presets(table: str) -> dict[str, dict[str, Any]]:
    text = (resources.files("sortedrl.simulate") / "presets" / f"{table}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f": did you mean {near[0]}?" if near else ":"
    return f"{hint} Choose one of {', '.join(known)}"
