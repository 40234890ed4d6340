"""A forecast for 64 to 4,096 GPUs, with network, publication, verification and one controller (simulated).

    python -m benchmarks.schedule.at_scale [--sizes 64,512,4096] [--divergence 1e-5] [--host-us 0.24] [--json]

Llama-3.1-8B on H100s, one GPU per engine with 16 slots, lengths lognormal(700, 1.1) up to 8192. `sync` and
`sorted-replay` use all GPUs for rollout and updates in turns; `async-on-policy` and `async` (staleness 4) give a
quarter of them to the learner. Costs are those of `sortedrl/simulate/cluster_cost.py`: groups of 8 ranks hold the
weights once. "grows": update batches grow with the cluster, 16 samples per GPU, as many as it has slots. "fixed": every
update has 4,096 samples. The controller spends `--host-us` on each token (`python -m
benchmarks.schedule.controller_limits` measures it). Speed is trained tokens per second and GPU relative to `sync` on
the smallest cluster with growing batches. Shares are parts of the run's time; those of updates and publications may
overlap with rollout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.record import make_parser, save
from sortedrl.simulate.cluster_cost import ClusterCost, load_cluster_cost
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import load_trace

TRACE = "lognormal(700, 1.1, 8192)"
SLOTS, FIXED, BATCHES = 16, 4096, 8
ARMS: Mapping[str, Mapping[str, Any]] = {
    "sync": {"strategy": "sync"},
    "sorted-replay": {"strategy": "sorted-replay", "lookahead": 2},
    "async-on-policy": {"strategy": "async-on-policy", "lookahead": 2},
    "async": {"strategy": "async", "lookahead": 2, "max_staleness": 4},
}
LEARNER_SHARE = 0.25


@dataclass(slots=True, kw_only=True)
class MeteredCost:
    """A cost model that adds up the seconds of verification, publications and updates."""

    cost: ClusterCost
    verify: float = 0.0
    publish: float = 0.0
    update: float = 0.0

    @property
    def kv_tokens(self) -> int:
        return self.cost.kv_tokens

    def decode_s(self, running: int, context: int, steps: int) -> float:
        return self.cost.decode_s(running, context, steps)

    def prefill_s(self, lengths: Iterable[int]) -> float:
        return self.cost.prefill_s(lengths)

    def verify_s(self, tokens: int) -> float:
        seconds = self.cost.verify_s(tokens)
        self.verify += seconds
        return seconds

    def publish_s(self) -> float:
        seconds = self.cost.publish_s()
        self.publish += seconds
        return seconds

    def update_s(self, tokens: int) -> float:
        seconds = self.cost.update_s(tokens)
        self.update += seconds
        return seconds


def run(gpus: int, arm: str, batch: int, divergence: float, host_s: float) -> dict[str, Any]:
    share = LEARNER_SHARE if arm.startswith("async") else None
    cost = load_cluster_cost(gpus=gpus, learner_share=share, host_token_s=host_s)
    metered = MeteredCost(cost=cost)
    slots = cost.engines.replicas * SLOTS
    samples = max(BATCHES, -(-3 * slots // batch)) * batch
    found = simulate(
        load_trace(TRACE, samples=samples),
        slots=slots,
        update_batch=batch,
        cost=metered,
        divergence=divergence,
        **ARMS[arm],
    )
    wall_s = found.wall_s or 0.0
    return {
        "gpus": gpus,
        "arm": arm,
        "update_batch": batch,
        "tokens_per_s": found.tokens_per_s,
        "per_gpu": (found.tokens_per_s or 0.0) / gpus,
        "updates": found.updates,
        "update_every_s": wall_s / max(found.updates, 1),
        "bubble_ratio": found.bubble_ratio,
        "staleness_max": found.staleness_max,
        "shares": {name: getattr(metered, name) / wall_s for name in ("update", "publish", "verify")},
        "publish_s": cost.publish_s(),
        "controller_share": host_s * (found.generated_tokens or 0) / wall_s,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", default="64,512,4096", help="numbers of GPUs, separated by commas")
    parser.add_argument("--arms", default=",".join(ARMS), help="strategies, separated by commas")
    parser.add_argument("--divergence", type=float, default=1e-5)
    parser.add_argument("--host-us", type=float, default=0.24, help="microseconds of the controller per token")
    args = parser.parse_args()
    sizes, arms = [int(size) for size in args.sizes.split(",")], args.arms.split(",")
    cases = [(size, arm, is_growing) for is_growing in (True, False) for size in sizes for arm in arms]
    records: list[dict[str, Any]] = [
        {"batches": "grows" if is_growing else "fixed"}
        | run(size, arm, SLOTS * size if is_growing else FIXED, args.divergence, args.host_us * 1e-6)
        for size, arm, is_growing in track(cases, console=Console(stderr=True), transient=True)
    ]
    base = records[0]["per_gpu"]
    for record in records:
        record["speed"] = record["per_gpu"] / base
    save("at_scale", {"divergence": args.divergence, "host_us": args.host_us, "rows": records})
    if args.json:
        print(json.dumps({"rows": records}))
        return
    names = (
        "batches",
        "GPUs",
        "strategy",
        "batch",
        "speed per GPU",
        "update every, s",
        "idle",
        "update",
        "publication",
    )
    table = Table(*names, "verification", "controller", box=None)
    for record in records:
        table.add_row(
            *(str(record[key]) for key in ("batches", "gpus", "arm", "update_batch")),
            f"{record['speed']:.2f}",
            f"{record['update_every_s']:.1f}",
            *(f"{100 * (value or 0):.0f} %" for value in (record["bubble_ratio"], *record["shares"].values())),
            f"{100 * record['controller_share']:.0f} %",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
