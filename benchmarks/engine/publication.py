# pyright: reportMissingImports=false
"""How fast a learner of two FSDP2 ranks gives its weights to vLLM, and whether every byte arrives.

    python -m benchmarks.engine.publication [--model smollm2-135m] [--rounds 5] [--sockets] [--json]

Ways to publish, one after the other, each with the same learner:

- `file`: to one engine through this process: ranks to driver, a file in shared memory, vLLM's loader (the baseline);
- `tp2`: to one engine that is split over two workers, from the ranks to the workers over gloo;
- `two`: to a pool of two engines in Ray actors, to all workers at once.

vLLM splits layers by attention heads, and SmolLM2-135M has 9. So `tp2` takes the same tensors for heads of half the
width, 18: shapes and bytes are SmolLM2's, and only its answers would differ.

Each round moves the weights on the ranks, publishes them and takes the time. After the last round each worker applies
its layers to the identity, and the products are compared, bit by bit, with those after vLLM's own loader has read the
same weights from a file. `learner_copies` counts what torch's operators write in the memory of all ranks in one
publication, and `worker_copies` the same in the first worker of `tp2`; both in units of the model's bytes in `--dtype`.
On one machine weights are written into shared memory, and gloo carries signals. With `--sockets` gloo carries the
weights too, as between machines.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.engine.with_vllm import go_on_with_vllm
from benchmarks.record import make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.engine.base import Engine
from sortedrl.engine.pool.ray_cluster import connect, disconnect
from sortedrl.engine.sampling.noise import SCHEME
from sortedrl.learner.sharded.learner import ShardedLearner
from sortedrl.run.builders.engine import vllm_engine
from sortedrl.run.builders.parts import model_path
from sortedrl.run.checkpoint_folder import load_model
from sortedrl.weights import ModuleWeights, WeightHolder

LIMIT_S = 600.0
SLOTS, MAX_LENGTH = 4, 256
WAYS = ("file", "tp2", "two")


class WrittenBytes(TorchDispatchMode):
    """Counts the bytes of new, overwritten and received tensors: views, meta and empty tensors count nothing."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name()
        if name.startswith("c10d::recv_"):
            self._add(args[0])
        elif not name.startswith(("aten::empty", "c10d::")):
            for returned, tensor in zip(func._schema.returns, _as_sequence(result), strict=False):
                if returned.alias_info is None or returned.alias_info.is_write:  # otherwise it is a view
                    self._add(_as_sequence(tensor))
        return result

    def _add(self, tensors: Any) -> None:
        for tensor in tensors:
            if type(tensor) is torch.Tensor and tensor.device.type != "meta":
                self.total += tensor.numel() * tensor.element_size()


def _as_sequence(result: Any) -> Any:
    return result if isinstance(result, tuple | list) else (result,)


# ---- in the learner's ranks ------------------------------------------------------------------------------------------


def move(holder: WeightHolder, seed: int) -> None:
    """Change this rank's shard by a small step."""
    with torch.no_grad():
        for parameter in holder.module.parameters():
            local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[operator]
            local.mul_(1.0 + 0.001 * seed)


def count_written(holder: WeightHolder, dtype: torch.dtype, is_shared: bool) -> tuple[int, int]:
    """Bytes that engines get, and bytes that this rank writes to cast and pack them. Every rank must call it."""
    from sortedrl.engine.vllm.transfer.gloo import BUCKET_BYTES
    from sortedrl.engine.vllm.transfer.packing import BucketPacker
    from sortedrl.engine.vllm.transfer.shared_buckets import SharedBuckets, SharedPacker
    from sortedrl.engine.vllm.transfer.source import CastSource

    tensors = CastSource(holder.module, dtype).wire_tensors()
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    packer: Any = BucketPacker(holder.rank)
    if is_shared:
        memory = SharedBuckets.create(num_bytes)  # each rank its own: only the writing is counted
        assert memory is not None, "this machine shares no memory: give --sockets"
        packer = SharedPacker(holder.rank, memory)
    with torch.no_grad(), WrittenBytes() as written:
        for _ in packer.pack(tensors, BUCKET_BYTES):
            pass
    return num_bytes, written.total


# ---- in vLLM's workers -----------------------------------------------------------------------------------------------


