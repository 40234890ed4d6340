"""What the controller's thread spends on each token, and where it cannot keep up with a cluster any more.

    python -m benchmarks.schedule.controller_limits [--model smollm2-135m] [--answers 2000] [--slots 16384] [--json]

Measured in CPU time of the thread, on answers of 700 tokens on average: receiving tokens from the engine into the
buffer, submitting complete answers (`SampleScorer.submit`), and everything else that the controller does per sample
(scheduling, events; from the simulated engine, as `controller_rate`). Scoring threads decode answers without Python's
lock, and write them as JSON with it: the controller cannot run meanwhile, so that time counts too. `loop_only` is the
same work with decoding and JSON in the controller's thread. The limit is the number of tokens a second at which the
lock is held all the time; beside it, how many H100s with Llama-3.1-8B and 32 slots sample so many.

`publication`: what the controller does around a publication while no engine decodes, with `--slots` slots
(`sorted-replay`, simulated): the longest times of its parts, and the forecast time of the publication itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import make_parser, save
from benchmarks.schedule.controller_rate import Stopwatch
from benchmarks.schedule.controller_rate import measure as measure_rate
from sortedrl import schedule as sorted_schedule
from sortedrl.buffer import Buffer
from sortedrl.config import SortedConfig
from sortedrl.controller import Controller
from sortedrl.engine.sim.engine import SimEngine
from sortedrl.learner.model import load_tokenizer
from sortedrl.records import FinishReason, Prompt, Sample, Segment
from sortedrl.reward.pool import RewardPool
from sortedrl.reward.scorer import SampleScorer
from sortedrl.run.builders.parts import model_path_here
from sortedrl.simulate.cluster_cost import load_cluster_cost
from sortedrl.simulate.costs import load_cost
from sortedrl.simulate.run import simulate
from sortedrl.simulate.traces import load_trace
from sortedrl.telemetry.events import ignore

MEAN_TOKENS, CHUNK, SLOTS = 700, 16, 32


def per_token_us(work: Callable[[], int]) -> float:
    """Microseconds of this thread's CPU time per token; `work` returns the number of tokens."""
    began = time.thread_time()
    tokens = work()
    return 1e6 * (time.thread_time() - began) / tokens


def make_samples(count: int, vocabulary: int) -> tuple[list[Sample], list[list[int]]]:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, count).astype(int), 1, 8192)
    answers = [rng.integers(0, vocabulary, length).tolist() for length in lengths]
    prompt = Prompt(id="0", tokens=(1, 2, 3), content="a question")
    samples = [
        Sample(id=number, prompt=prompt, index=number, epoch=0, cohort=0, seed=number, budget=8192)
        for number in range(count)
    ]
    return samples, answers


def receive(samples: list[Sample], answers: list[list[int]]) -> int:
    """Put the tokens of all answers into a buffer, in chunks as engines deliver them."""
    buffer = Buffer()
    buffer.load(samples)
    for sample, answer in zip(samples, answers, strict=True):
        buffer.start(sample)
        for start in range(0, len(answer), CHUNK):
            tokens = answer[start : start + CHUNK]
            buffer.append(sample, Segment(version=0, tokens=tokens, logprobs=[-1.0] * len(tokens)), start=start)
        buffer.finish(sample, FinishReason.STOP)
    return sum(map(len, answers))


def count_characters(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def measure(model: str, count: int) -> dict[str, Any]:
    config = SortedConfig(model={"path": model})
    folder = model_path_here(config)
    if folder is None:
        raise SystemExit(f"{model} is not here: `sortedrl doctor` or a first run fetches it, or give another --model")
    tokenizer = load_tokenizer(folder)
    samples, answers = make_samples(count, len(tokenizer))
    total = sum(map(len, answers))
    receive_us = per_token_us(lambda: receive(samples, answers))
    schedule_us = measure_rate("sorted-partial", 20_000, 1024)["us_per_sample"] / MEAN_TOKENS
    pool = RewardPool(count_characters, timeout_s=60.0, workers=1)
    scorer = SampleScorer(pool=pool, tokenizer=tokenizer)
    pool.start()

    def submit() -> int:
        for sample in samples:
            scorer.submit(sample)
        return total

    submit_us = per_token_us(submit)
    scored = 0
    while scored < count:
        scored += len(scorer.poll(10.0))
    pool.close()
    texts = [tokenizer.backend_tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]

    def decode() -> int:
        return (
            len([tokenizer.backend_tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]) and total
        )

    def dump() -> int:
        return (
            len([(json.dumps(text), json.dumps(tokens)) for text, tokens in zip(texts, answers, strict=True)]) and total
        )

    decode_us, json_us = per_token_us(decode), per_token_us(dump)
    thread = {"receive": receive_us, "submit": submit_us, "schedule and events": schedule_us}
    engine = load_cost("roofline")
    gpu_tokens_s = SLOTS / engine.decode_s(SLOTS, SLOTS * MEAN_TOKENS, 1)
    limit = 1e6 / (sum(thread.values()) + json_us)
    return {
        "model": model,
        "answers": count,
        "us_per_token": thread,
        "scoring_threads_us": {"decode, without the lock": decode_us, "JSON, with the lock": json_us},
        "loop_only_tokens_per_s": 1e6 / (sum(thread.values()) + decode_us + json_us),
        "tokens_per_s": limit,
        "tokens_per_s_per_gpu": gpu_tokens_s,
        "gpus": limit / gpu_tokens_s,
    }


def measure_publication(slots: int) -> dict[str, Any]:
    """The longest times of what the controller does around a publication with this many slots."""
    parts = {
        "end running attempts": Stopwatch(Controller, "pause_rollout"),
        "choose and take a batch": Stopwatch(Controller, "harvest"),
        "decide fates": Stopwatch(sorted_schedule, "decide_fates"),
        "settle": Stopwatch(Controller, "settle"),
        "start attempts": Stopwatch(Controller, "admit"),
    }
    with ExitStack() as stack:
        stack.enter_context(Stopwatch(SimEngine, "submit", "poll", "interrupt", "publish"))
        for part in parts.values():
            stack.enter_context(part)
        simulate(
            load_trace("lognormal(700, 1.1, 8192)", samples=4 * slots),
            strategy="sorted-replay",
            slots=slots,
            update_batch=slots // 2,
            cohort_batches=4,
            emit=ignore,
        )
    publish_s = load_cluster_cost(gpus=max(slots // 16, 8)).publish_s()
    return {"slots": slots, "longest_s": {name: part.longest for name, part in parts.items()}, "publish_s": publish_s}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer decodes")
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--slots", type=int, default=16384, help="for what is done around a publication")
    args = parser.parse_args()
    record = measure(args.model, args.answers) | {"publication": measure_publication(args.slots)}
    save("controller_limits", record)
    if args.json:
        print(json.dumps(record))
        return
    table = Table("what", "us per token", box=None)
    for name, value in (record["us_per_token"] | record["scoring_threads_us"]).items():
        table.add_row(name, f"{value:.3f}")
    console = Console()
    console.print(table)
    console.print(
        f"limit: {record['tokens_per_s']:,.0f} tokens/s, those of {record['gpus']:,.0f} H100s with {SLOTS} slots each; "
        f"with all of it in one thread {record['loop_only_tokens_per_s']:,.0f}"
    )
    table = Table(f"around a publication, {args.slots} slots", "longest, ms", box=None)
    for name, value in record["publication"]["longest_s"].items():
        table.add_row(name, f"{1e3 * value:.0f}")
    table.add_row("the publication itself (forecast)", f"{1e3 * record['publication']['publish_s']:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
