"""Evaluation on held-out prompts: sampled and greedy accuracy, by group, and the length of answers.

Used before, after and at intervals of a training run, on the run's own engine while it has nothing else to do. The
whole set is one oversubscribed batch: a slot that gets free takes the next answer at once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sortedrl.clock import Clock
from sortedrl.engine.base import Delta, Engine, EngineStats, Failed, Finished, Request, Sampling, as_deltas
from sortedrl.records import Prompt, sample_seed
from sortedrl.telemetry.events import Emit, Evaluated

ScoreAnswers = Callable[[Sequence[Prompt], Sequence[Sequence[int]]], list[float]]
"""Rewards of answers, given as tokens."""

HELDOUT_EPOCH = -1  # sets the seeds of evaluation apart from those of training


@dataclass(slots=True, kw_only=True)
class Answer:
    prompt: Prompt
    tokens: list[int] = field(default_factory=list)
    reward: float = 0.0


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """`every_samples` = 0 leaves it to the caller when to run."""

    engine: Engine
    prompts: Sequence[Prompt]
    score: ScoreAnswers
    stop_tokens: tuple[int, ...]
    budget: int
    seed: int
    clock: Clock
    emit: Emit
    temperature: float = 1.0
    num_samples: int = 1
    group_column: str | None = None
    every_samples: int = 0
    last_run: int = -1  # samples trained when it ran last
    used: EngineStats = field(default_factory=EngineStats)  # the engine's counters that evaluation caused

    def is_due(self, num_trained: int) -> bool:
        return bool(self.prompts) and 0 < self.every_samples <= num_trained - max(self.last_run, 0)

    def run(self, version: int, num_trained: int) -> None:
        if not self.prompts or num_trained == self.last_run:
            return
        before = self.engine.stats()
        sampled = self.answers(self.temperature, self.num_samples)
        greedy = self.answers(0.0, 1)
        self.used = self.used.plus(self.engine.stats().minus(before))
        self.last_run = num_trained
        self.emit(
            Evaluated(
                t=self.clock.now(),
                version=version,
                samples_trained=num_trained,
                sampled_accuracy=_mean(answer.reward for answer in sampled),
                greedy_accuracy=_mean(answer.reward for answer in greedy),
                mean_length=_mean(len(answer.tokens) for answer in sampled),
                by_group=self._by_group(sampled, greedy),
            )
        )

    def answers(self, temperature: float, num_samples: int) -> list[Answer]:
        """Answer and score every prompt `num_samples` times."""
        answers = [Answer(prompt=prompt) for prompt in self.prompts for _ in range(num_samples)]
        sampling = Sampling(temperature=temperature, stop_tokens=self.stop_tokens)
        waiting = deque(
            Request(
                sample=number,
                attempt=0,
                prompt=answer.prompt.tokens,
                budget=self.budget,
                seed=sample_seed(self.seed, HELDOUT_EPOCH, answer.prompt.id, number % num_samples),
                sampling=sampling,
            )
            for number, answer in enumerate(answers)
        )
        running = 0
        while waiting or running:
            free = min(self.engine.capabilities.slots - running, len(waiting))
            self.engine.submit([waiting.popleft() for _ in range(free)])
            running += free
            for event in as_deltas(self.engine.poll()):
                match event:
                    case Delta():
                        answers[event.sample].tokens[event.start :] = event.tokens
                    case Finished() | Failed():
                        running -= 1
                    case _:
                        pass
        rewards = self.score([answer.prompt for answer in answers], [answer.tokens for answer in answers])
        for answer, reward in zip(answers, rewards, strict=True):
            answer.reward = reward
        return answers

    def _by_group(self, sampled: list[Answer], greedy: list[Answer]) -> dict[str, dict[str, float]]:
        if self.group_column is None:
            return {}
        groups: dict[str, dict[str, list[Answer]]] = defaultdict(lambda: {"sampled": [], "greedy": []})
        for kind, answers in (("sampled", sampled), ("greedy", greedy)):
            for answer in answers:
                groups[str(answer.prompt.columns.get(self.group_column))][kind].append(answer)
        return {
            name: {
                "sampled_accuracy": _mean(answer.reward for answer in group["sampled"]),
                "greedy_accuracy": _mean(answer.reward for answer in group["greedy"]),
                "mean_length": _mean(len(answer.tokens) for answer in group["sampled"]),
                "count": float(len(group["sampled"])),
            }
            for name, group in sorted(groups.items())
        }


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0