def digest(worker: Any) -> str:
    """A hash of the weights that every layer computes with: those of a CPU are packed, so they are applied to 1."""
    model = worker.model_runner.get_model()
    found = hashlib.sha256()
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        size = getattr(module, "input_size_per_partition", None) or getattr(module, "embedding_dim", None)
        if method is not None and size is not None and hasattr(method, "apply") and not name.endswith("embed_tokens"):
            eye = torch.eye(size, dtype=model.lm_head.weight.dtype)
            found.update(name.encode() + method.apply(module, eye).contiguous().view(torch.uint8).numpy().tobytes())
    for name, parameter in model.named_parameters():
        found.update(name.encode() + parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def count_received(worker: Any) -> Any:
    """Start to count the bytes that torch's operators write in this worker; the second call returns their number."""
    counter = getattr(worker, "_written_bytes", None)
    if counter is None:
        worker._written_bytes = WrittenBytes()
        receive = worker.weight_transfer_engine.receive_weights

        def counted(info: Any) -> None:
            with worker._written_bytes:
                receive(info)

        worker.weight_transfer_engine.receive_weights = counted
        return 0
    return counter.total


def on_workers(function: Callable[[Any], Any], engine: Any) -> list[Any]:
    """Run a function in the workers of a vLLM engine."""
    return engine._process.call(engine._request_loop.frontend.collective_rpc(function), LIMIT_S)


def load_again(path: str, engine: Any) -> None:
    """Let vLLM load a file by its own loader."""
    engine._process.call(engine._request_loop.load_file(path), LIMIT_S)


# ---- the ways --------------------------------------------------------------------------------------------------------


@contextmanager
def one_engine(options: argparse.Namespace, model: Any, **settings: Any) -> Iterator[tuple[Engine, Callable[..., Any]]]:
    engine, _ = make_engine(options, model, **settings)
    try:
        yield engine, lambda function: [function(engine)]
    finally:
        engine.close()


@contextmanager
def two_engines(options: argparse.Namespace, model: Any) -> Iterator[tuple[Engine, Callable[..., Any]]]:
    import ray

    from sortedrl.engine.pool.pool import Pool
    from sortedrl.engine.pool.ray_launcher import RayEngineLauncher
    from sortedrl.engine.vllm.transfer.link import WeightLink

    launcher = RayEngineLauncher(
        partial(make_engine, options, model.config.to_dict()), num_cpus=0.25, num_gpus=0, threads=1
    )
    dtype = getattr(torch, options.dtype)
    route = WeightLink(
        backend="gloo", dtype=dtype, num_workers=1, limit_s=LIMIT_S, is_local=True, shares_memory=not options.sockets
    )
    pool = Pool(
        launcher, size=2, slots=SLOTS, exact_replay=True, keep_kv=True, noise=SCHEME, route=route, health_s=LIMIT_S
    )

    def on_engines(function: Callable[..., Any]) -> list[Any]:
        actors = [member.engine._actor for member in pool._members]  # type: ignore[union-attr]
        return ray.get([actor.apply.remote(function) for actor in actors])

    try:
        yield pool, on_engines
    finally:
        pool.close()


def make_engine(options: argparse.Namespace, model: Any, **settings: Any) -> tuple[Any, Any]:
    described = model if isinstance(model, dict) else model.config.to_dict()
    described = with_even_heads(described) if settings.get("tensor_parallel", 1) > 1 else described
    dtype = getattr(torch, options.dtype)
    common = {"slots": SLOTS, "max_length": MAX_LENGTH, "weights_dtype": torch.float32, "dtype": dtype}
    return vllm_engine(described, **common, **({"transfer": "gloo", "limit_s": LIMIT_S} | settings))


def with_even_heads(config: dict[str, Any]) -> dict[str, Any]:
    """The same model, read as one with twice the heads of half the width if the number of heads is odd."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % 2 == groups % 2 == 0:
        return config
    width = config.get("head_dim") or config["hidden_size"] // heads
    return {**config, "num_attention_heads": 2 * heads, "num_key_value_heads": 2 * groups, "head_dim": width // 2}


class OneEngine:
    """An engine in this process that is given weights as a pool gives them to its engines, which start without any."""

    def __init__(self, engine: Any, options: argparse.Namespace, num_workers: int) -> None:
        from sortedrl.engine.vllm.transfer.link import WeightLink

        dtype = getattr(torch, options.dtype)
        self.engine = engine
        self._link = WeightLink(
            backend="gloo",
            dtype=dtype,
            num_workers=num_workers,
            limit_s=LIMIT_S,
            is_local=True,
            shares_memory=not options.sockets,
        )

    def publish(self, version: int, source: Any) -> Any:
        (ticket,) = self._link.begin(source, ["engine"])
        handle = self.engine.publish(version, ticket)
        why = self._link.finish()
        assert why is None, why
        return handle


def measure(name: str, options: argparse.Namespace, learner: ShardedLearner, folder: Path) -> dict[str, Any]:
    """Seconds of each publication, and whether the workers then hold what vLLM's loader reads from a file."""
    source: ModuleWeights = learner.source
    match name:
        case "file":
            opened = one_engine(options, learner.model, transfer="file")
        case "tp2":
            opened = one_engine(options, learner.model, tensor_parallel=2)
        case _:
            opened = two_engines(options, learner.model)
    with opened as (engine, on_engines):
        publisher: Any = OneEngine(engine, options, 2) if name == "tp2" else engine
        seconds: list[float] = []
        for version in range(1, options.rounds + 2):
            source.apply(move, version)
            learner._is_behind = True  # as an update does
            began = time.perf_counter()
            publisher.publish(version, source).wait()
            seconds.append(time.perf_counter() - began)
        arrived = on_engines(partial(on_workers, digest))
        written = 0
        if name == "tp2":
            on_engines(partial(on_workers, count_received))
            publisher.publish(options.rounds + 2, source).wait()
            written = on_engines(partial(on_workers, count_received))[0][0]
        model = source.module
        path = folder / "model.safetensors"
        write_weights(model, path, getattr(torch, options.dtype))
        on_engines(partial(load_again, str(path)))
        is_exact = arrived == on_engines(partial(on_workers, digest))
        print(f"{name}: {seconds}", file=sys.stderr)
    gc.collect()
    return {"first_s": seconds[0], "publish_s": seconds[1:], "is_exact": is_exact, "worker_bytes": written}


def write_weights(model: Any, path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().to(dtype).contiguous() for name, tensor in model.named_parameters()}
    save_file(tensors, path, metadata={"format": "pt"})


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--sockets", action="store_true", help="as between machines: no shared memory")
    parser.add_argument("--rehearse", action="store_true", help="keep the recorded results")
    options = parser.parse_args()
    go_on_with_vllm()
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions of this file run in vLLM's workers
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    config = SortedConfig(model={"path": options.model})
    model, _ = load_model(model_path(config))
    connect()
    try:
        result = run(options, config, model)
    finally:
        disconnect()
    if not options.rehearse:
        save("publication", {"options": vars(options), "result": result})
    if options.json:
        print(json.dumps(result))
        sys.exit(_num_inexact(result))
    table = Table("way", "publication, s", "first, s", "byte for byte", title=f"{options.model}, {options.dtype}")
    for name, found in result["ways"].items():
        times = found["publish_s"]
        shown = f"{statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f})"
        table.add_row(name, shown, f"{found['first_s']:.2f}", "yes" if found["is_exact"] else "NO")
    Console().print(table)
    print(
        f"written in all ranks: {result['learner_copies']:.2f} times the bytes sent; in a worker of tp2: "
        f"{result['worker_copies']:.2f} times"
    )
    sys.exit(_num_inexact(result))


def _num_inexact(result: dict[str, Any]) -> int:
    return sum(not found["is_exact"] for found in result["ways"].values())


def run(options: argparse.Namespace, config: SortedConfig, model: Any) -> dict[str, Any]:
    import tempfile

    from sortedrl.learner.sharded.ray_ranks import RayRanks

    ranks = RayRanks(2, num_cpus=0.25, num_gpus=0, threads=1, timeout_s=LIMIT_S)
    learner = ShardedLearner(model, config.learner, temperature=1.0, ranks=ranks)
    try:
        with tempfile.TemporaryDirectory() as folder:
            ways = {name: measure(name, options, learner, Path(folder)) for name in options.ways}
        counts = learner.source.apply(count_written, getattr(torch, options.dtype), not options.sockets)
        sent, written = counts[0][0], sum(count for _, count in counts)
    finally:
        learner.close()
    received = ways.get("tp2", {}).get("worker_bytes", 0)
    return {
        "model": options.model,
        "sent_bytes": sent,
        "learner_copies": written / sent,
        "worker_copies": received / sent,
        "median_s": {name: statistics.median(found["publish_s"]) for name, found in ways.items()},
        "ways": ways,
    }


if __name__ == "__main__":
    main()
