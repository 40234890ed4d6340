# pyright: reportMissingImports=false
"""A program that prints, as JSON, what vLLM makes of this project's settings on a machine with NVIDIA GPUs.

    python tests/support/fake_cuda.py FOLDER MAJOR.MINOR '{"dtype": "bfloat16", ...}' '{"eager": null, ...}'

It puts a CUDA platform in the place of the one that vLLM finds, with four devices that do not exist. Then it plans and
resolves the engine's arguments as `engine.py` and `core.py` do. Nothing is started. It runs in a process of its own,
because vLLM's modules read the platform when they are imported. With "bundles" among the values, it pretends to be a
Ray actor in a placement group with these numbers of GPUs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_BATCH_INVARIANT"):  # the plan decides
    os.environ.pop(name, None)

import torch  # noqa: E402
from vllm import platforms  # noqa: E402

MEMORY = 80 << 30
NUM_DEVICES = 4


def fake_platform(major: int, minor: int) -> Any:
    """vLLM's CUDA platform with devices of a compute capability."""
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("kernels")  # compiled for CUDA, and not in the CPU build
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class FakeCuda(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(major, minor)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "fake"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return MEMORY

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return NUM_DEVICES

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

    return FakeCuda()


def pretend_cuda(major: int, minor: int) -> None:
    platforms._current_platform = fake_platform(major, minor)
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: NUM_DEVICES
    torch.cuda.get_device_capability = lambda device=None: (major, minor)


def pretend_actor(bundles: list[int]) -> None:
    """What vLLM asks Ray: this process is an actor in a placement group whose bundles have so many GPUs."""
    import ray
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    resources: Any = [{"CPU": 1.0, "GPU": float(num_gpus)} for num_gpus in bundles]
    group = PlacementGroup(PlacementGroupID.from_random(), resources)
    context: Any = SimpleNamespace(runtime_env=None, get_actor_id=lambda: "an actor")
    ray.is_initialized = lambda: True
    ray.get_runtime_context = lambda: context
    ray.util.get_current_placement_group = lambda: group


def resolve(folder: Path, values: dict[str, Any], wishes: dict[str, Any]) -> dict[str, Any]:
    from sortedrl.engine.vllm.core import engine_arguments
    from sortedrl.engine.vllm.process import VllmSettings
    from sortedrl.engine.vllm.runner_choice import RunnerWishes, plan_runner, read_platform

    if bundles := values.pop("bundles", None):
        pretend_actor(bundles)
    facts = read_platform()
    plan = plan_runner(facts, RunnerWishes(**wishes))
    os.environ.update(plan.environment)
    settings = VllmSettings(
        folder=folder, **({"slots": 64, "max_length": 256, "kv_bytes": 1 << 30, "block_size": 32} | values), plan=plan
    )
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = AsyncEngineArgs(**engine_arguments(settings)).create_engine_config()
    return {
        "device": config.device_config.device_type,
        "is_v2": config.use_v2_model_runner,
        "is_async": config.scheduler_config.async_scheduling,
        "is_eager": config.model_config.enforce_eager,
        "graph_mode": config.compilation_config.cudagraph_mode.name,
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "executor": str(config.parallel_config.distributed_executor_backend),
        "worker": config.parallel_config.worker_cls,
        "is_speculative": config.speculative_config is not None,
        "logits_processors": config.model_config.logits_processors,
        "batch_invariant": os.environ["VLLM_BATCH_INVARIANT"],
        "attention": attention_backend(config),
        "slots": config.scheduler_config.max_num_seqs,
        "memory_share": config.cache_config.gpu_memory_utilization,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
    }


def attention_backend(config: Any) -> str:
    """The backend that vLLM's selector takes for the model's attention."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = config.model_config
    with set_current_vllm_config(config):
        return get_attn_backend(model.get_head_size(), model.dtype, None).get_name()


def main() -> None:
    folder, capability, values, wishes = sys.argv[1:]
    major, minor = map(int, capability.split("."))
    pretend_cuda(major, minor)
    print(json.dumps(resolve(Path(folder), json.loads(values), json.loads(wishes))))


if __name__ == "__main__":
    main()
