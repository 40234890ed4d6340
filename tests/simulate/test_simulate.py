"""The simulator as a whole: compared with scripted runs and with known figures, and through the command line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sortedrl import cli
from sortedrl.clock import VirtualClock
from sortedrl.engine.base import (
    Delta,
    EngineEvent,
    Finished,
    InFlight,
    Request,
    Sampling,
    SegmentDelta,
    Span,
    as_deltas,
)
from sortedrl.engine.sim.cost import UnitCost
from sortedrl.engine.sim.engine import SimEngine
from sortedrl.errors import ConfigError
from sortedrl.records import Mode
from sortedrl.schedule import Strategy
from sortedrl.simulate.answers import TraceAnswers
from sortedrl.simulate.compare import OccupancyCurve
from sortedrl.simulate.run import knobs_for, simulate
from sortedrl.simulate.traces import Trace, load_trace
from sortedrl.telemetry.events import AttemptEnded, AttemptStarted, BatchTaken, Event, RunEnded, SampleRequeued
from tests.support.scripted_runs import ScriptedPolicy, scripted_run

REAL = Trace(lengths=[4, 1, 6, 2, 3, 9, 1, 5], prompts=list(range(8)), cap=9, source="eight")


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[int], dict[str, object]]:
    strategy = draw(st.sampled_from(list(Strategy)))
    options: dict[str, object] = {
        "strategy": strategy.value,
        "slots": draw(st.integers(1, 6)),
        "update_batch": draw(st.integers(1, 4)),
        "update_s": draw(st.sampled_from([0.0, 2.5])),
        "cohort_batches": draw(st.integers(2, 3)),
        "lookahead": draw(st.sampled_from([None, 0, 1])),
    }
    return draw(st.lists(st.integers(1, 30), min_size=4, max_size=30)), options


@settings(max_examples=150, deadline=None)
@given(question=questions())
def test_the_simulator_decides_as_the_engine_with_real_tokens_does(
    question: tuple[list[int], dict[str, object]],
) -> None:
    lengths, options = question
    events: list[Event] = []
    trace = Trace(lengths=lengths, prompts=list(range(len(lengths))), cap=64, source="drawn")
    summary = simulate(trace, emit=events.append, **options)
    knobs = knobs_for(
        options["strategy"],
        options["update_batch"],
        cohort_batches=options["cohort_batches"],
        lookahead=options["lookahead"],
        order=None,
    )
    if knobs.order == "shuffled":
        return  # the order depends on the seeds, which differ between the two runs
    run = scripted_run(
        knobs,
        policy=ScriptedPolicy(lengths=dict(enumerate(lengths))),
        slots=options["slots"],
        num_samples=len(lengths),
        update_s=options["update_s"],
        seed_of=lambda number: number,
    )
    assert run.controller.run()
    assert run.batches == [event.samples for event in events if isinstance(event, BatchTaken)]
    assert summary.wall_s == pytest.approx(run.clock.now())
    stats = run.engine.stats()
    assert summary.generated_tokens == stats.decoded_tokens
    assert summary.recomputed_tokens == stats.recomputed_tokens
    assert summary.bubble_ratio == pytest.approx(1 - stats.busy_slot_s / (options["slots"] * summary.rollout_s))


@pytest.mark.parametrize("seed", [1])
def test_known_figures_of_a_lognormal_trace(seed: int) -> None:
    # Two independent programs gave these figures for this trace, within a few percent across seeds.
    trace = load_trace("lognormal(700, 1.1, 8192)", samples=4096, seed=seed)
    expected = [
        ("sync", {}, 0.84),
        ("sync-large", {}, 0.55),
        ("sorted-on-policy", {}, 0.40),
        ("sorted-partial", {}, 0.55),
        ("april", {}, 0.14),
        ("sorted-partial", {"lookahead": 2}, 0.14),
    ]
    for strategy, knobs, bubble in expected:
        summary = simulate(trace, strategy=strategy, slots=128, update_batch=128, cohort_batches=4, **knobs)
        assert summary.bubble_ratio == pytest.approx(bubble, abs=0.03), strategy
        if strategy == "sorted-on-policy":
            assert summary.discarded_tokens / summary.trained_tokens == pytest.approx(0.5, abs=0.05)
        else:
            assert summary.goodput == pytest.approx(1 - summary.bubble_ratio)


class WatchedEngine(SimEngine):
    """Checks after every poll that the decoding sequences fit the KV cache and that none is lost."""

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        events = super().poll(timeout)
        decoding = [running for running in self.running.values() if not running.is_parked]
        assert sum(running.context for running in decoding) <= self.cost.kv_tokens or len(decoding) <= 1
        assert len(decoding) + len(self.parked) == len(self.running)
        assert decoding or not self.running
        return events


@settings(max_examples=100, deadline=None)
@given(question=questions(), kv_tokens=st.integers(33, 90))
def test_a_small_kv_cache_loses_nothing(question: tuple[list[int], dict[str, object]], kv_tokens: int) -> None:
    lengths, options = question
    knobs = knobs_for(options["strategy"], options["update_batch"], cohort_batches=options["cohort_batches"])
    run = scripted_run(
        knobs,
        policy=ScriptedPolicy(lengths=dict(enumerate(lengths))),
        slots=options["slots"],
        num_samples=len(lengths),
        update_s=options["update_s"],
        seed_of=lambda number: number,
    )
    engine = WatchedEngine(
        run.engine.script, slots=options["slots"], clock=run.clock, cost=UnitCost(kv_tokens=kv_tokens)
    )
    run.controller.engine = engine
    assert run.controller.run()
    assert sorted(sample.id for sample in run.trained) == list(range(len(lengths)))
    assert {sample.id: sample.num_tokens for sample in run.trained} == dict(enumerate(lengths))
    slot_s = sum(segment.slot_s for sample in run.trained for segment in sample.segments)
    assert slot_s == pytest.approx(sum(lengths))
    stats = engine.stats()
    discarded = sum(event.discarded for event in run.events if isinstance(event, SampleRequeued))
    assert stats.decoded_tokens == sum(lengths) + discarded


# ---- answers --------------------------------------------------------------------------------------------------------


def request(sample: int, seed: int, runs: list[tuple[int, int]], mode: Mode = Mode.REPLAY) -> Request:
    """A request whose cached tokens are `runs` of (version, count)."""
    return Request(
        sample=sample,
        attempt=1,
        prompt=(),
        budget=5000,
        seed=seed,
        sampling=Sampling(),
        mode=mode,
        cached=bytearray(sum(count for _, count in runs)),
        spans=[Span(version, count) for version, count in runs],
    )


@pytest.mark.parametrize(("runs", "age"), [([(4, 1000)], 1), ([(3, 1000)], 2), ([(3, 400), (3, 600)], 2)])
def test_the_accepted_prefix_is_geometric_in_age_and_length(runs: list[tuple[int, int]], age: int) -> None:
    # A prefix of m tokens keeps on average sum over i = 1 ... m of (1 - d)^(age i).
    divergence, number = 1e-3, 4000
    seeds = random.Random(0).sample(range(10**9), number)
    answers = TraceAnswers([5000] * number, seeds, divergence=divergence, cap=5000)
    kept = [answers.accepted(request(i, seeds[i], runs), 5) for i in range(number)]
    expected = sum((1 - divergence) ** (age * i) for i in range(1, 1001))
    assert sum(kept) / number == pytest.approx(expected, rel=0.03)
    assert kept == [answers.accepted(request(i, seeds[i], runs), 5) for i in range(number)]


def test_tokens_of_the_present_version_never_differ() -> None:
    answers = TraceAnswers([100], [7], divergence=0.999, cap=100)
    assert answers.accepted(request(0, 7, [(5, 60)]), 5) == 60


def test_fresh_noise_takes_another_length_of_the_same_prompt() -> None:
    lengths = [1, 2, 3, 40, 50, 60]
    siblings = [range(3)] * 3 + [range(3, 6)] * 3
    answers = TraceAnswers(lengths, list(range(6)), siblings=siblings, cap=60)
    drawn = {answers.length(request(4, seed, [], Mode.FRESH), 0) for seed in range(100, 160)}
    assert drawn == {40, 50, 60}
    alone = TraceAnswers(lengths, list(range(6)), cap=60)
    assert {alone.length(request(4, seed, [], Mode.FRESH), 0) for seed in range(100, 200)} == set(lengths)
    assert alone.length(request(4, 4, [], Mode.FRESH), 0) == 50


def test_fresh_noise_shortens_what_is_trained_and_seeded_noise_does_not() -> None:
    trace = load_trace("lognormal(50, 1.1, 1000)", samples=512)
    seeded, fresh = (
        simulate(trace, strategy="sorted-on-policy", slots=16, update_batch=16, restart_noise=noise)
        for noise in ("seeded", "fresh")
    )
    assert seeded.trained_tokens == sum(trace.lengths)
    assert fresh.trained_tokens < 0.9 * seeded.trained_tokens


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("noise", ["seeded", "fresh"])
def test_the_summary_does_not_depend_on_a_listener(strategy: Strategy, noise: str) -> None:
    trace = load_trace("lognormal(40, 1.0, 200)", samples=192, seed=5)
    options = {"strategy": strategy, "slots": 12, "update_batch": 16, "divergence": 0.01, "drift": 0.97}
    told: list[Event] = []
    heard = simulate(trace, restart_noise=noise, update_s=3.5, emit=told.append, **options)
    assert simulate(trace, restart_noise=noise, update_s=3.5, **options) == heard
    assert sum(isinstance(event, AttemptStarted) for event in told) >= 192


def test_segments_expand_to_deltas() -> None:
    policy, clock = ScriptedPolicy(lengths={7: 5}), VirtualClock()
    engine = SimEngine(policy, slots=1, clock=clock)
    engine.submit([Request(sample=3, attempt=2, prompt=(1,), budget=9, seed=7, sampling=Sampling())])
    clock.set_timer(2.0)
    assert engine.poll() == []
    engine.publish(1, None, InFlight.KEEP)
    events = engine.poll()
    assert [type(event) for event in events] == [Finished]
    told = [(e.start, e.tokens, e.version, e.slot_s) for e in as_deltas(events) if isinstance(e, Delta)]
    tokens = [policy.token(7, position, position >= 2) for position in range(5)]
    assert told == [(0, tokens[:2], 0, 2.0), (2, tokens[2:], 1, 3.0)]
    assert [(e.sample, e.attempt) for e in as_deltas(events)] == [(3, 2)] * 3
    assert [type(event) for event in as_deltas(events)] == [Delta, Delta, Finished]


@pytest.mark.parametrize("strategy", list(Strategy))
def test_segments_that_answers_share_change_nothing(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = load_trace("lognormal(40, 1.0, 200)", samples=192, seed=5)
    options = {"strategy": strategy, "slots": 12, "update_batch": 16, "divergence": 0.01, "prompt_tokens": 20}
    shared: list[Event] = []
    apart: list[Event] = []
    simulate(trace, emit=shared.append, cost=UnitCost(kv_tokens=900), **options)
    monkeypatch.setattr(TraceAnswers, "is_blank", False)
    simulate(trace, emit=apart.append, cost=UnitCost(kv_tokens=900), **options)
    assert shared == apart


def test_no_answer_ends_with_a_segment_that_others_have_too() -> None:
    clock = VirtualClock()
    engine = SimEngine(TraceAnswers([9, 9], [0, 0], cap=9), slots=2, clock=clock)
    engine.submit([Request(sample=n, attempt=1, prompt=(1,), budget=9, seed=0, sampling=Sampling()) for n in range(2)])
    for version in (1, 2, 3):
        clock.set_timer(3.0 * version - 1)
        assert engine.poll() == []
        engine.publish(version, None, InFlight.KEEP)
    written = [event.segments for event in engine.interrupt() if isinstance(event, SegmentDelta)]
    told = [(0, 2, 2.0), (1, 3, 3.0), (2, 3, 3.0)]  # 2 steps before the first publication, 3 before each other
    assert [[(s.version, len(s.tokens), s.slot_s) for s in segments] for segments in written] == [told, told]
    (_, middle, last), (_, other_middle, other_last) = written
    assert middle is other_middle
    last.extend(middle)
    assert (len(last.tokens), len(other_last.tokens)) == (6, 3)


def test_a_simulation_repeats_itself() -> None:
    trace = load_trace("lognormal(50, 1.1, 1000)", samples=256)
    options = {"strategy": "sorted-replay", "slots": 16, "update_batch": 16, "divergence": 1e-3, "lookahead": 1}
    assert simulate(trace, seed=3, **options) == simulate(trace, seed=3, **options)
    assert simulate(trace, seed=3, **options) != simulate(trace, seed=4, **options)


# ---- questions and output -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots must be at least 1"),
        ({"update_batch": 9}, "larger than the trace, which has only 8"),
        ({"update_batch": 2, "group_size": 3}, "multiple of group_size 3"),
        ({"update_batch": 3, "group_size": 3}, "do not make whole groups of 3"),
        ({"divergence": 1.0}, "from 0 to below 1"),
        ({"drift": 0.0}, "above 0"),
        ({"slots": 10**12}, "slots must be at most 10,000,000, not 1000000000000: lower --slots"),
        ({"prompt_tokens": 10**12}, "prompt_tokens must be at most 10,000,000"),
        ({"update_s": float("inf")}, "update_s must be a finite number of seconds, not inf"),
        ({"strategy": "sorted"}, "unknown strategy 'sorted': did you mean sorted-"),
        ({"lookahead": "x"}, "lookahead must be 0 or more"),
    ],
)
def test_questions_that_cannot_be_answered(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(REAL, **{"strategy": "sorted-partial", "slots": 2, "update_batch": 2, **options})


def test_knobs_asked_of_all_leave_a_strategy_what_it_is() -> None:
    asked = {"cohort_batches": 3, "lookahead": 2, "max_staleness": 4}
    assert knobs_for("sync", 8, **asked).cohort_batches == 1
    assert knobs_for("sync", 8, **asked).max_staleness == 0
    assert knobs_for("april", 8, **asked).lookahead is None
    partial = knobs_for("sorted-partial", 8, **asked)
    assert (partial.cohort_batches, partial.lookahead, partial.max_staleness) == (3, 2, 4)


def test_the_curve_is_the_mean_of_running_slots() -> None:
    # Two slots from 0, one from 1, none from 3, the end at 4: halves hold (2 + 1) / 2 and 1 / 2.
    curve = OccupancyCurve()
    for slot in (0, 1):
        curve.emit(AttemptStarted(t=0.0, sample=slot, attempt=1, mode="fresh", cached=0, slot=slot, version=0))
    for slot, t in ((0, 1.0), (1, 3.0)):
        curve.emit(AttemptEnded(t=t, sample=slot, attempt=1, outcome="stop", num_tokens=1, slot=slot))
    curve.emit(RunEnded(t=4.0, reason="complete"))
    assert curve.binned(2) == ([0.0, 2.0, 4.0], [1.5, 0.5])
    assert curve.binned(1)[1] == [1.0]


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["sortedrl", "simulate", *arguments])
    try:
        cli.run_command()
    except SystemExit as leave:
        return int(leave.code or 0)
    return 0


def test_the_command_gives_one_summary_per_strategy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "<b>.json"
    trace.write_text(json.dumps([[7, 3], [2, 9], [4, 4], [1, 8]]))
    page = tmp_path / "page.html"
    options = ["--trace", str(trace), "--slots", "2", "--replicas", "2", "--update-batch", "4", "--group-size", "2"]
    assert run_cli(monkeypatch, *options, "--cost", "roofline", "--html", str(page), "--json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["strategy"] for run in runs] == [strategy.value for strategy in Strategy]
    for run in runs:
        assert (run["samples"], run["slots"], run["accuracy_after"], run["ledger"]["lost"]) == (8, 4, None, 0)
        assert run["trained_tokens"] == 38
        assert run["update_s"] > 0
    text = page.read_text()
    assert "<b>.json" not in text
    assert "&lt;b&gt;.json" in text
    assert "src=" not in text.split("<body>")[1]
    assert run_cli(monkeypatch, *options, "--strategy", "sync,sorted-partial") == 0
    out = capsys.readouterr().out
    assert "goodput" in out
    assert "1.00x" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "none.json"], "No such file"),
        (["--trace", "lognormal(9, 1, 99)", "--strategy", "snyc"], "did you mean sync or async?"),
        (["--trace", "lognormal(9, 1, 99)", "--strategy", " , "], "names no strategy"),
        (["--trace", "lognormal(9, 1, 99)", "--slots", "0"], "slots must be at least 1"),
        (["--trace", "lognormal(9, 1, 99)", "--samples", "8", "--update-batch", "9"], "larger than the trace"),
        (["--trace", "lognormal(9, 1, 99)", "--cost", "roofline", "--hardware", "h1000"], "did you mean h100?"),
        (["--trace", "lognormal(9, 1, 99)", "--html", "/nowhere/x.html", "--strategy", "sync"], "cannot write"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run_cli(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
