"""Evaluation: generate answers to a set of prompts, score them while the engine decodes, and compute accuracies.

`Evaluator` evaluates a training run before, during and after training, on the run's engine while training is paused;
`suite_eval.py` evaluates the suites of `sortedrl eval`. Both call `answer_all`, which submits all answers as one
oversubscribed batch: a free slot takes the next answer at once, of any suite and temperature.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from sortedrl.clock import Clock
from sortedrl.engine.base import Delta, Engine, EngineStats, Failed, Finished, Request, Sampling, Span, as_deltas
from sortedrl.protocols import Score
from sortedrl.records import FinishReason, Mode, Prompt, sample_seed
from sortedrl.run.scores import Figures, Graded, average, figures
from sortedrl.telemetry.events import Emit, Evaluated

HELDOUT_EPOCH = -1  # an epoch that training never has, so that evaluation has other seeds
TOOL_POLL_S = 0.02  # the same for tools
SCORE_POLL_S = 0.1  # how long one poll waits for scores when all answers are generated


class AnswerScorer(Protocol):
    """Scores answers in the background; during an evaluation it must have no other work."""

    @property
    def failure(self) -> Exception | None:
        """The error that must stop the run, or None."""
        ...

    def submit_answer(
        self, key: tuple[int, int], prompt: Prompt, tokens: Sequence[int], masked: Sequence[range] = ()
    ) -> None: ...

    def poll(self, timeout: float) -> Sequence[Score]: ...


class AnswerTools(Protocol):
    """The environments of an evaluation (`environment/answers.py`)."""

    def begin(self, num_answers: int) -> None: ...

    def take(self, number: int, prompt: Prompt, tokens: Sequence[int], masked: Sequence[range]) -> bool: ...

    def poll(self, timeout: float) -> Sequence[tuple[int, list[int]]]: ...

    def reward_turn(self, number: int, prompt: Prompt, tokens: Sequence[int], masked: Sequence[range]) -> Any: ...


@dataclass(slots=True, kw_only=True)
class EvalAnswer:
    """One requested answer and its result. `index` numbers the sampled answers to one prompt."""

    prompt: Prompt
    temperature: float
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    masked: list[range] = field(default_factory=list)  # positions of tokens that tools fed
    reason: FinishReason | None = None
    reward: float = 0.0

    def graded(self, vote: str | None = None) -> Graded:
        is_truncated = self.reason is FinishReason.LENGTH
        return Graded(reward=self.reward, length=len(self.tokens), is_truncated=is_truncated, vote=vote)


def answer_all(
    engine: Engine,
    scorer: AnswerScorer,
    answers: Sequence[EvalAnswer],
    *,
    sampling: Sampling,
    budget: int,
    seed: int,
    epoch: int = HELDOUT_EPOCH,
    on_scored: Callable[[EvalAnswer], None] | None = None,
    tools: AnswerTools | None = None,
    has_reward: bool = False,
) -> None:
    """Generate and score every answer, in place. An answer on which the engine fails is scored with the tokens it has.

    `sampling` holds for all answers, except that each has its own temperature. With `tools`, an answer may have several
    turns; `has_reward`: environments give rewards too. Another `epoch` gives other noise.
    """

    def submit_score(number: int) -> None:
        answer = answers[number]
        if tools is None:
            scorer.submit_answer((number, 0), answer.prompt, answer.tokens)
            return
        asked: dict[str, Any] = {}
        if has_reward:
            asked["turn"] = tools.reward_turn(number, answer.prompt, answer.tokens, answer.masked)
        scorer.submit_answer((number, 0), answer.prompt, answer.tokens, answer.masked, **asked)

    waiting = deque(_request(number, answer, sampling, budget, seed, epoch) for number, answer in enumerate(answers))
    num_running = num_scored = num_calling = 0
    if tools is not None:
        tools.begin(len(answers))
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
                    turn = (event.sample, answer.prompt, answer.tokens, answer.masked)
                    if tools is not None and answer.reason is FinishReason.STOP and tools.take(*turn):
                        num_calling += 1
                    else:
                        submit_score(event.sample)
                case _:
                    pass
        if tools is not None and num_calling:
            for number, fed in tools.poll(0.0 if num_running or waiting else TOOL_POLL_S):
                num_calling -= 1
                answer = answers[number]
                if fed and len(answer.tokens) + len(fed) < budget:
                    answer.masked.append(range(len(answer.tokens), len(answer.tokens) + len(fed)))
                    answer.tokens += fed
                    waiting.append(_request(number, answer, sampling, budget, seed, epoch))
                else:
                    submit_score(number)
        for score in scorer.poll(0.0 if num_running or waiting or num_calling else SCORE_POLL_S):
            num_scored += 1
            answers[score.key[0]].reward = score.reward
            if on_scored is not None:
                on_scored(answers[score.key[0]])
        if scorer.failure is not None:
            raise scorer.failure


def _request(number: int, answer: EvalAnswer, sampling: Sampling, budget: int, seed: int, epoch: int) -> Request:
    return Request(
        sample=number,
        attempt=0,
        prompt=answer.prompt.tokens,
        budget=budget,
        seed=sample_seed(seed, epoch, answer.prompt.id, answer.index),
        sampling=replace(sampling, temperature=answer.temperature),
        mode=Mode.RESUME if answer.tokens else Mode.FRESH,
        cached=list(answer.tokens),
        spans=_spans(answer),
    )


def _spans(answer: EvalAnswer) -> list[Span]:
    """The turns of an answer that goes on."""
    spans: list[Span] = []
    end = 0
    for fed in answer.masked:
        spans += [Span(0, fed.start - end), Span(0, len(fed), True)]
        end = fed.stop
    return spans


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """`every_samples` = 0: the caller decides when it runs. An answer is right if its reward is above `right_above`.

    `has_fresh_noise`: the noise depends on the number of trained samples, so that each evaluation has its own.
    """

    engine: Engine
    prompts: Sequence[Prompt]
    scorer: AnswerScorer
    sampling: Sampling  # as in training; each prompt also gets one greedy answer
    budget: int
    seed: int
    clock: Clock
    emit: Emit
    right_above: float = 0.5
    num_samples: int = 1
    has_fresh_noise: bool = False
    group_column: str | None = None
    every_samples: int = 0
    last_run: int = -1  # number of trained samples at the last evaluation
    tools: AnswerTools | None = None
    has_environment_reward: bool = False
    used: EngineStats = field(default_factory=EngineStats)  # the share of the engine's counters that evaluation caused

    def is_due(self, num_trained: int) -> bool:
        return bool(self.prompts) and 0 < self.every_samples <= num_trained - max(self.last_run, 0)

    def run(self, version: int, num_trained: int) -> None:
        if not self.prompts or num_trained == self.last_run:
            return
        before = self.engine.stats()
        try:
            sampled, greedy = self.answers(num_trained)
        finally:
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

    def answers(self, num_trained: int = 0) -> tuple[list[list[EvalAnswer]], list[list[EvalAnswer]]]:
        """The scored answers by prompt: the sampled ones, and the greedy ones."""
        epoch = HELDOUT_EPOCH - num_trained if self.has_fresh_noise else HELDOUT_EPOCH
        indices, temperature = range(self.num_samples), self.sampling.temperature
        sampled = [[EvalAnswer(prompt=p, temperature=temperature, index=i) for i in indices] for p in self.prompts]
        greedy = [[EvalAnswer(prompt=prompt, temperature=0.0)] for prompt in self.prompts]
        # Answers to one prompt are submitted together, so that an engine can prefill the prompt once.
        every = [answer for pair in zip(sampled, greedy, strict=True) for answers in pair for answer in answers]
        answer_all(
            self.engine,
            self.scorer,
            every,
            sampling=self.sampling,
            budget=self.budget,
            seed=self.seed,
            epoch=epoch,
            tools=self.tools,
            has_reward=self.has_environment_reward,
        )
        return sampled, greedy

    def _by_group(self, sampled: list[list[EvalAnswer]], greedy: list[list[EvalAnswer]]) -> dict[str, dict[str, float]]:
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

    def _figures(self, answers: Sequence[Sequence[EvalAnswer]]) -> Figures:
        """Figures of right (1) and wrong (0) answers: partial rewards, such as for the format, do not count."""
        marks = [[replace(a.graded(), reward=float(a.reward > self.right_above)) for a in each] for each in answers]
        return figures(marks)
