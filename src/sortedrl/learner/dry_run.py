"""A dry run of an update: what one rank of a learner would hold in memory, found with fake tensors.

`sortedrl doctor` and `benchmarks/learner/rank_memory.py` call `measure_update` through `run/device_memory.py`. It makes
the real learner (`TorchLearner`, or `RankLearner` on a fake process group of any size), shards and checkpoints the
model as a run does, and runs a forward and a backward pass of the longest micro-batch. All tensors are fake: they have
shapes and storages, but no data, so a model of any size takes seconds and no memory.

Guarantees: parts do not overlap and sum to the peak; neither weights nor a GPU nor other processes are needed. The pass
counted is a later one of a run: gradients and optimizer state are there. The fake device is a CPU, since FSDP's streams
need a real GPU; formulas add what only a GPU has (`run/device_memory.py`). Of ranks that share a micro-batch
(`learner.context_parallel`), the last is measured, because it predicts most tokens. What goes to host memory
(`learner.offload_activations`) is not counted.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from sortedrl.errors import LearnerError
from sortedrl.learner.logprobs import LogprobScorer, PieceSizes
from sortedrl.learner.lora import LoraSettings, import_peft, limit_layers, peft_config_of
from sortedrl.learner.optimizer import LearnerSettings
from sortedrl.learner.pack import MicroBatch, lay_out, packed_attention, prompt_groups
from sortedrl.learner.sharded.rank import RankLearner
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Prompt, Sample, Segment

_COMMUNICATION = ("fsdp", "c10d")  # operators whose tensors are buffers for gathering and reducing
_PARTS = ("activations", "gathers")


@dataclass(slots=True, kw_only=True, frozen=True)
class MicroShape:
    """The longest micro-batch: answers of full length with prompts of full length, up to `num_tokens` together."""

    prompt_tokens: int
    answer_tokens: int
    num_tokens: int

    @property
    def samples(self) -> list[Sample]:
        whole, rest = divmod(self.num_tokens, self.prompt_tokens + self.answer_tokens)
        lengths = [self.answer_tokens] * whole
        if rest > self.prompt_tokens:
            lengths.append(rest - self.prompt_tokens)
        return [_make_sample(index, self.prompt_tokens, length) for index, length in enumerate(lengths)]


@dataclass(slots=True, kw_only=True, frozen=True)
class RankMemory:
    """Bytes on one device at the peak of an update."""

    weights: int
    reference: int
    gradients: int
    optimizer: int
    activations: int  # kept for the backward pass, temporary ones, and pieces of logits
    gathers: int  # weights of the current layers as a whole, their gradients, and buffers of both

    @property
    def parts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def resident(self) -> int:
        """What stays between updates: gradients are freed at the end of each."""
        return self.weights + self.reference + self.optimizer

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def measure_update(
    model_config: Any,
    settings: LearnerSettings,
    micro: MicroShape,
    *,
    num_ranks: int | None,
    device_bytes: int,
    lora: LoraSettings | None = None,
    layers: int | None = None,
) -> RankMemory:
    """The memory of one of `num_ranks` ranks; None: of a learner in one process, which is not sharded.

    `model_config` is a configuration of transformers. `device_bytes` is the memory of the GPU, which the pieces of
    logits follow. `layers`: measure models of so many layers and of one more, and extend the difference to full depth.
    """
    measure = partial(
        _measure, settings=settings, micro=micro, num_ranks=num_ranks, lora=lora, device_bytes=device_bytes
    )
    depth = model_config.num_hidden_layers
    if layers is None or layers + 1 >= depth:
        return _largest(measure(model_config))
    low, high = (measure(_with_layers(model_config, number)) for number in (layers, layers + 1))
    # Each phase grows with its own slope, so the phase with the peak may be another one at full depth.
    return _largest([_extended(a, b, depth - layers) for a, b in zip(low, high, strict=True)])


def _largest(phases: list[RankMemory]) -> RankMemory:
    return max(phases, key=lambda memory: memory.peak)


def _extended(low: RankMemory, high: RankMemory, more: int) -> RankMemory:
    """`low` with `more` layers, each as large as the difference to `high`."""
    parts = {name: size + more * (high.parts[name] - size) for name, size in low.parts.items()}
    return RankMemory(**parts)


def _with_layers(model_config: Any, layers: int) -> Any:
    values = model_config.to_dict() | {"num_hidden_layers": layers}
    values.pop("layer_types", None)  # one entry per layer; transformers makes it again
    return type(model_config)(**values)


def _measure(
    model_config: Any,
    *,
    settings: LearnerSettings,
    micro: MicroShape,
    num_ranks: int | None,
    lora: LoraSettings | None,
    device_bytes: int,
) -> list[RankMemory]:
    """The memory at the peak of each phase: forward, and backward through the output layer, the layers, the embedding.

    In each phase the peak grows with the depth of the model by the same size per layer.
    """
    bare = _bare_model(model_config, lora)  # before tensors are fake, which have no meta device
    with (
        _fake_ranks(num_ranks, settings.context_parallel) as mesh,
        FakeTensorMode(allow_non_fake_inputs=True),
        _quiet(),
    ):
        model = _fake_model(bare)
        learner = _OneDevice(model, settings) if mesh is None else _OneRank(model, settings, mesh)
        learner.size_pieces(device_bytes)
        if settings.offload_activations:
            _offload_inputs(learner.model)
        packed = learner.laid_out(micro)
        trained = [parameter for parameter in learner.parameters if parameter.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        learner.optimizer.step()  # makes its state
        held = {
            "weights": _storages(learner.parameters),
            "reference": _storages(learner.reference_tensors),
            "gradients": _storages(parameter.grad for parameter in trained if parameter.grad is not None),
            "optimizer": _storages(tensor for state in learner.optimizer.state.values() for tensor in state.values()),
        }
        for storages in (held["reference"], held["gradients"], held["optimizer"]):  # with adapters: one model
            for key in held["weights"].keys() & storages.keys():
                del storages[key]
        tracker = _Tracker({key: storage for storages in held.values() for key, storage in storages.items()})
        learner.model.train()  # layers are recomputed in train mode only
        with _no_garbage(), tracker, packed_attention(learner.model), _phases_of(learner.model, tracker):
            total = learner.forward(packed)
            tracker.begin_phase()
            total.backward()
    sizes = {name: sum(storage.nbytes() for storage in storages.values()) for name, storages in held.items()}
    return [RankMemory(**sizes, **peak) for peak in tracker.peaks]


class _OneDevice(TorchLearner):
    """A learner in one process, with what a dry run calls."""

    def __init__(self, model: Any, settings: LearnerSettings) -> None:
        super().__init__(model, settings, temperature=1.0)

    def _place_model(self) -> None:
        """The model is where it shall be, and a dry run has no values to check."""

    def _make_offload(self) -> None:
        """An update is measured, in which everything is on the device."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._parameters().values())

    @property
    def reference_tensors(self) -> list[Tensor]:
        return [] if self.reference is None else list(self.reference.tensors().values())

    def size_pieces(self, device_bytes: int) -> None:
        """Compute the output layer in pieces as a GPU with so much memory does."""
        sizes = PieceSizes.on_gpu(device_bytes)
        self._scorer = LogprobScorer(1.0, is_fp32=self.settings.fp32_head, sizes=sizes)

    def laid_out(self, micro: MicroShape) -> MicroBatch:
        """The micro-batch that a pass gets."""
        samples = micro.samples
        return lay_out(samples, prompt_groups(samples, range(len(samples)), micro.num_tokens), self.device)

    def forward(self, packed: Any) -> Tensor:
        """A loss of every answer token's log-prob, and of the critic's values if there is one."""
        scores, values_a = self._forward(self.model, packed, has_values=True)
        return scores.logprobs_a.sum() + (0 if values_a is None else values_a.sum())


