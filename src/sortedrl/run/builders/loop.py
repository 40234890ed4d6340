"""Puts the controller of a run together: its parts, its buffer, evaluation, checkpoints, clock and events.

`trainer.py` calls `build_loop` once the run directory is open. Everything is passed to constructors: nothing is changed
in a controller, learner or buffer afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sortedrl import schedule as sorted_schedule
from sortedrl.buffer import Buffer
from sortedrl.clock import Clock
from sortedrl.config import SortedConfig
from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.engine.base import InFlight
from sortedrl.protocols import CheckpointHook, EvaluationHook
from sortedrl.reward.pool import RewardCall, RewardScore
from sortedrl.reward.scorer import SampleScorer
from sortedrl.run.builders.parts import RunParts
from sortedrl.run.evaluate import Evaluator
from sortedrl.schedule import Schedule
from sortedrl.schedule.checked import CheckedSchedule
from sortedrl.telemetry.events import Emit, FunctionsScored, RewardCalled, RewardFailed

UPDATE_POLL_S = 0.002  # an engine that waits for a slow answer must not keep the next update waiting


def build_evaluator(config: SortedConfig, parts: RunParts, *, emit: Emit, clock: Clock) -> Evaluator:
    """The evaluation on held-out prompts."""
    environment, watch = parts.environment, parts.alarm.watch_heldout_answer
    told = None if environment is None else environment.dialect.conversation
    scorer = SampleScorer(pool=parts.heldout_rewards, tokenizer=parts.tokenizer, on_score=watch, conversation=told)
    return Evaluator(
        engine=parts.engine,
        prompts=parts.heldout,
        scorer=scorer if environment is None else environment.heldout_scorer(scorer),
        sampling=parts.sampling,
        budget=config.engine.max_new_tokens,
        seed=config.run.seed,
        clock=clock,
        emit=emit,
        right_above=config.eval.right_above,
        num_samples=config.eval.samples,
        has_fresh_noise=config.eval.noise == "fresh",
        group_column=parts.task.group_column,
        every_samples=config.eval.every_samples,
        tools=None if environment is None else environment.answer_turns(),
        has_environment_reward=environment is not None and environment.spec.has_reward,
    )


def build_loop(
    config: SortedConfig,
    parts: RunParts,
    buffer: Buffer,
    *,
    emit: Emit,
    clock: Clock,
    should_stop: Callable[[], bool] = lambda: False,
    evaluation: EvaluationHook | None = None,
    checkpoints: CheckpointHook | None = None,
) -> Controller:
    """The controller. It also stops when the reward functions fail for good, or when nothing can be learned."""

    def watch(score: RewardScore) -> None:
        if score.by_function:
            sample, attempt = score.key
            rewards = dict(score.by_function)
            emit(FunctionsScored(t=clock.now(), sample=sample, attempt=attempt, rewards=rewards))
        if score.kind is not None:
            sample, attempt = score.key
            emit(RewardFailed(t=clock.now(), sample=sample, attempt=attempt, error=f"{score.function}: {score.kind}"))
        parts.alarm.watch_answer(score)

    scorer = SampleScorer(
        pool=parts.rewards,
        tokenizer=parts.tokenizer,
        on_skipped=parts.learner.skip,
        on_score=watch,
        on_call=_reward_call_emitter(emit, clock),
        conversation=None if parts.environment is None else parts.environment.dialect.conversation,
    )
    turns = None if parts.environment is None else parts.environment.turns(buffer, config, clock=clock, emit=emit)
    return Controller(
        buffer,
        LoopParts(
            engine=parts.engine,
            learner=parts.learner,
            scorer=scorer if turns is None or parts.environment is None else parts.environment.scorer(scorer, turns),
            load_samples=parts.loader.load,
            evaluation=evaluation,
            checkpoints=checkpoints,
            schedule=build_schedule(config),
            on_update=parts.alarm.watch_update,
            turns=turns,
        ),
        LoopSettings(
            knobs=config.knobs,
            total_samples=config.run.samples,
            sampling=parts.sampling,
            replay_tolerance=config.engine.replay_tolerance,
            in_flight=InFlight(config.engine.in_flight),
            update_poll_s=UPDATE_POLL_S,
            score_grace_s=config.reward.grace_s,
            colocated=config.engine.sleep_during_updates,
        ),
        clock=clock,
        emit=emit,
        should_stop=lambda: should_stop() or (parts.rewards.failure or parts.alarm.error) is not None,
    )


def build_schedule(config: SortedConfig) -> Schedule:
    """The decisions of the strategy: ours, or the user's behind checks."""
    own = config.own_schedule
    return sorted_schedule if own is None else CheckedSchedule(own, config.strategy_name)


def _reward_call_emitter(emit: Emit, clock: Clock) -> Callable[[RewardCall], None]:
    """A callback that reports each finished call of a reward function as a RewardCalled event."""

    def report(call: RewardCall) -> None:
        lag_s = time.monotonic() - call.ended
        emit(
            RewardCalled(
                t=clock.now(), worker=call.worker, seconds=call.seconds, lag_s=lag_s, num_samples=call.num_samples
            )
        )

    return report
