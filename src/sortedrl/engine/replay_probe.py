"""A probe of an engine at its start: does a replay keep the tokens that the engine has just decoded?

`run/builders/engine.py` calls `probe_replay` before a run whose strategy replays, on engines that may be exact and have
no proof: vLLM on a GPU, in bfloat16 or float32. The engine decodes a few hundred tokens in a batch, and verifies each
answer under the same weights, alone and in a batch. An exact engine keeps every token. One that rounds otherwise in
prefill than in decoding rejects some, and then it must not promise exact replay.

Guarantees: the engine is idle before and after; the probe's samples have negative numbers, which no run uses. What it
cannot show: a rate of differences far below one in a few hundred tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sortedrl.engine.base import (
    Delta,
    Engine,
    EngineEvent,
    Failed,
    Finished,
    Partial,
    Request,
    Sampling,
    Span,
    Verified,
    as_deltas,
)
from sortedrl.errors import EngineError
from sortedrl.records import Mode

NUM_TOKENS = 256
_MAX_ANSWERS = 8
_MAX_PROMPT = 64


@dataclass(slots=True, kw_only=True, frozen=True)
class ReplayEvidence:
    """`num_tokens` decoded tokens were verified, and `num_differences` of them were rejected.

    A verification ends at its first rejection, so there is at most one for each answer, and tokens after it do not
    count as verified.
    """

    num_tokens: int
    num_differences: int

    @property
    def is_exact(self) -> bool:
        return self.num_tokens > 0 and self.num_differences == 0

    def __str__(self) -> str:
        return f"{self.num_differences} of {self.num_tokens} tokens differed"


def probe_replay(
    engine: Engine, *, vocab: int, max_length: int, sampling: Sampling | None = None, num_tokens: int = NUM_TOKENS
) -> ReplayEvidence:
    """Decode about `num_tokens` tokens, and count those that a replay under the same weights rejects."""
    requests = _make_requests(engine, vocab, max_length, sampling or Sampling(), num_tokens)
    answers = _serve(engine, requests).tokens
    replays = [
        replace(
            request,
            attempt=1,
            mode=Mode.REPLAY,
            cached=tuple(answers[request.sample]),
            spans=(Span(0, len(answers[request.sample])),),
        )
        for request in requests
    ]
    together = len(replays) // 2  # half of the answers in one batch, the others each alone
    verified = _serve(engine, replays[:together]).verified
    for request in replays[together:]:
        verified |= _serve(engine, [request]).verified
    accepted, cached = (sum(column) for column in zip(*verified.values(), strict=True))
    assert cached == sum(map(len, answers.values())), "an answer of the probe was not verified"
    differences = sum(kept < count for kept, count in verified.values())
    return ReplayEvidence(num_tokens=accepted + differences, num_differences=differences)


def _make_requests(engine: Engine, vocab: int, max_length: int, sampling: Sampling, num_tokens: int) -> list[Request]:
    """Prompts of random tokens and of several lengths. Nothing ends an answer before its budget is used up."""
    rng = random.Random(0)
    count = min(_MAX_ANSWERS, engine.capabilities.slots)
    longest = max(1, min(_MAX_PROMPT, max_length // 2))
    budget = min(-(-num_tokens // count), max_length - longest)
    if budget < 1:
        raise EngineError(f"the engine's longest sequence of {max_length} tokens is too short to test its replay")
    free = replace(sampling, stop_tokens=(), stop_strings=())
    lengths = [max(1, longest * (index + 1) // count) for index in range(count)]
    return [
        Request(
            sample=-1 - index,
            attempt=0,
            prompt=[rng.randrange(vocab) for _ in range(length)],
            budget=budget,
            seed=rng.randrange(1 << 63),
            sampling=free,
        )
        for index, length in enumerate(lengths)
    ]


@dataclass(slots=True, kw_only=True)
class _Served:
    tokens: dict[int, list[int]]
    verified: dict[int, tuple[int, int]]  # tokens kept and tokens verified, by sample
    ended: set[int]

    def take(self, events: Iterable[EngineEvent]) -> None:
        for event in as_deltas(events):
            match event:
                case Verified(cached=cached, accepted=accepted):
                    self.verified[event.sample] = accepted, cached
                case Failed(error=error):
                    raise EngineError(f"the engine failed in the test of its replay: {error}")
                case Partial():
                    raise EngineError("the engine died in the test of its replay: see its messages, then start again")
                case Finished():
                    self.ended.add(event.sample)
                case Delta(start=start, tokens=tokens):
                    self.tokens[event.sample][start:] = tokens


def _serve(engine: Engine, requests: Sequence[Request]) -> _Served:
    """Run requests to their end."""
    served = _Served(tokens={request.sample: [] for request in requests}, verified={}, ended=set())
    if requests:
        engine.submit(requests)
    while len(served.ended) < len(requests):
        served.take(engine.poll())
    return served
