"""Evaluation on the real engine, against the task's verifier and a plain `generate`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from sortedrl.buffer import Buffer
from sortedrl.clock import WallClock
from sortedrl.config import SortedConfig
from sortedrl.controller import Controller
from sortedrl.engine.base import EngineStats, Request, Sampling
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.errors import RewardError
from sortedrl.learner.model import load_tokenizer
from sortedrl.records import FinishReason, Prompt, sample_seed
from sortedrl.reward.pool import RewardPool, RewardScore
from sortedrl.reward.scorer import SampleScorer
from sortedrl.run.builders.loop import build_evaluator, build_loop
from sortedrl.run.builders.parts import RunParts, build_parts
from sortedrl.run.evaluate import EvalAnswer, Evaluator, answer_all
from sortedrl.tasks.knights import KnightsTask, verify
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.telemetry.events import Evaluated, Event
from tests.support.tiny_models import Caller

NUM_PROMPTS, NUM_SAMPLES, BUDGET, SEED = 12, 2, 96, 5


@dataclass
class EvaluatedRun:
    parts: RunParts
    evaluator: Evaluator
    controller: Controller
    events: list[Event]

    def stats(self) -> EngineStats:
        return self.parts.engine.stats().minus(self.evaluator.used)


@contextmanager
def evaluated_run() -> Iterator[tuple[EvaluatedRun, Evaluated]]:
    heard: list[Event] = []
    config = SortedConfig(
        run={"samples": 64, "seed": SEED},
        schedule={"update_batch": 16},
        engine={"slots": 8, "max_new_tokens": BUDGET},
        learner={"group_size": 4},
        eval={"prompts": NUM_PROMPTS, "samples": NUM_SAMPLES, "every_samples": 32},
    )
    clock, parts = WallClock(), build_parts(config)
    try:
        evaluator = build_evaluator(config, parts, emit=heard.append, clock=clock)
        buffer = Buffer(grouped=config.is_grouped)
        controller = build_loop(config, parts, buffer, emit=heard.append, clock=clock, evaluation=evaluator)
        evaluator.run(0, 0)
        (event,) = heard
        assert isinstance(event, Evaluated)
        yield EvaluatedRun(parts=parts, evaluator=evaluator, controller=controller, events=heard), event
    finally:
        parts.close()


@pytest.fixture(scope="module")
def evaluated() -> Iterator[tuple[EvaluatedRun, Evaluated]]:
    """A run that was evaluated but not trained, and the event with the result."""
    with evaluated_run() as found:
        yield found


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return KnightsTask(seed=SEED).heldout(NUM_PROMPTS)


@pytest.fixture(scope="module")
def sampled_texts(evaluated: tuple[EvaluatedRun, Evaluated], rows: list[dict[str, Any]]) -> list[list[str]]:
    """The sampled answers, generated one after the other by another engine."""
    parts = evaluated[0].parts
    engine = LocalEngine(parts.model, slots=1, max_length=512)
    stop = parts.tokenizer.eos_token_id
    requests = [
        Request(
            sample=number * NUM_SAMPLES + index,
            attempt=0,
            prompt=parts.tokenizer(row["prompt"])["input_ids"],
            budget=BUDGET,
            seed=sample_seed(SEED, -1, f"heldout/{number}", index),
            sampling=Sampling(temperature=1.0, stop_tokens=(stop,)),
        )
        for number, row in enumerate(rows)
        for index in range(NUM_SAMPLES)
    ]
    answers = Caller(engine).serve(requests)
    texts = [parts.tokenizer.decode(answers[r.sample].tokens, skip_special_tokens=True) for r in requests]
    return [texts[at : at + NUM_SAMPLES] for at in range(0, len(texts), NUM_SAMPLES)]


def test_sampled_accuracy_is_the_verifiers(
    evaluated: tuple[EvaluatedRun, Evaluated], rows: list[dict[str, Any]], sampled_texts: list[list[str]]
) -> None:
    _, event = evaluated
    rewards = [
        verify([row["prompt"]] * 2, texts, [row["answer"]] * 2) for row, texts in zip(rows, sampled_texts, strict=True)
    ]
    flat = [reward for pair in rewards for reward in pair]
    assert event.sampled_accuracy == pytest.approx(sum(flat) / len(flat))
    assert 0 < sum(flat) < len(flat), "all alike: the test shows little"
    # Words are tokens here; an answer that ends by itself has one more, which text leaves out.
    ends = [text.split()[-1] == "done" for texts in sampled_texts for text in texts]
    num_tokens = sum(len(text.split()) for texts in sampled_texts for text in texts) + sum(ends)
    assert event.mean_length == pytest.approx(num_tokens / len(ends))
    for people in {row["people"] for row in rows}:
        chosen = [number for number, row in enumerate(rows) if row["people"] == people]
        group = event.by_group[str(people)]
        assert group["count"] == NUM_SAMPLES * len(chosen)
        assert group["sampled_accuracy"] == pytest.approx(sum(sum(rewards[n]) for n in chosen) / group["count"])
    assert set(event.by_group) == {str(row["people"]) for row in rows}


def test_greedy_accuracy_is_that_of_generate(
    evaluated: tuple[EvaluatedRun, Evaluated], rows: list[dict[str, Any]]
) -> None:
    parts, event = evaluated[0].parts, evaluated[1]
    rewards = []
    for row in rows:
        prompt = parts.tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
        mask = torch.ones_like(prompt)
        output = parts.model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=BUDGET)
        text = parts.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True)
        rewards += verify([row["prompt"]], [text], [row["answer"]])
    assert event.greedy_accuracy == pytest.approx(sum(rewards) / len(rewards))
    weighted = sum(group["greedy_accuracy"] * group["count"] for group in event.by_group.values())
    assert weighted / (NUM_PROMPTS * NUM_SAMPLES) == pytest.approx(event.greedy_accuracy)


def test_the_engines_counters_leave_evaluation_out(evaluated: tuple[EvaluatedRun, Evaluated]) -> None:
    run, _ = evaluated
    used, left = run.evaluator.used, run.stats()
    assert used.decoded_tokens > 0
    assert used.prompt_tokens > 0
    assert (left.decode_steps, left.decoded_tokens, left.prompt_tokens, left.recomputed_tokens) == (0, 0, 0, 0)
    assert left.busy_slot_s == pytest.approx(0.0, abs=1e-9)


def test_evaluations_amid_training_stay_apart() -> None:
    with evaluated_run() as (run, _):
        before = run.evaluator.used.decoded_tokens
        assert run.controller.run()
    heard = run.events
    assert run.evaluator.used.decoded_tokens > before
    assert run.evaluator.last_run == 64
    trained = sum(sum(event.lengths) for event in heard if event.kind == "BatchTaken")
    discarded = sum(event.discarded for event in heard if event.kind == "SampleRequeued")
    rejected = sum(event.cached - event.accepted for event in heard if event.kind == "AttemptVerified")
    assert run.stats().decoded_tokens == trained + discarded + rejected


# ---- on its own -----------------------------------------------------------------------------------------------------


class LengthScorer:
    """An answer's reward is its length."""

    failure: Exception | None = None

    def __init__(self) -> None:
        self.scores: list[RewardScore] = []

    def submit_answer(self, key: tuple[int, int], prompt: Prompt, tokens: Sequence[int]) -> None:
        self.scores.append(RewardScore(key=key, reward=float(len(tokens))))

    def poll(self, timeout: float) -> list[RewardScore]:
        scores, self.scores = self.scores, []
        return scores


