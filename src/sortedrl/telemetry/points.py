"""What a view is made of: bars of the timeline, and points of curves that can be joined with their neighbours.

`view.py` makes them from events, the charts draw them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)


@dataclass(slots=True, kw_only=True)
class Segment:
    """A stay of a sample in a slot under one version: a bar of the timeline."""

    sample: int
    attempt: int
    slot: int
    version: int
    mode: str
    start: float
    end: float | None = None  # None: it goes on
    outcome: str = ""  # of AttemptEnded; published: it goes on under the next version; cut: its process ended
    num_tokens: int = 0


@dataclass(slots=True, kw_only=True, frozen=True)
class UpdatePoint:
    """One update and the batch it trained on, or several neighbours."""

    update: int  # the last
    t: float  # when it was done
    samples_trained: int
    num_samples: int
    reward_sum: float
    token_sum: int
    lengths: tuple[float, ...]  # at QUANTILES

    @property
    def reward(self) -> float:
        return self.reward_sum / self.num_samples

    @property
    def mean_length(self) -> float:
        return self.token_sum / self.num_samples


def join_updates(first: UpdatePoint, second: UpdatePoint) -> UpdatePoint:
    a, b = first.lengths, second.lengths
    inner = [(low + high) / 2 for low, high in zip(a[1:-1], b[1:-1], strict=True)]
    return replace(
        second,
        num_samples=first.num_samples + second.num_samples,
        reward_sum=first.reward_sum + second.reward_sum,
        token_sum=first.token_sum + second.token_sum,
        lengths=(min(a[0], b[0]), *inner, max(a[-1], b[-1])),
    )


@dataclass(slots=True, kw_only=True, frozen=True)
class Evaluation:
    t: float
    samples_trained: int
    sampled: float
    greedy: float


@dataclass(slots=True, kw_only=True, frozen=True)
class ReplayPoint:
    """The replays between two harvests, or between several."""

    update: int  # that follows them
    num_replays: int
    share_sum: float  # of its cached tokens that a replay kept, summed over replays
    cached: int
    accepted: int


def join_replays(first: ReplayPoint, second: ReplayPoint) -> ReplayPoint:
    return ReplayPoint(
        update=second.update,
        num_replays=first.num_replays + second.num_replays,
        share_sum=first.share_sum + second.share_sum,
        cached=first.cached + second.cached,
        accepted=first.accepted + second.accepted,
    )
