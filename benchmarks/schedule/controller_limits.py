"""What the controller's thread spends on each token, and where it cannot keep up with a cluster any more.

    python -m benchmarks.schedule.controller_limits [--model smollm2-135m] [--answers 400] [--json]

Measured in CPU time of the thread, on answers of 700 tokens on average: receiving tokens from the engine into the
buffer, decoding a complete answer to text and writing it as JSON for a reward worker (`SampleScorer.submit`), and
everything else that the controller does per sample (scheduling, events; from the simulated engine, as
`controller_rate`). The limit is the number of tokens a second at which the thread is busy all the time; beside it, how
many H100s with Llama-3.1-8B and 32 slots sample so many.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import make_parser, save
from benchmarks.schedule.controller_rate import measure as measure_rate
from sortedrl.buffer import Buffer
from sortedrl.config import SortedConfig
from sortedrl.learner.model import load_tokenizer
from sortedrl.records import FinishReason, Prompt, Sample, Segment
from sortedrl.reward.pool import RewardPool
from sortedrl.reward.scorer import SampleScorer
from sortedrl.run.builders.parts import model_path_here
from sortedrl.simulate.costs import load_cost

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
    receive_us = per_token_us(lambda: receive(samples, answers))
    pool = RewardPool(count_characters, timeout_s=60.0, workers=1)
    scorer = SampleScorer(pool=pool, tokenizer=tokenizer)
    pool.start()

    def submit() -> int:
        for sample in samples:
            scorer.submit(sample)
        return sum(map(len, answers))

    submit_us = per_token_us(submit)
    scored = 0
    while scored < count:
        scored += len(scorer.poll(10.0))
    pool.close()
    schedule_us = measure_rate("sorted-partial", 20_000, 1024)["us_per_sample"] / MEAN_TOKENS
    parts = {"receive": receive_us, "decode and JSON": submit_us, "schedule and events": schedule_us}
    engine = load_cost("roofline")
    gpu_tokens_s = SLOTS / engine.decode_s(SLOTS, SLOTS * MEAN_TOKENS, 1)
    limit = 1e6 / sum(parts.values())
    return {
        "model": model,
        "answers": count,
        "us_per_token": parts,
        "tokens_per_s": limit,
        "tokens_per_s_per_gpu": gpu_tokens_s,
        "gpus": limit / gpu_tokens_s,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer decodes")
    parser.add_argument("--answers", type=int, default=400)
    args = parser.parse_args()
    record = measure(args.model, args.answers)
    save("controller_limits", record)
    if args.json:
        print(json.dumps(record))
        return
    table = Table("what", "us per token", box=None)
    for name, value in record["us_per_token"].items():
        table.add_row(name, f"{value:.3f}")
    console = Console()
    console.print(table)
    console.print(
        f"limit: {record['tokens_per_s']:,.0f} tokens/s, those of {record['gpus']:,.0f} H100s with {SLOTS} slots each"
    )


if __name__ == "__main__":
    main()