def make_evaluator(engine: Any, prompts: list[Prompt], heard: list[Event], **more: Any) -> Evaluator:
    given: dict[str, Any] = {"sampling": Sampling(), "scorer": LengthScorer(), "budget": 3, "seed": 0} | more
    return Evaluator(engine=engine, prompts=prompts, clock=WallClock(), emit=heard.append, **given)


def test_when_it_is_due() -> None:
    prompt = Prompt(id="p", tokens=(1,), content="")
    evaluator = make_evaluator(None, [prompt], [], every_samples=100)
    assert [evaluator.is_due(trained) for trained in (0, 99, 100, 250)] == [False, False, True, True]
    evaluator.last_run = 130
    assert [evaluator.is_due(trained) for trained in (200, 229, 230)] == [False, False, True]
    assert not make_evaluator(None, [prompt], []).is_due(10**6)


def test_without_prompts_it_is_never_due_and_says_nothing() -> None:
    heard: list[Event] = []
    evaluator = make_evaluator(None, [], heard, every_samples=1)
    assert not evaluator.is_due(5)
    evaluator.run(0, 5)
    assert not heard


class HalfFailing:
    """Ends requests at once with three tokens, but fails those with an odd prompt after one."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    @property
    def capabilities(self) -> Any:
        from sortedrl.engine.base import Capabilities

        return Capabilities(slots=2, exact_replay=True, keep_kv=True, waits=True)

    def stats(self) -> Any:
        from sortedrl.engine.base import EngineStats

        return EngineStats()

    def submit(self, requests: list[Request]) -> None:
        assert len(self.requests) + len(requests) <= 2
        self.requests += requests

    def poll(self, timeout: float | None = None) -> list[Any]:
        from sortedrl.engine.base import Delta, Failed, Finished

        request = self.requests.pop(0)
        stamp = {"sample": request.sample, "attempt": request.attempt, "clock": 0.0}
        if request.prompt[0] % 2:
            one = Delta(start=0, tokens=[9], logprobs=[0.0], version=0, **stamp)
            return [one, Failed(error="broken", **stamp)]
        three = Delta(start=0, tokens=[9] * 3, logprobs=[0.0] * 3, version=0, **stamp)
        return [three, Finished(reason=FinishReason.LENGTH, **stamp)]


def test_a_failed_answer_is_scored_as_it_is() -> None:
    heard: list[Event] = []
    prompts = [Prompt(id=f"p{n}", tokens=(n,), content="", columns={"kind": "ab"[n // 2]}) for n in range(4)]
    make_evaluator(HalfFailing(), prompts, heard, group_column="kind", right_above=1.0).run(7, 40)
    (event,) = heard
    assert isinstance(event, Evaluated)
    # Rewards are 3, 1, 3, 1: half are right, and what the others earned is no accuracy.
    assert (event.version, event.samples_trained, event.sampled_accuracy, event.sampled_reward) == (7, 40, 0.5, 2.0)
    assert event.mean_length == 2.0
    assert event.by_group["a"] == {"sampled_accuracy": 0.5, "greedy_accuracy": 0.5, "mean_length": 2.0, "count": 2.0}
    assert event.sampled_accuracy_se == pytest.approx((1 / 3 / 4) ** 0.5)  # 1, 0, 1, 0 vary by 1/3, over four prompts
    assert event.truncation_rate == 0.5


def test_held_out_answers_are_drawn_as_in_training() -> None:
    engine, given = HalfFailing(), Sampling(temperature=0.7, stop_tokens=(4,), top_k=5, top_p=0.9, min_p=0.1)
    asked: list[Request] = []
    submit = engine.submit
    engine.submit = lambda requests: (asked.extend(requests), submit(requests))[1]  # type: ignore[method-assign]
    make_evaluator(engine, [Prompt(id="p", tokens=(0,), content="")], [], sampling=given).run(0, 1)
    assert [request.sampling for request in asked] == [given, replace(given, temperature=0.0)]


def test_answers_are_scored_while_the_engine_goes_on() -> None:
    order: list[str] = []
    engine, scorer = HalfFailing(), LengthScorer()
    answers = [EvalAnswer(prompt=Prompt(id=f"p{n}", tokens=(0,), content=""), temperature=1.0) for n in range(5)]
    submit, submit_answer = engine.submit, scorer.submit_answer
    engine.submit = lambda requests: (order.extend("s" for _ in requests), submit(requests))[1]  # type: ignore[method-assign]
    scorer.submit_answer = lambda *given: (order.append("a"), submit_answer(*given))[1]  # type: ignore[method-assign]
    seen: list[EvalAnswer] = []
    answer_all(engine, scorer, answers, sampling=Sampling(), budget=3, seed=0, on_scored=seen.append)
    # Two slots: each answer that ends is handed on and its slot refilled before the next one ends.
    assert "".join(order) == "ssasasasaa"
    assert seen == answers
    assert all(answer.reason is FinishReason.LENGTH and answer.reward == 3.0 for answer in answers)


def test_a_reward_that_is_to_stop_the_run_stops_an_evaluation() -> None:
    tokenizer = load_tokenizer(knights_tiny_path())
    # No reward function: it raises when it is called like one. A worker that imports this file would import torch.
    with RewardPool(json.loads, timeout_s=60.0, workers=1, on_error="stop") as pool:
        scorer = SampleScorer(pool=pool, tokenizer=tokenizer)
        answers = [EvalAnswer(prompt=Prompt(id="p", tokens=(0,), content=""), temperature=1.0)]
        with pytest.raises(RewardError, match=r"set reward\.on_error to zero or skip"):
            answer_all(HalfFailing(), scorer, answers, sampling=Sampling(), budget=3, seed=0)


def test_fresh_noise_depends_on_the_trained_samples_alone() -> None:
    def seeds(num_trained: int, *, is_fresh: bool) -> list[int]:
        engine, asked = HalfFailing(), []
        submit = engine.submit
        engine.submit = lambda requests: (asked.extend(requests), submit(requests))[1]  # type: ignore[method-assign]
        prompt = Prompt(id="p", tokens=(0,), content="")
        make_evaluator(engine, [prompt], [], has_fresh_noise=is_fresh).run(0, num_trained)
        return [request.seed for request in asked]

    assert seeds(0, is_fresh=False) == seeds(128, is_fresh=False) == seeds(0, is_fresh=True)
    assert seeds(128, is_fresh=True) != seeds(0, is_fresh=True)
    assert seeds(128, is_fresh=True) == seeds(128, is_fresh=True)
