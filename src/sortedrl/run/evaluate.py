"""Evaluation: answers to a set of prompts, scored while the engine goes on, and their figures.

`Evaluator` runs before, after and at intervals of a training run, on the run's own engine while it has nothing else to
do; `run/suite_eval.py` runs the suites of `sortedrl eval`. Both call `answer_all`: all that is to be answered is one
oversubscribed batch, so a slot that gets free takes the next answer at once, whichever suite or temperature it has.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from sortedrl.clock import Clock
from sortedrl.engine.base import Delta, Engine, EngineStats, Failed, Finished, Request, Sampling, as_deltas
from sortedrl.protocols import Score
from sortedrl.records import FinishReason, Prompt, sample_seed
from sortedrl.run.scores import Figures, Graded, average, figures
from sortedrl.telemetry.events import Emit, Evaluated

HELDOUT_EPOCH = -1  # sets the seeds of evaluation apart from those of training
SCORE_POLL_S = 0.1  # how long to wait for a score when nothing is left to generate


class AnswerScorer(Protocol):
    """Scores answers in the background; nothing but the evaluation may be under way in it."""

    @property
    def failure(self) -> Exception | None:
        """Why scoring is to end, if it is."""
        ...

    def submit_answer(self, key: tuple[int, int], prompt: Prompt, tokens: Sequence[int]) -> None: ...

    def poll(self, timeout: float) -> Sequence[Score]: ...


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer that is wanted, and what became of it. `index` counts the sampled answers to one prompt."""

    prompt: Prompt
    temperature: float
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    reward: float = 0.0

    def graded(self, vote: str | None = None) -> Graded:
        is_truncated = self.reason is FinishReason.LENGTH
        return Graded(reward=self.reward, length=len(self.tokens), is_truncated=is_truncated, vote=vote)


def answer_all(
    engine: Engine,
    scorer: AnswerScorer,
    answers: Sequence[Answer],
    *,
    sampling: Sampling,
    budget: int,
    seed: int,
    on_scored: Callable[[Answer], None] | None = None,
) -> None:
    """Have every answer written and scored. One on which the engine fails is scored as it is.

    `sampling` holds for all of them, but for the temperature, which is the answer's own.
    """
    waiting = deque(_request(number, answer, sampling, budget, seed) for number, answer in enumerate(answers))
    num_running = num_scored = 0
    while num_scored < len(answers):
        num_free = min(engine.capabilities.slots - num_running, len(waiting))
        engine.submit([waiting.popleft() for _ in range(num_free)])
        num_running += num_free
        for event in as_deltas(engine.poll()) if num_running else ():
            answer = answers[event.sample]
            match event:
                case Delta():
                    answer.tokens[event.start :] = event.tokens
                case Finished() | Failed():
                    num_running -= 1
                    answer.reason = event.reason if isinstance(event, Finished) else FinishReason.FAILED
                    scorer.submit_answer((event.sample, 0), answer.prompt, answer.tokens)
                case _:
                    pass
        for score in scorer.poll(0.0 if num_running or waiting else SCORE_POLL_S):
            num_scored += 1
            answers[score.key[0]].reward = score.reward
            if on_scored is not None:
                on_scored(answers[score.key[0]])
        if scorer.failure is not None:
            raise scorer.failure


def _request(number: int, answer: Answer, sampling: Sampling, budget: int, seed: int) -> Request:
    return Request(
        sample=number,
        attempt=0,
        prompt=answer.prompt.tokens,
        budget=budget,
        seed=sample_seed(seed, HELDOUT_EPOCH, answer.prompt.id, answer.index),
        sampling=replace(sampling, temperature=answer.temperature),
    )


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """`every_samples` = 0 leaves it to the caller when to run; a reward above `right_above` makes an answer right."""

    engine: Engine
    prompts: Sequence[Prompt]
    scorer: AnswerScorer
    sampling: Sampling  # as in training; a greedy answer to each prompt comes besides
    budget: int
    seed: int
    clock: Clock
    emit: Emit
    right_above: float = 0.5
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
        sampled, greedy = self.answers()
        self.used = self.used.plus(self.engine.stats().minus(before))
        self.last_run = num_trained
        found = self._figures(sampled)
        self.emit(
            Evaluated(
                t=self.clock.now(),
                version=version,
                samples_trained=num_trained,
                sampled_accuracy=found.mean_at_k,
                greedy_accuracy=self._figures(greedy).mean_at_k,
                mean_length=found.mean_length,
                by_group=self._by_group(sampled, greedy),
                sampled_accuracy_se=found.mean_at_k_se,
                pass_at_k=found.pass_at_k,
                truncation_rate=found.truncation_rate,
                sampled_reward=average(average(answer.reward for answer in of_prompt) for of_prompt in sampled),
            )
        )

    def answers(self) -> tuple[list[list[Answer]], list[list[Answer]]]:
        """Sampled answers to every prompt, and a greedy one: by prompt, scored."""
        indices = range(self.num_samples)
        sampled = [
            [Answer(prompt=p, temperature=self.sampling.temperature, index=i) for i in indices] for p in self.prompts
        ]
        greedy = [[Answer(prompt=prompt, temperature=0.0)] for prompt in self.prompts]
        # Those of one prompt follow each other: an engine may then read the prompt once for all of them.
        every = [answer for pair in zip(sampled, greedy, strict=True) for answers in pair for answer in answers]
        answer_all(self.engine, self.scorer, every, sampling=self.sampling, budget=self.budget, seed=self.seed)
        return sampled, greedy

    def _by_group(self, sampled: list[list[Answer]], greedy: list[list[Answer]]) -> dict[str, dict[str, float]]:
        if self.group_column is None:
            return {}
        groups: dict[str, list[int]] = defaultdict(list)
        for number, prompt in enumerate(self.prompts):
            groups[str(prompt.columns.get(self.group_column))].append(number)
        found: dict[str, dict[str, float]] = {}
        for name, numbers in sorted(groups.items()):
            of_group = self._figures([sampled[number] for number in numbers])
            found[name] = {
                "sampled_accuracy": of_group.mean_at_k,
                "greedy_accuracy": self._figures([greedy[number] for number in numbers]).mean_at_k,
                "mean_length": of_group.mean_length,
                "count": float(of_group.num_samples),
            }
        return found

    def _figures(self, answers: Sequence[Sequence[Answer]]) -> Figures:
        """Of answers that are right or wrong: what a wrong one earns for its form is no accuracy."""
        marks = [[replace(a.graded(), reward=float(a.reward > self.right_above)) for a in each] for each in answers]
        return figures(marks)
