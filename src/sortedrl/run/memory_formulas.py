"""Formulas for the memory of learner and engine, from the model's shape and the configuration.

`estimate.py` adds them up for a machine without GPUs, `device_memory.py` and `placements.py` per GPU. The learner's
formulas agree with a dry run of its code to within 15 % (tests/run/test_device_memory.py); the engine's follow from
what vLLM allocates.

Guarantees: no weights are read; parts do not overlap, and totals are their sums.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from sortedrl.config import SortedConfig
from sortedrl.config.sections import LoraSection
from sortedrl.errors import ModelError, first_line
from sortedrl.external.hub import find_cached, shown
from sortedrl.learner.dry_run import MicroShape, RankMemory
from sortedrl.learner.logprobs import KEPT_ELEMENTS, PIECE_ELEMENTS, WHOLE_ELEMENTS, PieceSizes
from sortedrl.run.model_shapes import FLOAT, HALF
from sortedrl.simulate.costs import ModelShape

COMMON_RANK = 16  # assumed for adapters on the hub that are not here yet
LOGIT_COPIES = 3  # logits, their log-softmax, and its exponential or the gradient
GIB = 2**30
CONTEXT = 1 * GIB  # of each process on a GPU: CUDA's context, libraries' workspaces, buffers of collectives
BUCKET = 1 * GIB  # weights are published in buckets of this size, of which two are in use
PREFILL_TOKENS = 8192  # that an engine computes in one step
GRAPHS = 1 * GIB  # CUDA graphs of an engine


@dataclass(slots=True, kw_only=True, frozen=True)
class Memory:
    """Bytes by part at the peak of an update; rollout needs less. The learner's parts are sums over all ranks."""

    weights: int
    engine_copy: int  # the engine's own copy of the weights
    reference: int
    gradients: int
    optimizer: int
    kv_cache: int
    activations: int
    logits: int
    gathered: int = 0  # several ranks: the current layer as a whole, and its gradients
    driver: int = 0  # several ranks: the model in the main process, and the trained weights sent to it
    ranks: int = 1

    @property
    def parts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "ranks"}

    @property
    def of_rank(self) -> int:
        """Bytes of one rank: its shard of the parameters and states, and its own micro-batches."""
        sharded = self.weights + self.reference + self.gradients + self.optimizer
        return (sharded + self.activations + self.logits + self.gathered) // self.ranks

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def estimate_memory(config: SortedConfig, model: ModelShape) -> Memory:
    """Count the memory of learner and engine. The learner trains in float32; each engine has a copy of the weights.

    `model.bytes_per_value` applies to the engine's weights and KV cache.
    """
    weights = int(model.params) * FLOAT
    has_adapters, trained = has_lora(config), num_trained(config, model)
    window, ranks = config.task.max_prompt_tokens + config.engine.max_new_tokens, config.num_ranks
    micro = _rank_tokens(config)
    # With LoRA, the model without its adapters is the reference.
    has_reference = config.learner.kl_coef > 0 and not has_adapters
    return Memory(
        weights=weights,
        engine_copy=int(model.weight_bytes) * config.num_engines,
        reference=weights if has_reference else 0,
        gradients=trained * FLOAT,
        optimizer=2 * trained * FLOAT,
        kv_cache=int(config.slots * window * model.kv_bytes),
        activations=ranks * _activation_bytes(model, micro, is_recomputed=config.learner.recompute),
        logits=ranks * _logit_bytes(micro * model.vocab),
        gathered=ranks * 2 * weights // model.layers if ranks > 1 else 0,
        driver=2 * weights if ranks > 1 and not config.rank_gpus else 0,  # with GPUs, host memory
        ranks=ranks,
    )


def _logit_bytes(size: int) -> int:
    """Bytes that the logits of a micro-batch take at once: the current piece, and what is kept of the others."""
    kept = min(size, KEPT_ELEMENTS) if size > WHOLE_ELEMENTS else 0
    return (LOGIT_COPIES * min(size, PIECE_ELEMENTS) + kept) * FLOAT


def activation_bytes(model: ModelShape) -> int:
    """Bytes that all Llama blocks keep for the backward pass of one token.

    Hidden size: input, normalised input and output of both norms. Query heads: before and after the rotation, and the
    attention output. Key-value heads: keys before and after the rotation, and values. Feed-forward size: gate, its
    activation, up, and the product.
    """
    per_block = (
        6 * model.hidden
        + 3 * model.heads * model.head_dim
        + 3 * model.kv_heads * model.head_dim
        + 4 * model.intermediate
    )
    return model.layers * per_block * FLOAT


