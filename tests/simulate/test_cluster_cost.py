"""The cost model of a cluster, by hand."""

from __future__ import annotations

import pytest

from sortedrl.errors import ConfigError
from sortedrl.simulate.cluster_cost import ClusterCost, load_cluster_cost
from sortedrl.simulate.costs import Hardware, ModelShape, RooflineCost

# Links carry 10 bytes a second, adapters 2; 4 GPUs in a machine, so 8 bytes a second reach every GPU of several.
HARDWARE = Hardware(
    flops=100.0,
    bandwidth=1e9,
    memory=1e9,
    link_bandwidth=10.0,
    bandwidth_share=1.0,
    decode_flops_share=1.0,
    prefill_flops_share=1.0,
    train_flops_share=0.5,
    memory_share=1.0,
    step_overhead_s=0.25,
    reduce_s=0.0,
    network_bandwidth=2.0,
    network_latency_s=0.125,
)
MODEL = ModelShape(params=40, layers=2, heads=1, kv_heads=1, head_dim=1, bytes_per_value=2, vocab=10)


def cluster(ranks: int, shard: int, engines: int = 4, host_token_s: float = 0.0) -> ClusterCost:
    return ClusterCost(
        engines=RooflineCost(hardware=HARDWARE, model=MODEL, replicas=engines),
        num_ranks=ranks,
        shard_ranks=shard,
        gpus_per_node=4,
        micro_tokens=10,
        host_token_s=host_token_s,
    )


def test_an_update_takes_arithmetic_or_traffic() -> None:
    # 4 ranks in one machine. A pass carries 8 bytes of 40 parameters, 3/4 of them from others: 240 / 10 = 24 s.
    # 40 tokens are one pass: 6 x 40 x 40 / (50 x 4) = 48 s of arithmetic, which is more. One token is a pass, too.
    assert cluster(4, 4).update_s(40) == 48.0
    assert cluster(4, 4).update_s(1) == 24.0
    assert cluster(4, 4).update_s(41) == pytest.approx(49.2)  # two passes carry 48 s
    assert cluster(1, 1).update_s(1) == pytest.approx(4.8)  # nothing is exchanged


def test_groups_sum_their_gradients_once() -> None:
    # Two groups of 4: each rank has 10 parameters, of which 2 x 4 x 10 / 2 = 40 bytes go over its adapter: 20 s.
    assert cluster(8, 4).update_s(1) == 24.0 + 20.0
    # One group over two machines: 8 x 40 x 7/8 / 8 = 35 s, and 3 collectives in each of 2 layers with 1 hop.
    assert cluster(8, 8).update_s(1) == 35.0 + 6 * 0.125


def test_a_publication_is_gathered_and_sent() -> None:
    # 160 bytes are gathered at 10 bytes a second, 80 are sent at 2: 40 s, and the only bucket is gathered first.
    # 4 receivers are 3 steps of a tree.
    assert cluster(4, 4).publish_s() == 40.0 + 16.0 + 3 * 0.125
    assert cluster(8, 4).publish_s() == 40.0 + 20.0 + 3 * 0.125


def test_engines_wait_for_the_controller() -> None:
    engines = cluster(4, 4)
    slow = cluster(4, 4, host_token_s=1.0)
    assert engines.decode_s(8, 0, 2) == pytest.approx(2 * (0.25 + 2 * 40 * 2 / 100), rel=0.2)
    assert slow.decode_s(8, 0, 2) == 16.0
    assert slow.verify_s(7) == engines.engines.verify_s(7) > 0
    assert slow.prefill_s([3]) == engines.engines.prefill_s([3])
    assert slow.kv_tokens == engines.engines.kv_tokens


def test_a_cluster_by_its_size() -> None:
    apart = load_cluster_cost(gpus=64, learner_share=0.25)
    assert (apart.engines.replicas, apart.num_ranks) == (48, 16)
    shared = load_cluster_cost(gpus=64, tensor_parallel=2)
    assert (shared.engines.replicas, shared.num_ranks) == (32, 64)
    # Llama-3.1-8B is sent in bfloat16 over one adapter of 50 GB/s: 16 GB take .32 s.
    assert apart.publish_s() == pytest.approx(0.32, rel=0.1)
    with pytest.raises(ConfigError, match="12 GPUs give 9 engines of 1 and 3 ranks in groups of 8"):
        load_cluster_cost(gpus=12, learner_share=0.25)
