"""Drafts: guesses at the next tokens of a running answer, from other answers to the same prompt.

`speculation.py` asks for them, and tells which attempts have ended. Sources, best first:
- the sample's own earlier answer, at the same position: what a replay discarded, or what a restart gave up;
- what followed the last few tokens when they occurred before: earlier in the answer itself, in a running or finished
  sibling, or in an answer of an earlier epoch.

Every guess has a kind, and the gate measures how often guesses of a kind are right. A draft ends where it becomes too
unlikely that all of it is right. It is only a guess: the noise decides which of its tokens are right, so nothing here
can change an answer.
Guarantees: at most `_MAX_TOKENS` tokens of ended answers are kept. The index of a prompt exists only while one of its
attempts asks for drafts, and grows by the tokens written since it asked last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sortedrl.engine.attempt import Attempt

MAX_DRAFT = 8  # tokens; the pass draws one more
_MAX_TOKENS = 1 << 19  # of ended answers, over all prompts
_MAX_ANSWERS = 4  # ended answers per prompt: the latest ones
_LONG, _SHORT = 6, 3  # how many last tokens must have occurred before: the long run is looked up first
_STREAK_BITS, _MAX_STREAK = 2, 3  # how often in a row the same token has followed, besides the first time

# Kinds of guesses: the sample's own earlier answer, then by the streak after a long run, then after a short one.
_OWN, _AFTER_LONG = 0, 1
_AFTER_SHORT = _AFTER_LONG + _MAX_STREAK + 1
NUM_KINDS = _AFTER_SHORT + _MAX_STREAK + 1


class Draft(NamedTuple):
    tokens: list[int]
    kinds: list[int]


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """Ended answers to one prompt by their seeds, and what has followed each run of tokens."""

    answers: OrderedDict[int, list[int]] = field(default_factory=OrderedDict)
    followers: dict[tuple[int, ...], int] = field(default_factory=dict)  # the token, then the bits of its streak
    num_users: int = 0  # running attempts that ask for drafts

    def index(self, tokens: Sequence[int], start: int) -> None:
        """Note what the tokens from `start` on follow."""
        followers = self.followers
        for size in (_LONG, _SHORT):
            for end in range(max(start, size), len(tokens)):
                token, run = tokens[end], tuple(tokens[end - size : end])
                code = followers.get(run, -1)
                if code >> _STREAK_BITS != token:
                    followers[run] = token << _STREAK_BITS
                elif code & _MAX_STREAK < _MAX_STREAK:
                    followers[run] = code + 1

    def guess(self, tokens: list[int], rates: Sequence[float], least: float, limit: int) -> Draft:
        """Guess token after token, as long as all of them are right with a probability of at least `least`."""
        draft, kinds, probability = [], [], 1.0
        run = tokens[-_LONG:]
        while len(draft) < limit:
            code, kind = self.followers.get(tuple(run)) if len(run) == _LONG else None, _AFTER_LONG
            if code is None:
                code, kind = self.followers.get(tuple(run[-_SHORT:])), _AFTER_SHORT
                if code is None:
                    break
            kind += code & _MAX_STREAK
            probability *= rates[kind]
            if probability < least:
                break
            token = code >> _STREAK_BITS
            draft.append(token)
            kinds.append(kind)
            run = [*run, token][-_LONG:]
        return Draft(draft, kinds)


@dataclass(slots=True, kw_only=True)
class _Reader:
    """A running attempt that asks for drafts: its prompt, and how many of its tokens are indexed."""

    prompt: _Prompt
    num_indexed: int = 0


class DraftSources:
    def __init__(self) -> None:
        self._prompts: OrderedDict[tuple[int, ...], _Prompt] = OrderedDict()  # the one used last is at the end
        self._readers: dict[int, _Reader] = {}  # by sample
        self._num_tokens = 0
        self.num_indexed_answers = 0  # whole answers, which took more time than the tokens of one pass

    def end(self, attempt: Attempt) -> None:
        """Keep the answer of an attempt that has ended."""
        reader = self._readers.pop(attempt.request.sample, None)
        if reader is not None:
            reader.prompt.num_users -= 1
            if not reader.prompt.num_users:
                reader.prompt.followers = {}
        self.keep(attempt, attempt.tokens, 0 if reader is None else reader.num_indexed)

    def keep(self, attempt: Attempt, tokens: list[int], num_indexed: int = 0) -> None:
        """Keep an answer to the attempt's prompt. The list must not change any more."""
        if not tokens:
            return
        prompt, seed = self._prompt(attempt), attempt.request.seed
        self._num_tokens += len(tokens) - len(prompt.answers.pop(seed, ()))
        prompt.answers[seed] = tokens
        if prompt.num_users:
            prompt.index(tokens, num_indexed)
        if len(prompt.answers) > _MAX_ANSWERS:
            self._num_tokens -= len(prompt.answers.popitem(last=False)[1])
        while self._num_tokens > _MAX_TOKENS:
            _, oldest = self._prompts.popitem(last=False)
            self._num_tokens -= sum(map(len, oldest.answers.values()))

    def propose(self, attempt: Attempt, rates: Sequence[float], least: float) -> Draft:
        """A draft that is right as a whole with a probability of at least `least`, by the `rates` of the kinds.

        It leaves the budget room for one more token, which is drawn after it.
        """
        tokens, limit = attempt.tokens, min(MAX_DRAFT, attempt.request.budget - len(attempt.tokens) - 1)
        prompt, end = self._read(attempt), len(tokens)
        own = prompt.answers.get(attempt.request.seed, ())
        if len(own) > end and own[end - 1] == tokens[-1] and rates[_OWN] >= least:
            probability, size = rates[_OWN], 0
            while size < limit and probability >= least:
                probability *= rates[_OWN]
                size += 1
            draft = list(own[end : end + size])
            return Draft(draft, [_OWN] * len(draft))
        return prompt.guess(tokens, rates, least, limit)

    def _prompt(self, attempt: Attempt) -> _Prompt:
        key = tuple(attempt.request.prompt)
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = _Prompt()
        else:
            self._prompts.move_to_end(key)
        return prompt

    def _read(self, attempt: Attempt) -> _Prompt:
        """The attempt's prompt, with everything indexed that the attempt has written."""
        reader = self._readers.get(attempt.request.sample)
        if reader is None:
            prompt = self._prompt(attempt)
            reader = self._readers[attempt.request.sample] = _Reader(prompt=prompt)
            if not prompt.num_users:
                for answer in prompt.answers.values():
                    prompt.index(answer, 0)
            prompt.num_users += 1
            self.num_indexed_answers += 1
        if reader.num_indexed < len(attempt.tokens):
            reader.prompt.index(attempt.tokens, reader.num_indexed)
            reader.num_indexed = len(attempt.tokens)
        return reader.prompt