def _activation_bytes(model: ModelShape, num_tokens: int, *, is_recomputed: bool) -> int:
    """Bytes of a micro-batch's activations; with recomputation, only each layer's input and one whole layer."""
    if not is_recomputed:
        return num_tokens * activation_bytes(model)
    return num_tokens * (model.layers * model.hidden * FLOAT + activation_bytes(model) // model.layers)


def adapter_params(config: SortedConfig, model: ModelShape) -> int:
    """Parameters of LoRA: two low-rank matrices for each chosen linear layer; by default all seven of a block."""
    q, kv, h, f = model.heads * model.head_dim, model.kv_heads * model.head_dim, model.hidden, model.intermediate
    num_sides = {
        "q_proj": h + q,
        "k_proj": h + kv,
        "v_proj": h + kv,
        "o_proj": q + h,
        "gate_proj": h + f,
        "up_proj": h + f,
        "down_proj": f + h,
    }
    adapters = adapters_of(config)
    assert adapters is not None, "adapters are asked for"
    names = adapters.target_modules or tuple(num_sides)
    return (adapters.last_layers or model.layers) * adapters.rank * sum(num_sides.get(name, h + f) for name in names)


def has_lora(config: SortedConfig) -> bool:
    return bool(config.lora.rank or config.lora.path)


def num_trained(config: SortedConfig, model: ModelShape) -> int:
    """The number of parameters that are trained: all, or the adapters."""
    return adapter_params(config, model) if has_lora(config) else int(model.params)


def adapters_of(config: SortedConfig) -> LoraSection | None:
    """The adapters that are trained: the configured ones, or those in `lora.path` if they are here; None without."""
    if not has_lora(config):
        return None
    folder = find_cached(config.lora.path, config.lora.revision) if config.lora.path else None
    if folder is None:
        return config.lora.model_copy(update={"rank": config.lora.rank or COMMON_RANK})
    try:
        saved = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        modules = saved["target_modules"]
        return LoraSection(rank=int(saved["r"]), target_modules=tuple(modules) if isinstance(modules, list) else ())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the adapters in {shown(folder)} cannot be read: {first_line(error)}") from error


def micro_shape(config: SortedConfig) -> MicroShape:
    """The longest micro-batch: `micro_tokens`, unless a single answer is longer or a rank's share of them shorter.

    Ranks of a context group compute it together.
    """
    prompt, answer = config.task.max_prompt_tokens, config.engine.max_new_tokens
    share = -(-config.schedule.update_batch * config.context_parallel // config.num_ranks)
    most = max(min(config.learner.micro_tokens, share * (prompt + answer)), prompt + answer)
    return MicroShape(prompt_tokens=prompt, answer_tokens=answer, num_tokens=most)


# ---- one GPU ---------------------------------------------------------------------------------------------------------


def formula_rank_memory(config: SortedConfig, model: ModelShape, device_bytes: int) -> RankMemory:
    """The learner on one GPU at the peak of an update in bfloat16, as `learner/dry_run.py` measures it, by formulas.

    The peak comes at the output layer, or in the first layer of the backward pass, where both the gradient of the
    output layer and a whole layer are there.
    """
    is_sharded = config.has_rank_actors
    ranks = config.num_ranks // config.learner.rank_replicas if is_sharded else 1
    trained, adapters = num_trained(config, model), adapters_of(config)
    weights = int(model.params) * FLOAT
    if adapters is not None:
        weights = int(model.params) * (HALF if adapters.base_dtype == "bfloat16" else FLOAT) + trained * FLOAT
    layer, head = _layer_moment(config, model), _head_moment(config, model, device_bytes)
    output = 2 * HALF * model.vocab * model.hidden  # as a whole: gathered, and its buffer
    layer_gathers = 2 * HALF * _layer_params(model) + output if is_sharded else 0
    head_gathers = output if is_sharded else 0
    is_layer = layer + layer_gathers >= head + head_gathers
    memory = RankMemory(
        weights=weights // ranks,
        reference=weights // ranks if config.learner.kl_coef > 0 and adapters is None else 0,
        gradients=trained * FLOAT // ranks,
        optimizer=2 * trained * FLOAT // ranks,
        activations=layer if is_layer else head,
        gathers=layer_gathers if is_layer else head_gathers,
    )
    return on_device(config, memory)


def on_device(config: SortedConfig, memory: RankMemory) -> RankMemory:
    """What of it is on the GPU: with `learner.host_states` not what is sharded."""
    if not (config.has_rank_actors and config.learner.host_states):
        return memory
    return replace(memory, weights=0, reference=0, gradients=0, optimizer=0)


def _rank_tokens(config: SortedConfig) -> int:
    """Tokens of the longest micro-batch that one rank computes: all, or its share in a context group."""
    return -(-micro_shape(config).num_tokens // config.context_parallel)


def _kept_bytes(config: SortedConfig, model: ModelShape) -> int:
    """Activations that all layers keep for the backward pass: their inputs only, or everything; none on the host."""
    tokens, q, kv = _rank_tokens(config), model.heads * model.head_dim, model.kv_heads * model.head_dim
    if config.learner.offload_activations:
        return 0
    if config.learner.recompute:
        return tokens * model.layers * model.hidden * _stream_bytes(config)
    return int(tokens * model.layers * (7.5 * model.hidden + 3 * q + 3 * kv + 4 * model.intermediate) * HALF)


def _stream_bytes(config: SortedConfig) -> int:
    """Bytes of a value between layers: bfloat16, except where autocast computes from float32 weights."""
    is_half = config.has_rank_actors or (has_lora(config) and config.lora.base_dtype == "bfloat16")
    return HALF if is_half else FLOAT


def _layer_moment(config: SortedConfig, model: ModelShape) -> int:
    """Activations while the gradient of a layer is computed, with what it has computed again."""
    if not config.learner.recompute:
        return _kept_bytes(config, model)
    tokens, q, kv = _rank_tokens(config), model.heads * model.head_dim, model.kv_heads * model.head_dim
    wide = 9.25 if _stream_bytes(config) == HALF else 14.5
    working = tokens * (6 * model.intermediate + wide * model.hidden + 3 * q + 2 * kv) * HALF
    return _kept_bytes(config, model) + int(working) + model.hidden * model.intermediate * HALF


def _head_moment(config: SortedConfig, model: ModelShape, device_bytes: int) -> int:
    """Activations while log-probs or their gradients are computed, piece by piece, and the output layer's gradient."""
    tokens = _rank_tokens(config)
    num_answers = sum(sample.num_tokens for sample in micro_shape(config).samples)
    num_answers = num_answers if config.context_parallel == 1 else min(num_answers, tokens)
    logits = piece = num_answers * model.vocab
    if logits > WHOLE_ELEMENTS:
        piece = -(-logits // -(-num_answers // max(PieceSizes.on_gpu(device_bytes).piece // model.vocab, 1)))
    gradient = 0 if has_lora(config) else model.vocab * model.hidden * (FLOAT + HALF)
    # Of a piece: logits in bfloat16 and float32, log-probs, and those that are kept.
    return _kept_bytes(config, model) + 14 * piece + 5 * tokens * model.hidden * HALF + gradient


def _layer_params(model: ModelShape) -> int:
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return model.hidden * (2 * q + 2 * kv + 3 * model.intermediate)


@dataclass(slots=True, kw_only=True, frozen=True)
class EngineMemory:
    """Bytes of an engine on each of its GPUs."""

    engine_weights: int
    kv_cache: int
    engine_work: int  # activations of a prefill, logits, CUDA graphs

    @property
    def parts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def wire_bytes(config: SortedConfig, shape: ModelShape, *, is_sender: bool) -> int:
    """Buffers of a publication: two buckets, and where shards are sent the largest parameter, gathered and cast."""
    if has_lora(config) and not config.lora.merge:  # adapters alone
        return min(2 * BUCKET, num_trained(config, shape) * HALF)
    largest = shape.vocab * shape.hidden * (FLOAT + HALF)
    return min(2 * BUCKET, int(shape.params) * HALF) + (largest if is_sender and config.has_rank_actors else 0)


def engine_memory(config: SortedConfig, shape: ModelShape) -> EngineMemory:
    """An engine on GPUs, by formulas; on each of its GPUs it has its share of weights and cache."""
    width = config.tensor_parallel
    bytes_per_value = FLOAT if config.engine.dtype == "float32" else HALF
    shape = replace(shape, bytes_per_value=bytes_per_value)
    window = config.task.max_prompt_tokens + config.engine.max_new_tokens
    kv_heads = max(shape.kv_heads / width, 1.0) * width  # with more GPUs than heads, heads are copied
    cache = config.engine.slots * window * shape.kv_bytes * kv_heads / shape.kv_heads / width
    if config.engine.kv_gb is not None:
        cache = config.engine.kv_gb * GIB
    work = PREFILL_TOKENS * (2 * shape.intermediate / width + 6 * shape.hidden) * bytes_per_value
    logits = 3 * config.engine.slots * shape.vocab * FLOAT
    return EngineMemory(
        engine_weights=int(shape.weight_bytes / width),
        kv_cache=int(cache),
        engine_work=int(work + logits) + GRAPHS,
    )
