"""Two engines on one core each against one engine on one core, in pools of Ray actors: tokens per second.

    python -m benchmarks.pool.pool_scale [--rounds 9] [--hidden 512] [--layers 4] [--json]

Both pools exist all the time and take turns; the other one sleeps. Every round fills all slots once with answers of the
same length, so that no engine waits for a long answer. The loss against a ratio of 2 is the cost of the driver, Ray and
shared memory bandwidth.
"""

from __future__ import annotations

import json
import statistics
import time
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LlamaConfig

from benchmarks.pool.cores import pin
from benchmarks.record import make_parser, save
from sortedrl.engine.base import Finished, Request, Sampling
from sortedrl.engine.pool.pool import Pool
from sortedrl.engine.pool.ray_cluster import connect, disconnect
from sortedrl.run.builders.engine import local_engine

SLOTS, PROMPT, ANSWER = 16, 16, 128
GOAL = 1.7


def make_pool(size: int, model: dict[str, Any]) -> Pool:
    import torch

    from sortedrl.engine.pool.ray_launcher import RayEngineLauncher

    make_engine = partial(
        local_engine,
        model,
        weights_dtype=torch.float32,
        dtype=torch.float32,
        slots=SLOTS,
        max_length=PROMPT + ANSWER,
    )
    members = RayEngineLauncher(make_engine, num_cpus=0.25, num_gpus=0, threads=1)
    pool = Pool(members, size=size, slots=SLOTS, exact_replay=True, keep_kv=True)
    for core, member in enumerate(pool.stats().extra["members"]):
        pin(member["pid"], core)
    return pool


def tokens_per_s(pool: Pool, first: int) -> float:
    """Fill every slot once; returns tokens per second."""
    num = pool.capabilities.slots
    requests = [
        Request(first + index, 0, [(first + index + i) % 500 for i in range(PROMPT)], ANSWER, index, Sampling())
        for index in range(num)
    ]
    began, num_done = time.perf_counter(), 0
    pool.submit(requests)
    while num_done < num:
        num_done += sum(isinstance(event, Finished) for event in pool.poll())
    return num * ANSWER / (time.perf_counter() - began)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    shape = LlamaConfig(
        vocab_size=512,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 32,
        max_position_embeddings=512,
    ).to_dict()
    connect()
    pools = {"one": make_pool(1, shape), "two": make_pool(2, shape)}
    try:
        for name, pool in pools.items():
            tokens_per_s(pool, 10**6 + len(name))  # warm-up
        rates: dict[str, list[float]] = {name: [] for name in pools}
        for number in track(range(options.rounds), "rounds", disable=options.json, console=Console(stderr=True)):
            for name, pool in pools.items():
                rates[name].append(tokens_per_s(pool, 1000 * number))
    finally:
        for pool in pools.values():
            pool.close()
        disconnect()
    ratios = [two / one for one, two in zip(rates["one"], rates["two"], strict=True)]
    ratio = statistics.median(ratios)
    record = {
        "ratio": round(ratio, 3),
        "goal": GOAL,
        "within_goal": ratio >= GOAL,
        "tokens_per_s": {name: round(statistics.median(found), 1) for name, found in rates.items()},
        "ratios": [round(each, 3) for each in ratios],
        "settings": {"hidden": options.hidden, "layers": options.layers, "slots": SLOTS, "answer": ANSWER},
    }
    save("pool_scale", record)
    if options.json:
        print(json.dumps(record))
        return
    table = Table("engines", "tokens / s", "ratio", box=None)
    table.add_row("one", f"{record['tokens_per_s']['one']:,.0f}", "1")
    table.add_row("two", f"{record['tokens_per_s']['two']:,.0f}", f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
