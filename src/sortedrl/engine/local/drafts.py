"""Drafts: guesses at the next tokens of a running answer, copied from other answers to the same prompt.

`speculation.py` asks for them, and tells which attempts have ended. Sources, best first:
- the sample's own earlier answer, at the same position: what a replay discarded, or what a restart gave up;
- what followed the last few tokens in an answer to the same prompt: in the answer itself, in a running or finished
  sibling, or in an answer of an earlier epoch.

A draft is only a guess: the noise decides which of its tokens are right, so nothing here can change an answer.
Guarantees: at most `_MAX_TOKENS` tokens of ended answers are kept. The index of a prompt exists only while one of its
attempts asks for drafts, and grows by the tokens written since it asked last.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from sortedrl.engine.attempt import Attempt

_MAX_TOKENS = 1 << 19  # of ended answers, over all prompts
_MAX_ANSWERS = 8  # ended answers per prompt: the latest ones
_CONTEXTS = (6, 4, 2)  # how many last tokens must agree, tried in this order

NUM_KINDS = 1 + len(_CONTEXTS)  # kind 0: the sample's own earlier answer; kind i: a context of _CONTEXTS[i - 1] tokens


class Draft(NamedTuple):
    kind: int
    tokens: list[int]


NO_DRAFT = Draft(0, [])


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """Ended answers to one prompt by their seeds, and where each run of tokens occurred last."""

    answers: OrderedDict[int, list[int]] = field(default_factory=OrderedDict)
    places: dict[tuple[int, ...], tuple[list[int], int]] = field(default_factory=dict)  # answer, index of what follows
    num_users: int = 0  # running attempts that ask for drafts

    def index(self, tokens: list[int], start: int) -> None:
        """Add the contexts of the tokens from `start` on."""
        for size in _CONTEXTS:
            first = max(start - size, 0)
            columns = [tokens[first + offset :] for offset in range(size)]
            places = zip(repeat(tokens), range(first + size, len(tokens)), strict=False)
            self.places.update(zip(zip(*columns, strict=False), places, strict=False))


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

    def end(self, attempt: Attempt) -> None:
        """Keep the answer of an attempt that is finished or interrupted."""
        reader = self._readers.pop(attempt.request.sample, None)
        if reader is not None:
            reader.prompt.num_users -= 1
            if not reader.prompt.num_users:
                reader.prompt.places = {}
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

    def propose(self, attempt: Attempt, limits: list[int]) -> Draft:
        """The draft of the best source: at most `limits[kind]` tokens, and fewer than the budget has left."""
        room = attempt.request.budget - len(attempt.tokens) - 1  # one more token is drawn after the draft
        if room <= 0:
            return NO_DRAFT
        tokens, prompt = attempt.tokens, self._read(attempt)
        own = prompt.answers.get(attempt.request.seed)
        end = len(tokens)
        if own is not None and limits[0] > 0 and len(own) > end and own[end - 1] == tokens[-1]:
            return Draft(0, own[end : end + min(limits[0], room)])
        for kind, size in enumerate(_CONTEXTS, start=1):
            place = prompt.places.get(tuple(tokens[-size:])) if limits[kind] > 0 else None
            if place is not None:
                answer, first = place
                limit = min(limits[kind], room)
                draft = answer[first : first + limit]
                if answer is tokens and len(draft) < limit:  # the answer repeats itself: so does the draft
                    draft = (draft * (limit // len(draft) + 1))[:limit]
                return Draft(kind, draft)
        return NO_DRAFT

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
        if reader.num_indexed < len(attempt.tokens):
            reader.prompt.index(attempt.tokens, reader.num_indexed)
            reader.num_indexed = len(attempt.tokens)
        return reader.prompt
