"""The scorer has samples decoded, returns their scores, and reports skipped answers and finished calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from sortedrl.learner.model import load_tokenizer
from sortedrl.records import Prompt, Sample, Segment
from sortedrl.reward.pool import RewardCall, RewardPool, RewardScore
from sortedrl.reward.scorer import SampleScorer
from sortedrl.tasks.tiny import knights_tiny_path


def test_samples_are_decoded_scored_and_reported() -> None:
    tokenizer = load_tokenizer(knights_tiny_path())
    seen: list[tuple[str, str, str]] = []

    def even_ids_only(prompts: list[str], completions: list[str], answer: list[str]) -> list[float | None]:
        seen.extend(zip(prompts, completions, answer, strict=True))
        return [None if text == "odd" else 2.0 for text in answer]

    def sample(number: int) -> Sample:
        answer = "odd" if number % 2 else "even"
        prompt = Prompt(id="p", tokens=(0,), content="question", columns={"answer": answer})
        tokens = [*tokenizer.encode("Ann", add_special_tokens=False), tokenizer.eos_token_id]
        segments = [Segment(version=0, tokens=tokens, logprobs=[-1.0] * len(tokens))]
        return Sample(
            id=number, prompt=prompt, index=0, epoch=0, cohort=0, seed=0, budget=8, attempt=3, segments=segments
        )

    skipped: list[tuple[int, int]] = []
    calls: list[RewardCall] = []
    with RewardPool(even_ids_only, timeout_s=60.0, workers=1, on_error="skip") as pool:
        scorer = SampleScorer(
            pool=pool, tokenizer=tokenizer, on_skipped=lambda *key: skipped.append(key), on_call=calls.append
        )
        scores: list[RewardScore] = []
        for number in range(4):
            scorer.submit(sample(number))
        while len(scores) < 4:
            scores += scorer.poll(60.0)
    assert sorted((score.key, score.reward) for score in scores) == [((n, 3), 0.0 if n % 2 else 2.0) for n in range(4)]
    assert sorted(skipped) == [(1, 3), (3, 3)]
    assert sorted(seen) == [("question", "Ann", "even")] * 2 + [("question", "Ann", "odd")] * 2
    assert sum(call.num_samples for call in calls) == 4
    assert scorer.failure is None


def test_answers_are_decoded_in_the_threads_of_the_pool() -> None:
    tokenizer = load_tokenizer(knights_tiny_path())
    threads: set[str] = set()

    def conversation(tokens: Sequence[int], masked: Sequence[range]) -> list[dict[str, str]]:
        threads.add(threading.current_thread().name)
        return [{"role": "assistant", "content": f"{len(tokens)} tokens, {list(masked)}"}]

    seen: list[object] = []

    def remember(completions: list[object], **_: object) -> list[float]:
        seen.extend(completions)
        return [1.0] * len(completions)

    chat = Prompt(id="p", tokens=(0,), content=[{"role": "user", "content": "question"}])
    tokens = tokenizer.encode("Ann", add_special_tokens=False)
    segments = [
        Segment(version=0, tokens=tokens, logprobs=[-1.0] * len(tokens)),
        Segment(version=0, tokens=[5, 6], logprobs=[0.0, 0.0], is_masked=True),
    ]
    sample = Sample(id=7, prompt=chat, index=0, epoch=0, cohort=0, seed=0, budget=8, segments=segments)
    with RewardPool(remember, timeout_s=60.0, workers=1) as pool:
        scorer = SampleScorer(pool=pool, tokenizer=tokenizer, conversation=conversation)
        scorer.submit(sample)
        sample.segments.clear()  # a replay may change the sample before it is read
        assert [score.key for score in scorer.poll(60.0)] == [(7, 0)]
    length = len(tokens)
    assert seen == [[{"role": "assistant", "content": f"{length + 2} tokens, [range({length}, {length + 2})]"}]]
    assert threads == {"reward"}


def test_a_tokenizer_that_fails_stops_the_run() -> None:
    class Broken:
        def decode(self, tokens: Sequence[int], **_: object) -> str:
            raise OverflowError(f"{len(tokens)} tokens are too many")

    with RewardPool(lambda completions: [0.0], timeout_s=60.0, workers=1) as pool:
        scorer = SampleScorer(pool=pool, tokenizer=Broken())
        scorer.submit_answer((0, 0), Prompt(id="p", tokens=(0,), content="question"), [1, 2, 3])
        with pytest.raises(OverflowError, match="3 tokens are too many"):
            scorer.poll(60.0)
