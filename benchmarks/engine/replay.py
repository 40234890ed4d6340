"""Is replay exact, and how much does it save? Interrupted samples are finished twice: by replay and by a restart.

    python -m benchmarks.engine.replay [--samples 500] [--seed 0] [--lr 5e-4] [--model FOLDER] [--unverified] [--json]

Each round samples answers on the local engine and interrupts half of them at random steps. It trains one GRPO update on
the other half and publishes the new weights. Then it finishes every interrupted sample twice: by replay of its cached
tokens, and by a restart. Both must give the same tokens with the same log-probs. Only rounding can cause a mismatch:
decode and prefill add numbers in a different order, which can change the winner between two nearly equal scores.

With `--unverified` that half is not interrupted (`schedule.max_unverified = none`): it goes on through the publication,
to the end, over the cache that it has, and the replay verifies the complete answer.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.record import make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.engine.base import Delta, EngineEvent, Finished, InFlight, Partial, Request, Sampling, Verified
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.learner.torch import TorchLearner
from sortedrl.records import Batch, FinishReason, Mode, Sample, Segment, State, sample_seed
from sortedrl.run.builders.generation import stop_token_ids
from sortedrl.run.builders.parts import prompt_stream
from sortedrl.run.checkpoint_folder import load_model
from sortedrl.tasks.knights import KnightsTask, verify
from sortedrl.tasks.tiny import knights_tiny_path

BUCKETS = (16, 32, 64, 128, 1024)
SIBLINGS = 8


@dataclass(slots=True, kw_only=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    accepted: int = 0
    decoded: int = 0  # tokens that were decoded one at a time


@dataclass(slots=True, kw_only=True, frozen=True)
class Pair:
    """One interrupted sample, finished by replay and by a restart."""

    cached: int
    replayed: Answer
    restarted: Answer

    @property
    def is_same(self) -> bool:
        return self.replayed.tokens == self.restarted.tokens

    @property
    def logprob_gap(self) -> float:
        gaps = zip(self.replayed.logprobs, self.restarted.logprobs, strict=True)
        return max((abs(a - b) for a, b in gaps), default=0.0) if self.is_same else 0.0


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.rng = random.Random(options.seed)
        self.goes_on = options.unverified
        self.config = SortedConfig(
            run={"seed": options.seed}, learner={"lr": options.lr, "group_size": SIBLINGS}, engine={"slots": 64}
        )
        folder = knights_tiny_path() if options.model == "knights-tiny" else options.model
        self.model, self.tokenizer = load_model(folder)
        self.engine = LocalEngine(self.model, slots=64, max_length=768)
        self.learner = TorchLearner(self.model, self.config.learner, temperature=1.0)
        self.stream = prompt_stream(self.config, KnightsTask(seed=options.seed), self.tokenizer)
        self.sampling = Sampling(stop_tokens=stop_token_ids(self.model, self.tokenizer))
        self.version = 0
        self.attempt = 0

    def round(self) -> list[Pair]:
        """Interrupt half of the samples, train on the others, then finish the interrupted ones both ways."""
        samples = self.load()
        train = [sample for sample in samples if (sample.id // SIBLINGS) % 2 == 0]
        cut = [sample for sample in samples if (sample.id // SIBLINGS) % 2 == 1]
        self.write(train, self.finish([self.request(sample) for sample in train]))
        if self.goes_on:
            self.write(cut, self.written_through_an_update(cut, train))
        else:
            self.write(cut, self.interrupted(cut))
            self.update(train)
        cut = [sample for sample in cut if sample.num_tokens]
        replayed = self.finish([self.request(sample, mode=Mode.REPLAY) for sample in cut])
        restarted = self.finish([self.request(sample) for sample in cut])
        return [
            Pair(cached=sample.num_tokens, replayed=replayed[sample.id], restarted=restarted[sample.id])
            for sample in cut
        ]

    def load(self) -> list[Sample]:
        return [
            Sample(
                id=number * SIBLINGS + index,
                prompt=prompt,
                index=index,
                epoch=epoch,
                cohort=0,
                seed=sample_seed(0, epoch, prompt.id, index),
                budget=512,
            )
            for number, (epoch, prompt) in enumerate(self.stream.take(128 // SIBLINGS))
            for index in range(SIBLINGS)
        ]

    def request(self, sample: Sample, mode: Mode = Mode.FRESH) -> Request:
        self.attempt += 1
        return Request(
            sample=sample.id,
            attempt=self.attempt,
            prompt=sample.prompt.tokens,
            budget=sample.budget,
            seed=sample.seed,
            sampling=self.sampling,
            mode=mode,
            cached=sample.tokens if mode == Mode.REPLAY else (),
        )

    def finish(self, requests: Iterable[Request]) -> dict[int, Answer]:
        """The answers of all requests; 64 run at a time."""
        waiting, answers, running = list(requests), {}, 0
        while waiting or running:
            free = min(64 - running, len(waiting))
            batch, waiting = waiting[:free], waiting[free:]
            answers.update({request.sample: Answer() for request in batch})
            self.engine.submit(batch)
            running += free - self.take(self.engine.poll(), answers)
        return answers

    def interrupted(self, samples: list[Sample]) -> dict[int, Answer]:
        """Partial answers: each sample is interrupted after a random number of decode steps."""
        answers = {sample.id: Answer() for sample in samples}
        self.engine.submit([self.request(sample) for sample in samples])
        stop_at = {sample.id: int(2 ** self.rng.uniform(1, 8)) for sample in samples}
        running, step = {sample.id for sample in samples}, 0
        while running:
            step += 1
            events = self.engine.poll(timeout=0)
            events += self.engine.interrupt([sample for sample in running if stop_at[sample] <= step])
            self.take(events, answers)
            running -= {event.sample for event in events if isinstance(event, Finished | Partial)}
        return answers

    def written_through_an_update(self, samples: list[Sample], train: list[Sample]) -> dict[int, Answer]:
        """Complete answers: the weights change after a random number of decode steps."""
        answers = {sample.id: Answer() for sample in samples}
        self.engine.submit([self.request(sample) for sample in samples])
        running = len(samples)
        for _ in range(int(2 ** self.rng.uniform(1, 6))):
            running -= self.take(self.engine.poll(timeout=0), answers)
        self.update(train, InFlight.KEEP)
        while running:
            running -= self.take(self.engine.poll(), answers)
        return answers

    @staticmethod
    def take(events: list[EngineEvent], answers: dict[int, Answer]) -> int:
        """Add the events to the answers; returns how many attempts ended."""
        for event in events:
            answer = answers[event.sample]
            if isinstance(event, Verified):
                answer.accepted = event.accepted
            elif isinstance(event, Delta):
                answer.tokens[event.start :] = event.tokens
                answer.logprobs[event.start :] = event.logprobs
                answer.decoded = len(answer.tokens) - answer.accepted
        return sum(isinstance(event, Finished | Partial) for event in events)

    def write(self, samples: list[Sample], answers: dict[int, Answer]) -> None:
        for sample in samples:
            answer = answers[sample.id]
            if answer.tokens:
                sample.segments = [Segment(version=self.version, tokens=answer.tokens, logprobs=answer.logprobs)]

    def update(self, samples: list[Sample], in_flight: InFlight = InFlight.ABORT) -> None:
        texts = [self.tokenizer.decode(sample.tokens, skip_special_tokens=True) for sample in samples]
        answers = [str(sample.prompt.columns["answer"]) for sample in samples]
        rewards = verify([str(sample.prompt.content) for sample in samples], texts, answers)
        for sample, reward in zip(samples, rewards, strict=True):
            sample.reward, sample.state, sample.finish_reason = reward, State.TRAINED, FinishReason.STOP
        self.learner.start(Batch(update=self.version, version=self.version, samples=tuple(samples))).result()
        self.version += 1
        self.engine.publish(self.version, self.learner.source, in_flight).wait()


def figures(pairs: list[Pair]) -> dict[str, Any]:
    rejected = sum(pair.replayed.accepted < pair.cached for pair in pairs)
    accepted = sum(pair.replayed.accepted for pair in pairs)
    decoded = sum(pair.replayed.decoded for pair in pairs)
    return {
        "samples": len(pairs),
        "mismatches": sum(not pair.is_same for pair in pairs),
        "logprob_gap_max": max(pair.logprob_gap for pair in pairs),
        "cached_tokens": sum(pair.cached for pair in pairs),
        "divergence_rate": rejected / max(accepted + rejected, 1),
        "accepted_prefix": sum(pair.replayed.accepted / pair.cached for pair in pairs) / len(pairs),
        "accepted_prefix_by_token": accepted / sum(pair.cached for pair in pairs),
        "decode_steps_saved": 1 - decoded / sum(len(pair.restarted.tokens) for pair in pairs),
    }


def by_length(pairs: list[Pair]) -> dict[str, Any]:
    """The same figures by the length of the cached prefix."""
    low, rows = 0, {}
    for high in BUCKETS:
        inside = [pair for pair in pairs if low < pair.cached <= high]
        if inside:
            rows[f"{low + 1}-{high}"] = figures(inside)
        low = high
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    bench, pairs = Bench(options), []
    while len(pairs) < options.samples:
        pairs += bench.round()
    return {**figures(pairs), "updates": bench.version, "by_cached_length": by_length(pairs)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--model", default="knights-tiny")
    parser.add_argument("--unverified", action="store_true", help="answers go on through the update, then are verified")
    options = parser.parse_args()
    result = measure(options)
    if options.json:
        print(json.dumps(result))
        return
    columns = ("samples", "mismatches", "logprob_gap_max", "divergence_rate", "accepted_prefix", "decode_steps_saved")
    table = Table("cached tokens", *columns, title=f"Replay against restart, {result['updates']} updates")
    for name, row in {**result["by_cached_length"], "all": result}.items():
        table.add_row(name, *(f"{row[column]:.3g}" for column in columns))
    Console(width=120).print(table)
    name = "replay-unverified" if options.unverified else "replay"
    print(f"saved {save(name, {'arguments': vars(options), **result})}", file=sys.stderr)


if __name__ == "__main__":
    main()
