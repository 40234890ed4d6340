"""An answer on its way through scoring: what each reward function made of it, and the score that comes out.

`reward.py` makes a `Ticket` per submission and takes its `Score` at the end. What it keeps true: a function that gives
None has no say in the reward, as in TRL; an answer on which a function failed, or on which none had a say, has no
reward but a `Failure` that names function and kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sortedrl.reward_caller import RewardFunction
from sortedrl.reward_worker import CallFailed, FailureKind

Key = tuple[int, int]  # sample, attempt
Row = tuple[str | list[dict[str, str]], str, Mapping[str, object], Sequence[int], Mapping[str, float]]
"""Prompt, completion, columns, the completion's tokens, and how far training was."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Score:
    key: Key
    reward: float
    error: str | None = None
    is_skipped: bool = False  # it is to be trained with no weight


@dataclass(slots=True, kw_only=True, frozen=True)
class Call:
    """One call of a reward function that is over, for whoever watches the workers."""

    worker: int
    seconds: float
    ended: float  # time.monotonic()
    num_samples: int


@dataclass(slots=True, kw_only=True, frozen=True)
class Failure:
    kind: FailureKind
    function: str
    message: str

    @property
    def name(self) -> str:
        """What failures are counted by."""
        return f"{self.function}: {self.kind}"


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """A submission on its way through the stages."""

    key: Key
    row: Row
    line: str  # the row as JSON, where a worker process is to read it
    values: dict[int, float | None] = field(default_factory=dict)  # by function
    failure: Failure | None = None
    is_alone: bool = False  # a call with it failed: it is not to spoil another one's

    def take(self, function: RewardFunction, outcome: float | str | CallFailed | None, timeout_s: float) -> None:
        if outcome is None or isinstance(outcome, float | int):
            self.values[function.index] = outcome
            return
        failed = outcome if isinstance(outcome, CallFailed) else CallFailed(FailureKind.NOT_A_NUMBER, outcome)
        message = f"reward function {function.name} {_what(failed, timeout_s)}"
        self.failure = Failure(kind=failed.kind, function=function.name, message=message)

    def reward(self, functions: Sequence[RewardFunction], weights: Sequence[float]) -> float | Failure:
        """The weighted sum over the functions that had a say."""
        if self.failure is not None:
            return self.failure
        given = [(weight, self.values[index]) for index, weight in enumerate(weights)]
        if all(value is None for _, value in given):
            names = ", ".join(function.name for function in functions)
            message = f"reward function {names} gave None as a reward: make one of them return a number for each answer"
            return Failure(kind=FailureKind.NO_REWARD, function=names, message=message)
        return float(sum(weight * value for weight, value in given if value is not None))


def _what(failed: CallFailed, timeout_s: float) -> str:
    match failed.kind:
        case FailureKind.TIMEOUT:
            return f"took longer than {timeout_s:g} s: make it quicker on such answers, or raise reward.timeout_s"
        case FailureKind.DIED:
            return f"ended its worker process ({failed.detail}): see whether it exits, crashes or runs out of memory"
        case FailureKind.MEMORY:
            return f"ran out of memory ({failed.detail}): make it need less on such answers, or raise reward.memory_mb"
        case FailureKind.RAISED:
            return f"raised {failed.detail}: make it return a number for malformed answers too"
        case FailureKind.MALFORMED:
            return f"{failed.detail}: make it return a list with one number per completion"
        case FailureKind.NOT_A_NUMBER | FailureKind.NO_REWARD:
            return f"gave {failed.detail} as a reward: make it return finite numbers, 0.0 or None where none applies"
