"""The alarm of a run that cannot learn: its first answers cannot be scored, or its first updates move no weight.

`trainer.py` makes one for each run. The scorers of training and evaluation pass it every score, and the controller
every update. With `run.on_no_signal = "stop"` it then holds an `error`: the loop stops, the run is saved, and the
trainer raises the error. With "warn" it is a line in the log.

Guarantees: it speaks of the first answers and updates of the run, not of the process, because checkpoints hold its
counts. A run that has learned something is never stopped; it gets a warning when it stops learning, and a further one
only after twice as long. A run that is resumed after the alarm is counted afresh, so that the remedy can show.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sortedrl.errors import NothingLearnedError
from sortedrl.learner.base import UpdateResult
from sortedrl.reward.pool import RewardScore
from sortedrl.reward.worker import FailureKind

FIRST_UPDATES = 8  # without an optimizer step
FIRST_TIMEOUTS = 4  # answers that each used up the whole time limit; waiting for more would take minutes
_HOW_TO_GO_ON = 'or set run.on_no_signal = "warn" to train on'

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class AnswerCounts:
    """How many answers of one kind were scored. `unscored` and `timeouts` count since the last one that was."""

    scored: int = 0
    unscored: int = 0
    timeouts: int = 0

    def add(self, score: RewardScore) -> None:
        if score.error is None:
            self.scored, self.unscored, self.timeouts = self.scored + 1, 0, 0
        else:
            self.unscored += 1
            self.timeouts += score.kind is FailureKind.TIMEOUT


@dataclass(slots=True, kw_only=True)
class UpdateCounts:
    """How many updates moved the weights. All but `moving` count since the last one that did."""

    moving: int = 0
    still: int = 0  # without an optimizer step
    flat: int = 0  # all rewards were equal
    flat_reward: float = 0.0  # of the last such update
    not_finite: int = 0
    truncated: int = 0  # all answers reached the token limit

    def add(self, result: UpdateResult) -> None:
        if result.optimizer_steps:
            self.moving += 1
            self.still = self.flat = self.not_finite = self.truncated = 0
            return
        metrics = result.metrics
        self.still += 1
        if metrics.get("degenerate_all_right") or metrics.get("degenerate_all_wrong"):
            self.flat += 1
            self.flat_reward = metrics["reward_mean"]
        self.not_finite += bool(metrics.get("skipped_steps"))
        self.truncated += bool(metrics.get("degenerate_all_truncated"))

    def cause(self, reward_functions: str) -> str:
        """Why these updates moved nothing, and the remedy."""
        if self.not_finite:
            return f"the loss or gradient of {self.not_finite} was not finite; lower learner.lr"
        if self.flat == self.still:
            return (
                f"all answers of an update got the same reward, at last {self.flat_reward:g}, from {reward_functions}; "
                "use a reward function that tells answers apart, or a task that the model solves sometimes"
            )
        if self.truncated == self.still:
            return "all answers reached the token limit; raise engine.max_new_tokens, or set learner.overlong = keep"
        return (
            f"answers that are compared with each other got equal rewards from {reward_functions}, or gave no "
            "gradient; use a reward function that tells answers apart, or raise learner.group_size"
        )


@dataclass(slots=True, kw_only=True)
class LearningAlarm:
    """`is_fatal`: stop the run; otherwise warn only."""

    update_batch: int
    reward_functions: str = "the reward function"  # their names
    is_fatal: bool = True
    error: NothingLearnedError | None = None
    message: str | None = None  # of the alarm, once it was raised
    answers: AnswerCounts = field(default_factory=AnswerCounts)
    heldout: AnswerCounts = field(default_factory=AnswerCounts)
    updates: UpdateCounts = field(default_factory=UpdateCounts)
    _reasons: Counter[str] = field(default_factory=Counter)  # errors of the first answers
    _quiet_answers: int = 0  # unscored answers in a row that need no further warning
    _quiet_updates: int = FIRST_UPDATES - 1

    def watch_answer(self, score: RewardScore) -> None:
        """Count a score of training."""
        self._watch(self.answers, score, "answers")
        counts, limit = self.answers, max(2 * self.update_batch - 1, self._quiet_answers)
        if counts.scored and counts.unscored > limit:
            self._quiet_answers = 2 * counts.unscored
            log.warning("the last %d answers could not be scored, the last one because %s", limit + 1, score.error)

    def watch_heldout_answer(self, score: RewardScore) -> None:
        """Count a score of an evaluation. An alarm ends the evaluation: it raises the error."""
        self._watch(self.heldout, score, "held-out answers")
        if self.error is not None:
            raise self.error

    def watch_update(self, result: UpdateResult) -> None:
        counts = self.updates
        counts.add(result)
        if counts.still == FIRST_UPDATES and not counts.moving:
            self._ring(f"no optimizer step was taken in the first {FIRST_UPDATES} updates: {self._cause()}")
        if counts.still > self._quiet_updates:
            self._quiet_updates = 2 * counts.still - 1
            if counts.moving:
                log.warning("no optimizer step was taken in the last %d updates: %s", counts.still, self._cause())

    def watch_end(self) -> None:
        """The run is complete. It may have been too short for the limits."""
        if self.message is not None:
            return
        if self.answers.unscored and not self.answers.scored:
            self._ring_unscored(self.answers, "answers")
        elif self.updates.still and not self.updates.moving:
            log.warning(
                "no optimizer step was taken in %d updates: %s",
                self.updates.still,
                self.updates.cause(self.reward_functions),
            )

    def state_dict(self) -> dict[str, Any]:
        return {name: asdict(getattr(self, name)) for name in ("answers", "heldout", "updates")}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on with saved counts. Without any (older versions saved none) the run counts as one that has learned."""
        if state is None:
            self.answers.scored = self.heldout.scored = self.updates.moving = 1
            return
        self.answers, self.heldout = AnswerCounts(**state["answers"]), AnswerCounts(**state["heldout"])
        self.updates = UpdateCounts(**state["updates"])
        for name in ("answers", "heldout"):
            if self._is_hopeless(getattr(self, name)):
                setattr(self, name, AnswerCounts())
        if not self.updates.moving and self.updates.still >= FIRST_UPDATES:
            self.updates = UpdateCounts()

    def _cause(self) -> str:
        return self.updates.cause(self.reward_functions)

    def _watch(self, counts: AnswerCounts, score: RewardScore, name: str) -> None:
        counts.add(score)
        if counts.scored or self.message is not None:
            return
        if score.error is not None:
            self._reasons[score.error] += 1
        if self._is_hopeless(counts):
            self._ring_unscored(counts, name)

    def _is_hopeless(self, counts: AnswerCounts) -> bool:
        limit = 2 * self.update_batch
        return not counts.scored and (counts.unscored >= limit or counts.timeouts >= min(FIRST_TIMEOUTS, limit))

    def _ring_unscored(self, counts: AnswerCounts, name: str) -> None:
        reason, count = self._reasons.most_common(1)[0]
        often = f" ({count} times)" if len(self._reasons) > 1 else ""
        self._ring(f"none of the first {counts.unscored} {name} could be scored: {reason}{often}")

    def _ring(self, message: str) -> None:
        if self.message is not None:
            return
        self.message = message
        if self.is_fatal:
            self.error = NothingLearnedError(f"{message}; {_HOW_TO_GO_ON}")
        else:
            log.warning("%s", message)