class _OneRank(RankLearner):
    """One rank of a sharded learner, with what a dry run calls."""

    def __init__(self, model: Any, settings: LearnerSettings, mesh: DeviceMesh) -> None:
        super().__init__(model, settings, temperature=1.0, mesh=mesh)

    parameters = _OneDevice.parameters
    reference_tensors = _OneDevice.reference_tensors
    size_pieces = _OneDevice.size_pieces
    forward = _OneDevice.forward

    def laid_out(self, micro: MicroShape) -> MicroBatch:
        samples = micro.samples
        return self._lay_out(samples, prompt_groups(samples, range(len(samples)), micro.num_tokens))


def _bare_model(model_config: Any, lora: LoraSettings | None) -> Any:
    """The model with its adapters, without memory."""
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if lora is None else getattr(torch, lora.base_dtype)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(model_config, dtype=dtype, trust_remote_code=False)
        peft_config = None if lora is None else peft_config_of(lora)
        if lora is None or peft_config is None:
            return model
        limit_layers(peft_config, model, lora.last_layers)
        return import_peft().get_peft_model(model, peft_config)


def _fake_model(bare: Any) -> Any:
    """The same on a device, for use among fake tensors."""
    model = bare.to_empty(device="cpu")
    # Compiled layers of the CPU need data; they leave models with hooks to torch.
    for module in model.modules():
        module.register_forward_pre_hook(_do_nothing)
    return model


def _do_nothing(_module: nn.Module, _inputs: Any) -> None: ...


