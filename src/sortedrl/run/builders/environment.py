"""Builds what a run with tools needs: the class of environments, how the model calls them, and the workers.

`parts.py` calls it before the run directory is touched, so a class that cannot work stops the run with one line;
`loop.py` puts the turns of training and evaluation together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sortedrl.buffer import Buffer
from sortedrl.clock import Clock
from sortedrl.config import SortedConfig
from sortedrl.config.plug_points import ENVIRONMENT
from sortedrl.environment.answers import AnswerTurns
from sortedrl.environment.base import EnvironmentSpec, describe
from sortedrl.environment.dialect import Dialect
from sortedrl.environment.loop import TurnLoop
from sortedrl.environment.past import past_turns
from sortedrl.environment.runner import EnvironmentRunner
from sortedrl.environment.scorer import EnvironmentScorer
from sortedrl.ledger.store import DurableBuffer
from sortedrl.reward.scorer import SampleScorer
from sortedrl.tasks.base import PromptStream, Task
from sortedrl.telemetry.events import Emit


@dataclass(slots=True, kw_only=True)
class RunEnvironment:
    """The class, the dialect of the model, and the workers of training and of evaluation."""

    spec: EnvironmentSpec
    dialect: Dialect
    runner: EnvironmentRunner
    heldout_runner: EnvironmentRunner
    max_turns: int

    def start(self) -> None:
        self.runner.start()

    def close(self) -> None:
        self.runner.close()
        self.heldout_runner.close()

    def turns(self, buffer: Buffer, config: SortedConfig, *, clock: Clock, emit: Emit) -> TurnLoop:
        """The turns of training; those of a resumed run know what the ledger recorded."""
        return TurnLoop(
            buffer=buffer,
            runner=self.runner,
            dialect=self.dialect,
            knobs=config.knobs,
            max_turns=self.max_turns,
            clock=clock,
            emit=emit,
            past=past_turns(buffer.store.live_calls()) if isinstance(buffer, DurableBuffer) else None,
        )

    def answer_turns(self) -> AnswerTurns:
        return AnswerTurns(runner=self.heldout_runner, dialect=self.dialect, max_turns=self.max_turns)

    def scorer(self, inner: SampleScorer, turns: TurnLoop) -> Any:
        """The scorer of training: with the environments' own rewards, if they give any."""
        if not self.spec.has_reward:
            return inner
        return EnvironmentScorer(
            inner=inner, runner=self.runner, make_turn=turns.reward_turn, repeat_turn=turns.repeat_reward_turn
        )

    def heldout_scorer(self, inner: SampleScorer) -> Any:
        if not self.spec.has_reward:
            return inner
        return EnvironmentScorer(
            inner=inner, runner=self.heldout_runner, make_turn=_refuse, repeat_turn=_refuse, starts_over=False
        )


def find_environment(config: SortedConfig, task: Task) -> EnvironmentSpec | None:
    """The configured class, or the one that the task brings; None without tools."""
    factory = config.environment.factory
    if factory == "none":
        own = getattr(task, "environment_factory", None)
        return None if own is None else describe(own, "the task's environment_factory")
    return describe(ENVIRONMENT.find(factory))


def build_environment(config: SortedConfig, spec: EnvironmentSpec, stream: PromptStream) -> RunEnvironment:
    """Check the rows that the run will use, and make the workers; they start later."""
    size, used = stream.task.train.size, config.run.samples // config.learner.group_size
    first: Any = None
    for number, row in stream.first_rows(1 if size is None else min(size, used)):
        first = row if first is None else first
        spec.check_row(row, f"{stream.task.name}/{number}")
    is_chat = first is not None and not isinstance(first.get("prompt"), str)
    settings = config.environment
    limits: dict[str, Any] = {
        "timeout_s": settings.timeout_s,
        "workers": settings.workers,
        "memory_bytes": settings.memory_mb * 2**20,
        "max_chars": settings.max_output_chars,
        "keep_env": settings.keep_env,
        "run_in": settings.run_in,
    }
    return RunEnvironment(
        spec=spec,
        dialect=Dialect(stream.tokenizer, spec, is_chat=is_chat),
        runner=EnvironmentRunner(spec, **limits),
        heldout_runner=EnvironmentRunner(spec, **limits),
        max_turns=settings.max_turns,
    )


def _refuse(sample: Any) -> Any:
    raise AssertionError("evaluation submits answers, not samples")
