"""Costs fitted to a run: spans worked out by hand, and known costs recovered from the events of a toy engine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sortedrl.config import SortedConfig
from sortedrl.errors import DataError
from sortedrl.simulate.fit import APART_ELEMENTS, FittedCost, Observed, Observer, SteadySpan, fit_runs
from sortedrl.simulate.forecast import forecast
from sortedrl.simulate.plan import PlanQuestion, propose
from sortedrl.telemetry import events
from sortedrl.telemetry.sinks import JsonlSink
from sortedrl.telemetry.summary import Summary

TRUE = FittedCost(
    base_s=6e-4,
    several_s=1e-4,
    slot_s=3e-5,
    window_s=4e-7,
    call_s=2e-3,
    start_s=2e-4,
    token_s=2e-5,
    poll_s=1e-3,
    host_s=6e-4,
    update_base_s=5e-3,
    update_token_s=6e-5,
    publication_s=1e-3,
    harvest_s=4e-3,
    prompt_tokens=10,
)


def started(t: float, sample: int, *, cached: int = 0, mode: str = "fresh") -> events.Event:
    return events.AttemptStarted(t=t, sample=sample, attempt=1, mode=mode, cached=cached, slot=0, version=0)


def ended(t: float, sample: int, tokens: int, outcome: str = "stop") -> events.Event:
    return events.AttemptEnded(t=t, sample=sample, attempt=1, outcome=outcome, num_tokens=tokens, slot=0)


def taken(t: float, update: int, lengths: dict[int, int], *, num_paused: int = 0) -> events.BatchTaken:
    zeros = [0] * len(lengths)
    return events.BatchTaken(
        t=t,
        update=update,
        version=update,
        samples=list(lengths),
        lengths=list(lengths.values()),
        rewards=[0.0] * len(lengths),
        staleness=zeros,
        staleness_token_sum=zeros,
        truncated=0,
        num_interrupted=0,
        num_paused=num_paused,
        slot_s=0.0,
    )


def observe(*seen: events.Event) -> Observed:
    observer = Observer(Observed())
    for event in seen:
        observer.observe(event)
    return observer.observed


def rows(*seen: events.Event) -> list[tuple[object, ...]]:
    return [(s.seconds, s.started, s.cached, s.steps, s.lengths) for s in observe(*seen).spans]


def test_spans_by_hand() -> None:
    # The prefill gives each a token. One step more ends the first (2 tokens); two more by itself end the second (4).
    log = [started(5.0, 0), started(5.1, 1), ended(6.0, 0, 2), ended(8.5, 1, 4)]
    assert rows(*log) == [(1.0, 2, 0, 1, (1, 1)), (2.5, 0, 0, 2, (2,))]


def test_a_replay_goes_on_from_what_was_accepted() -> None:
    # 6 of 9 cached tokens are accepted, the prefill adds the seventh, and three steps end the answer at 10.
    log = [
        started(0.0, 0, cached=9, mode="replay"),
        events.AttemptVerified(t=0.5, sample=0, attempt=1, cached=9, accepted=6),
        ended(2.0, 0, 10),
    ]
    assert rows(*log) == [(2.0, 1, 9, 3, (7,))]


def test_windows_by_hand() -> None:
    # Three prompt tokens and a step: lengths 13, 5 and 4. Together as far as the longest: 3 x 13 = 39. The longest in a
    # call of its own: 13 + 2 x 5 + 4 = 27. Each in one: 13 + 5 + 4 + 8 = 30.
    stretch = SteadySpan(seconds=1.0, started=0, cached=0, steps=1, lengths=(2, 10, 1))
    assert stretch.window(3, None) == 39
    assert stretch.window(3, 4) == 27
    assert stretch.window(3, 100) == 39
    # Two steps of one sequence of 10: it attends to 13 and to 14.
    assert SteadySpan(seconds=1.0, started=0, cached=0, steps=2, lengths=(10,)).window(3, 4) == 27


@pytest.mark.parametrize("lengths", [(5,), (7, 7, 7), (900, 10, 12, 14), (400, 390, 12, 14, 13, 12), (50, 40, 30, 20)])
def test_a_window_is_what_the_engine_attends_to(lengths: tuple[int, ...]) -> None:
    cache = pytest.importorskip("sortedrl.engine.local.cache")
    elements = 64
    left, attended, price = sorted(lengths, reverse=True), 0.0, APART_ELEMENTS / elements
    sizes = cache.split_into_groups(left, elements)
    for size in sizes:
        attended += size * left[0]
        left = left[size:]
    attended += price * (len(sizes) - 1)
    assert SteadySpan(seconds=1.0, started=0, cached=0, steps=1, lengths=lengths).window(0, price) == attended


def test_what_waits_in_its_slot_is_prefilled_with_what_starts() -> None:
    # Sample 0 ends at 3 tokens, and 1 waits with as many while the update takes a second and the publication half of
    # one; the time until 2 starts is the harvest's. The prefill takes 1 to 4 tokens, and one step ends it at 5.
    log = [
        *(started(0.0, 0), started(0.0, 1), ended(2.0, 0, 3), taken(2.1, 0, {0: 3}, num_paused=1)),
        events.UpdateDone(t=3.1, update=0, version=1, optimizer_steps=1, seconds=1.0, metrics={}),
        *(events.WeightsPublished(t=3.6, version=1, seconds=0.5), started(3.7, 2), ended(5.0, 1, 5)),
    ]
    assert rows(*log) == [(2.0, 2, 0, 2, (1, 1)), (pytest.approx(1.3), 2, 3, 1, (4, 1))]


def test_ends_in_one_step_are_one_span_and_interruptions_none() -> None:
    log = [started(0.0, n) for n in range(3)]
    log += [ended(1.0, 0, 3), ended(1.1, 1, 3), ended(1.2, 2, 3, "interrupted")]
    assert [row[0] for row in rows(*log)] == [1.0]


def test_a_run_with_overlap_is_refused() -> None:
    with pytest.raises(DataError, match="overlap = false"):
        rows(started(0.0, 0), started(0.0, 1), ended(1.0, 0, 3), taken(1.0, 0, {0: 3}))


@dataclass(slots=True, kw_only=True)
class ToyRun:
    """Decodes step by step with the true costs, fills `slots` from a queue, and writes a run directory."""

    cost: FittedCost
    slots: int
    refills: bool
    clock: float = 0.0
    rollout_s: float = 0.0
    busy_slot_s: float = 0.0
    log: list[events.Event] = field(default_factory=list)

    def run(self, lengths: list[int], update_batch: int, cached: dict[int, int]) -> ToyRun:
        waiting = list(enumerate(lengths))
        for update in itertools.count():
            if not waiting:
                return self
            self.rollout(waiting[:update_batch], cached)
            waiting = waiting[update_batch:]
            batch = {
                n: lengths[n] for n in range(update * update_batch, min((update + 1) * update_batch, len(lengths)))
            }
            self.update(update, batch)
        raise AssertionError

    def rollout(self, cohort: list[tuple[int, int]], cached: dict[int, int]) -> None:
        running: dict[int, int] = {}
        ends = dict(cohort)
        queue = [number for number, _ in cohort]
        began = self.clock
        while queue or running:
            fresh = queue[: self.slots - len(running)] if self.refills or not running else []
            queue = queue[len(fresh) :]
            for number in fresh:
                held = cached.get(number, 0)
                self.log.append(started(self.clock, number, cached=held, mode="resume" if held else "fresh"))
                running[number] = held + 1
            cost, since = self.cost, self.clock
            if fresh:
                tokens = sum(cached.get(number, 0) for number in fresh)
                self.clock += cost.call_s + cost.start_s * len(fresh) + cost.token_s * tokens
            self.clock += cost.poll_s
            while all(held < ends[number] for number, held in running.items()):
                window = len(running) * (max(running.values()) + cost.prompt_tokens)
                several_s = cost.several_s if len(running) > 1 else 0.0
                self.clock += cost.base_s + several_s + cost.slot_s * len(running) + cost.window_s * window
                running = {number: held + 1 for number, held in running.items()}
            self.busy_slot_s += (self.clock - since - cost.host_s) * len(running)
            for number in [number for number, held in running.items() if held >= ends[number]]:
                self.log.append(ended(self.clock, number, ends[number]))
                del running[number]
        self.clock += self.cost.harvest_s
        self.rollout_s += self.clock - began

    def update(self, number: int, batch: dict[int, int]) -> None:
        self.log.append(taken(self.clock, number, batch))
        learned, prompts = sum(batch.values()), self.cost.prompt_tokens * len(batch)
        seconds = self.cost.update_base_s + self.cost.update_token_s * (learned + prompts)
        self.clock += seconds
        metrics = {"computed_tokens": float(learned + prompts), "learned_tokens": float(learned)}
        self.log.append(
            events.UpdateDone(
                t=self.clock, update=number, version=number + 1, optimizer_steps=1, seconds=seconds, metrics=metrics
            )
        )
        self.clock += self.cost.publication_s
        self.log.append(events.WeightsPublished(t=self.clock, version=number + 1, seconds=self.cost.publication_s))

    def write(self, path: Path, config: SortedConfig | None = None) -> Path:
        path.mkdir()
        sink = JsonlSink(path / "events.jsonl")
        for event in self.log:
            sink.emit(event)
        sink.close()
        bubble_ratio = 1.0 - self.busy_slot_s / (self.slots * self.rollout_s) if self.rollout_s else None
        summary = Summary(strategy="sync", slots=self.slots, rollout_s=self.rollout_s, bubble_ratio=bubble_ratio)
        summary.write(path / "summary.json")
        (path / "config.toml").write_text((config or SortedConfig()).to_toml(), encoding="utf-8")
        return path


LENGTHS = [2 + (7 * n * n + 3 * n) % 90 for n in range(96)]


def test_known_costs_are_found_again(tmp_path: Path) -> None:
    cached = {n: n % 5 for n in range(0, 96, 3) if n % 5 < LENGTHS[n] - 1}
    run = ToyRun(cost=TRUE, slots=6, refills=True).run(LENGTHS, 24, cached)
    found = fit_runs([run.write(tmp_path / "run")])
    assert found.assumed == []
    costs, true = ({**cost.as_dict(), "apart": 0, "kv_tokens": 0} for cost in (found.cost, TRUE))
    assert costs == pytest.approx(true, rel=1e-4)
    assert found.r2 == pytest.approx(1.0)
    assert found.update_r2 == pytest.approx(1.0)


def test_what_sync_cannot_tell_is_said(tmp_path: Path) -> None:
    """All prefills start eight samples: (2e-3 + 8 x 2e-4) s are halved; a cached token costs a third of 6e-5 s."""
    run = ToyRun(cost=TRUE, slots=8, refills=False).run(LENGTHS, 8, {})
    found = fit_runs([run.write(tmp_path / "run")])
    assert found.assumed == ["call_s", "start_s", "token_s"]
    assert found.cost.call_s == pytest.approx(1.8e-3, rel=1e-3)
    assert found.cost.start_s == pytest.approx(1.8e-3 / 8, rel=1e-3)
    assert found.cost.token_s == pytest.approx(2e-5, rel=1e-3)
    assert found.cost.base_s == pytest.approx(TRUE.base_s, rel=1e-3)
    assert found.cost.poll_s == pytest.approx(TRUE.poll_s, rel=1e-3)
    assert found.cost.host_s == pytest.approx(TRUE.host_s, rel=1e-3)


def test_a_sync_run_is_forecast_from_its_own_fit(tmp_path: Path) -> None:
    """The simulator gives the toy run's times again: schedule, lengths and costs are equal, the code is independent.

    The attention window differs, because a forecast leaves out the token that comes from the prefill.
    """
    run = ToyRun(cost=TRUE, slots=8, refills=False).run(LENGTHS, 8, {})
    config = SortedConfig(
        run={"samples": 96},
        schedule={"strategy": "sync", "update_batch": 8},
        engine={"slots": 8},
        learner={"algorithm": "reinforce++", "group_size": 1},
    )
    path = run.write(tmp_path / "run", config)
    found = forecast(path, fit_runs([path]).cost)
    assert found.rollout_s == pytest.approx(run.rollout_s, rel=3e-3)
    assert found.rollout_error == pytest.approx(0.0, abs=3e-3)
    assert found.bubble_error == pytest.approx(0.0, abs=3e-3)
    assert 0.2 < found.bubble_ratio < 0.8


def test_a_plan_takes_costs_and_settings_from_a_run(tmp_path: Path) -> None:
    run = ToyRun(cost=TRUE, slots=8, refills=False).run(LENGTHS, 8, {})
    config = SortedConfig(
        run={"samples": 96, "seed": 3},
        schedule={"strategy": "sync", "update_batch": 8},
        engine={"slots": 8},
        learner={"algorithm": "reinforce++", "group_size": 1, "lr": 1e-3},
    )
    path = run.write(tmp_path / "run", config)
    found = propose(PlanQuestion(from_run=path, candidates=6, max_staleness=1))
    workload = found.plan.workload
    assert (workload.slots, workload.update_batch, workload.prompt_tokens) == (8, 8, TRUE.prompt_tokens)
    assert workload.trace.lengths == LENGTHS
    assert found.fit is not None
    assert workload.cost == found.fit.cost
    assert (found.config.learner.lr, found.config.run.seed) == (1e-3, 3)
    told = found.as_dict()
    assert told["fit"]["rollout_error"] == pytest.approx(0.0, abs=3e-3)
    assert told["fit"]["assumed"] == ["call_s", "start_s", "token_s"]


def test_two_runs_are_fitted_together(tmp_path: Path) -> None:
    runs = [ToyRun(cost=TRUE, slots=slots, refills=False).run(LENGTHS, slots, {}) for slots in (8, 4)]
    found = fit_runs([run.write(tmp_path / str(run.slots)) for run in runs])
    assert found.assumed == ["token_s"]  # calls with 8 and with 4 samples separate call_s from start_s
    assert found.cost.call_s == pytest.approx(TRUE.call_s, rel=1e-3)
    assert found.cost.harvest_s == pytest.approx(TRUE.harvest_s, rel=1e-3)


def test_too_short_a_run_is_refused(tmp_path: Path) -> None:
    run = ToyRun(cost=TRUE, slots=4, refills=False).run(LENGTHS[:8], 4, {})
    with pytest.raises(DataError, match="too few"):
        fit_runs([run.write(tmp_path / "run")])