def _offload_inputs(model: Any) -> None:
    """Let recomputed layers keep the shape of their inputs only, as if those were in host memory."""

    def to_host(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        return tensor.shape, tensor.dtype

    def from_host(packed: tuple[torch.Size, torch.dtype]) -> Tensor:
        return torch.empty(packed[0], dtype=packed[1])

    def recompute(function: Callable[..., Any], *inputs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(to_host, from_host):
            return checkpoint(function, *inputs, use_reentrant=False)

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            setattr(module, "_gradient_checkpointing_func", recompute)  # noqa: B010  (torch declares modules only)


@contextmanager
def _fake_ranks(num_ranks: int | None, context_parallel: int) -> Iterator[DeviceMesh | None]:
    """A mesh of ranks of which only one exists, the last of its context group; None without ranks."""
    if num_ranks is None:
        yield None
        return
    if dist.is_initialized():
        raise LearnerError("a dry run needs a process without torch.distributed: run sortedrl doctor on its own")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=context_parallel - 1, world_size=num_ranks)
    try:
        yield init_device_mesh("cpu", (num_ranks,))
    finally:
        dist.destroy_process_group()


@contextmanager
def _phases_of(model: Any, tracker: _Tracker) -> Iterator[None]:
    """Inside, begin a phase where the backward pass leaves the output layer, and where it leaves the layers."""

    def begin_phase(_gradient: Tensor) -> None:
        tracker.begin_phase()

    def watch(tensor: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(begin_phase)

    hooks = [
        model.get_output_embeddings().register_forward_pre_hook(lambda _module, inputs: watch(inputs[0])),
        model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, output: watch(output)),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Inside the block, garbage is collected only where that is asked for, and only what was made there: it is fast."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings about fake tensors that have no address."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _storages(tensors: Iterable[Any]) -> dict[int, Any]:
    """The storages by their address in torch, shared ones once. As long as they are kept, no other has that address."""
    found: dict[int, Any] = {}
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            storage = _local(tensor).untyped_storage()
            found[storage._cdata] = storage
    return found


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Tracker(TorchDispatchMode):
    """Sums the storages that live tensors hold, and keeps the largest sum of each phase.

    `known` are storages that are counted elsewhere. Tensors that FSDP gathers into or reduces from are told by the
    operators that touch them, and by `resize_`, with which FSDP frees and allocates gathered weights.
    """

    def __init__(self, known: Mapping[int, Any]) -> None:
        super().__init__()
        self.peaks: list[dict[str, int]] = []
        self._known = known
        self._live: dict[int, tuple[Any, int, str]] = {}
        self._now: dict[str, int] = dict.fromkeys(_PARTS, 0)
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_
        self.begin_phase()

    def begin_phase(self) -> None:
        gc.collect()  # fake tensors leave reference cycles, which would count until Python happens to find them
        self.peaks.append(dict(self._now))

    def __enter__(self) -> _Tracker:
        def resize(storage: Any, size: int) -> Any:
            resized = self._resize(storage, size)
            self._count(storage, "gathers")
            return resized

        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010  (torch declares it as a method)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is taken apart into its local tensors first
        result = func(*args, **(kwargs or {}))
        is_communication = func.namespace in _COMMUNICATION
        for leaf in tree_leaves((result, args, kwargs) if is_communication else result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage(), "gathers" if is_communication else None)
        return result

    def _count(self, storage: Any, part: str | None) -> None:
        """Count a storage under its part; None keeps the part that it has."""
        key = storage._cdata
        if key in self._known:
            return
        reference = None
        if key in self._live:
            reference, size, before = self._live.pop(key)
            self._now[before] -= size
            if reference() is storage:
                part = part or before
            else:  # the address of a storage that is gone, and was not reported yet
                reference = None
        size, part = storage.nbytes(), part or "activations"
        self._live[key] = (reference or weakref.ref(storage, partial(self._forget, key)), size, part)
        self._now[part] += size
        if sum(self._now.values()) > sum(self.peaks[-1].values()):
            self.peaks[-1] = dict(self._now)

    def _forget(self, key: int, reference: Any) -> None:
        if key in self._live and self._live[key][0] is reference:
            _, size, part = self._live.pop(key)
            self._now[part] -= size


def _make_sample(index: int, prompt_tokens: int, answer_tokens: int) -> Sample:
    """A sample whose prompt no other one shares."""
    answer = Segment(version=0, tokens=[0] * (answer_tokens + 1), logprobs=[0.0] * (answer_tokens + 1))
    prompt = Prompt(id=str(index), tokens=(index, *([0] * (prompt_tokens - 1))), content="")
    return Sample(
        id=index,
        prompt=prompt,
        index=0,
        epoch=0,
        cohort=0,
        seed=0,
        budget=answer_tokens + 1,
        segments=[answer],
    )
