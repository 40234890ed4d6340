"""Has a `RewardPool` decode complete answers and score them.

The controller calls `submit` and `poll` (the `Scorer` protocol); evaluation calls `submit_answer`. `run/builders` makes
one scorer for training and one for held-out prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sortedrl.errors import RewardError
from sortedrl.records import Prompt, Sample
from sortedrl.reward.answer_text import Text, TextDecoder, UnreadAnswer
from sortedrl.reward.pool import RewardCall, RewardPool, RewardScore


@dataclass(slots=True, kw_only=True)
class SampleScorer:
    """Scores samples in the background. `tokenizer` is a Hugging Face tokenizer.

    `poll` runs the callbacks in the thread that called it: `on_skipped(sample, attempt)` for each answer that must get
    no weight in training, `on_score` for each score, `on_call` for each call of a reward function that has ended since
    the last poll. With `conversation`, an answer to a chat is a list of messages: the model's turns and what tools
    returned at the `masked` tokens; the threads of the pool call it.
    """

    pool: RewardPool
    tokenizer: Any
    on_skipped: Callable[[int, int], None] | None = None
    on_score: Callable[[RewardScore], None] | None = None
    on_call: Callable[[RewardCall], None] | None = None
    conversation: Callable[[Sequence[int], Sequence[range]], list[dict[str, str]]] | None = None
    _decoder: TextDecoder = field(init=False)

    def __post_init__(self) -> None:
        self._decoder = TextDecoder(self.tokenizer)

    def submit(self, sample: Sample) -> None:
        tokens = sample.tokens
        masked = sample.masked(0, len(tokens)) if self.conversation is not None else ()
        self.submit_answer((sample.id, sample.attempt), sample.prompt, tokens, masked)

    def submit_answer(
        self, key: tuple[int, int], prompt: Prompt, tokens: Sequence[int], masked: Sequence[range] = ()
    ) -> None:
        is_text = self.conversation is None or isinstance(prompt.content, str)
        read = self._read_texts if is_text else self._read_conversations
        answer = UnreadAnswer(tokens=tokens, masked=masked, read=read)
        self.pool.submit(key, prompt.content, answer, prompt.columns, tokens)

    def _read_texts(self, answers: Sequence[UnreadAnswer]) -> list[str]:
        return self._decoder.texts([answer.tokens for answer in answers])

    def _read_conversations(self, answers: Sequence[UnreadAnswer]) -> list[Text]:
        assert self.conversation is not None, "no conversation to read"
        return [self.conversation(answer.tokens, answer.masked) for answer in answers]

    def poll(self, timeout: float) -> list[RewardScore]:
        """Return the scores that are ready, waiting up to `timeout` seconds for the first one."""
        return self.told(self.pool.poll(timeout))

    def told(self, scores: list[RewardScore]) -> list[RewardScore]:
        """The scores, after the callbacks have seen them."""
        if self.on_skipped is not None:
            for score in scores:
                if score.is_skipped:
                    self.on_skipped(*score.key)
        if self.on_score is not None:
            for score in scores:
                self.on_score(score)
        if self.on_call is not None:
            for call in self.pool.take_calls():
                self.on_call(call)
        return scores

    @property
    def failure(self) -> RewardError | None:
        """The error that must stop the run (`reward.on_error = "stop"`), or None."""
        return self.pool.failure
