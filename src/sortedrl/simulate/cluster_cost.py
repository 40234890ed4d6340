"""The cost model of a cluster: engines and ranks on many machines, with a network between them and one controller.

`benchmarks/schedule/at_scale.py` simulates runs on 64 to 4,096 GPUs with it. Engines cost what the roofline says
(`costs.py`), verification of cached tokens included. On top of that:

- an update takes the arithmetic of its tokens, or the traffic of its passes if that takes longer. In a pass every rank
  gathers the weights in bfloat16 twice and sums gradients in float32 within its group of `shard_ranks`; once an update,
  groups sum their gradients among each other (HSDP);
- a publication gathers the weights in float32 on one rank, bucket by bucket, and broadcasts them in bfloat16;
- the controller spends `host_token_s` on each sampled token, in one thread, while engines decode.

Simplifications: all links are used evenly; traffic overlaps with arithmetic completely; ranks and engines never wait
for one slow machine; micro-batches are full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from sortedrl.errors import ConfigError
from sortedrl.simulate.costs import Hardware, ModelShape, RooflineCost, load_hardware, load_model_shape

_HALF, _FLOAT = 2, 4
_GATHERS = 2  # of the weights in a pass: forward, and backward
_COLLECTIVES = 3  # of a layer in a pass: two gathers and a sum
_BUCKET = 2**30  # bytes of a publication that are under way at once


@dataclass(slots=True, kw_only=True, frozen=True)
class ClusterCost:
    """`engines` are all engines. `num_ranks` may be the same GPUs, if engines and ranks take turns."""

    engines: RooflineCost
    num_ranks: int
    shard_ranks: int  # ranks that hold the weights once; they divide `num_ranks`
    gpus_per_node: int = 8
    micro_tokens: int = 16384
    host_token_s: float = 0.0

    @property
    def hardware(self) -> Hardware:
        return self.engines.hardware

    @property
    def model(self) -> ModelShape:
        return self.engines.model

    @property
    def kv_tokens(self) -> int:
        return self.engines.kv_tokens

    def decode_s(self, running: int, context: int, steps: int) -> float:
        """The time of the engines, or that of the controller if it cannot keep up with them."""
        return max(self.engines.decode_s(running, context, steps), self.host_token_s * running * steps)

    def prefill_s(self, lengths: Iterable[int]) -> float:
        return self.engines.prefill_s(lengths)

    def verify_s(self, tokens: int) -> float:
        return self.engines.verify_s(tokens)

    def update_s(self, tokens: int) -> float:
        arithmetic = 6 * self.model.params * tokens / (self._train_flops * self.num_ranks)
        passes = math.ceil(tokens / (self.micro_tokens * self.num_ranks))
        return max(arithmetic, passes * self._pass_traffic_s) + self._groups_sum_s

    def publish_s(self) -> float:
        """A bucket is broadcast while the next is gathered, so the slower of both counts, and the first gather."""
        gather = _FLOAT * self.model.params / self._gather_bandwidth(self.num_ranks)
        send = _HALF * self.model.params / self.hardware.network_bandwidth
        buckets = math.ceil(_HALF * self.model.params / _BUCKET)
        receivers = self.engines.replicas * self.engines.tensor_parallel
        latency = self.hardware.network_latency_s * math.ceil(math.log2(receivers + 1))
        return max(gather, send) + min(gather, send) / buckets + buckets * latency

    @property
    def _train_flops(self) -> float:
        return self.hardware.flops * self.hardware.train_flops_share

    @property
    def _pass_traffic_s(self) -> float:
        """Collectives of one pass within a group: what they carry, and their latency in a ring."""
        size = self.shard_ranks
        if size == 1:
            return 0.0
        carried = (_GATHERS * _HALF + _FLOAT) * self.model.params * (size - 1) / size
        machines = math.ceil(size / self.gpus_per_node)
        latency = _COLLECTIVES * self.model.layers * (machines - 1) * self.hardware.network_latency_s
        return carried / self._gather_bandwidth(size) + latency

    @property
    def _groups_sum_s(self) -> float:
        """Each rank sums its rows' gradients with those of the same rows in the other groups."""
        groups = self.num_ranks // self.shard_ranks
        carried = 2 * _FLOAT * self.model.params / self.shard_ranks * (groups - 1) / groups
        return carried / self.hardware.network_bandwidth

    def _gather_bandwidth(self, size: int) -> float:
        """Bytes a second that each rank of a group receives; adapters of a machine bring what all its GPUs need."""
        within = self.hardware.link_bandwidth
        if size <= self.gpus_per_node:
            return within
        return min(within, self.gpus_per_node * self.hardware.network_bandwidth)


def load_cluster_cost(
    *,
    gpus: int,
    model: str = "llama-3.1-8b",
    hardware: str = "h100",
    tensor_parallel: int = 1,
    learner_share: float | None = None,
    shard_ranks: int = 8,
    host_token_s: float = 0.0,
) -> ClusterCost:
    """A cluster of `gpus` GPUs. `learner_share` of them are ranks, the others engines; None: all are both in turns."""
    ranks = gpus if learner_share is None else round(gpus * learner_share)
    engines = (gpus if learner_share is None else gpus - ranks) // tensor_parallel
    if engines < 1 or ranks < 1 or ranks % shard_ranks:
        raise ConfigError(
            f"{gpus} GPUs give {engines} engines of {tensor_parallel} and {ranks} ranks in groups of {shard_ranks}: "
            "choose numbers that leave an engine and whole groups of ranks"
        )
    return ClusterCost(
        engines=RooflineCost(
            hardware=load_hardware(hardware),
            model=load_model_shape(model),
            tensor_parallel=tensor_parallel,
            replicas=engines,
        ),
        num_ranks=ranks,
        shard_ranks=shard_ranks,
        host_token_s=host_token_s,
    )
