"""What it saves that the cache of a trajectory is kept while its tools work: prefilled tokens, and seconds of rollout.

    python -m benchmarks.engine.kept_prefixes [--model smollm2-135m|tools-tiny] [--rows 8] [--json]

Every trajectory has a prompt of 64 tokens and six turns of 24 tokens; after each turn but the last, 16 tokens are fed
as a tool's result. Twice as many trajectories are open as there are slots, as in `tools` and `tools-smollm2`. Tools
take no time: one that ends a turn waits until the others before it have had a slot. The engine runs the same
trajectories without and with kept prefixes, in turns, and must write the same tokens and log-probs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.record import make_parser, save
from benchmarks.schedule.tools import DrawnAttempt
from sortedrl.config import SortedConfig
from sortedrl.engine.base import Delta, Failed, Finished, Request, Sampling, Span
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.records import Mode
from sortedrl.run.builders.parts import load_model, model_path

SLOTS, OPEN = 8, 16
PROMPT, TURNS, OWN, FED = 64, 6, 24, 16  # tokens of the prompt, of a turn, and of what a tool returns
WHOLE = TURNS * OWN + (TURNS - 1) * FED
LOW, HIGH = 3, 30  # prompts and results are of these tokens, which every vocabulary has


class TurnEngine(LocalEngine):
    """The local engine, with turns of equal length."""

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            num_turns = sum(span.is_masked for span in request.spans) + 1
            budget = num_turns * OWN + (num_turns - 1) * FED
            self._pending.append(DrawnAttempt.begin(replace(request, budget=budget)))


def roll_out(engine: TurnEngine, num: int) -> dict[str, Any]:
    """Run all trajectories; returns their tokens and log-probs, and what the engine did."""
    rng = torch.Generator().manual_seed(0)
    waiting = deque(_first(number, rng) for number in range(num))
    coming: deque[Request] = deque()
    running: dict[int, Request] = {}
    tokens: dict[int, list[int]] = {number: [] for number in range(num)}
    logprobs: dict[int, list[float]] = {number: [] for number in range(num)}
    before, began = engine.stats(), time.perf_counter()
    while waiting or coming or running:
        while len(running) < SLOTS and (waiting or coming):
            may_open = waiting and len(running) + len(coming) < OPEN
            request = waiting.popleft() if may_open else coming.popleft()
            running[request.sample] = request
            engine.submit([request])
        for event in engine.poll():
            if isinstance(event, Delta):
                tokens[event.sample] += event.tokens
                logprobs[event.sample] += event.logprobs
            elif isinstance(event, Failed):
                raise SystemExit(event.error)
            elif isinstance(event, Finished):
                request = running.pop(event.sample)
                if len(tokens[event.sample]) < WHOLE:
                    place = event.sample + len(tokens[event.sample])
                    tokens[event.sample] += [LOW + (place + 7 * number) % (HIGH - LOW) for number in range(FED)]
                    logprobs[event.sample] += [0.0] * FED
                    coming.append(_next(request, list(tokens[event.sample])))
    seconds, used = time.perf_counter() - began, engine.stats().minus(before)
    assert all(len(answer) == WHOLE for answer in tokens.values()), "a trajectory is not complete"
    prefilled = used.prompt_tokens + used.recomputed_tokens
    return {"tokens": tokens, "logprobs": logprobs, "seconds": seconds, "prefilled_tokens": prefilled}


def _first(number: int, rng: torch.Generator) -> Request:
    prompt = tuple(torch.randint(LOW, HIGH, (PROMPT,), generator=rng).tolist())
    return Request(number, 0, prompt, WHOLE, number, Sampling(), Mode.FRESH, (), ())


def _next(done: Request, cached: list[int]) -> Request:
    spans = (*done.spans, Span(0, OWN), Span(0, FED, is_masked=True))
    return replace(done, attempt=done.attempt + 1, mode=Mode.RESUME, cached=cached, spans=spans)


def measure(options: Any) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    model, _ = load_model(model_path(SortedConfig(model={"path": options.model})))
    engines = {
        rows: TurnEngine(
            model.eval(), slots=SLOTS, max_length=PROMPT + WHOLE, path="native", kept_prefixes=rows, drafts="off"
        )
        for rows in (0, options.rows)
    }
    runs: dict[int, list[dict[str, Any]]] = {rows: [] for rows in engines}
    for _ in range(options.rounds):
        for rows, engine in engines.items():
            runs[rows].append(roll_out(engine, options.trajectories))
    first = runs[0][0]
    for run in (run for found in runs.values() for run in found):
        assert run["tokens"] == first["tokens"], "kept prefixes changed an answer"
        assert run["logprobs"] == first["logprobs"], "kept prefixes changed log-probs"
    without, kept = (
        {
            "seconds": statistics.median(run["seconds"] for run in found),
            "prefilled_tokens": found[-1]["prefilled_tokens"],
        }
        for found in runs.values()
    )
    return {
        "model": options.model,
        "trajectories": options.trajectories,
        "rows": options.rows,
        "threads": options.threads,
        "without": without,
        "kept": kept,
        "seconds_ratio": kept["seconds"] / without["seconds"],
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=OPEN - SLOTS, help="rows for kept prefixes")
    parser.add_argument("--trajectories", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    result = measure(options)
    if not options.json:
        save("kept_prefixes", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
