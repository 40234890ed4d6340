"""The buffer: every transition of docs/reference/guarantees.md, the rejection of all others, and its durable form."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from sortedrl.buffer import Buffer
from sortedrl.records import FinishReason, Mode, Prompt, Sample, Segment, State
from sortedrl.schedule import Strategy, resolve_knobs
from tests.support.scripted_runs import ScriptedPolicy, scripted_run

BUDGET = 10


def make_sample(number: int, *, siblings: int = 1, cohort: int = 0) -> Sample:
    prompt = Prompt(id=f"p{number // siblings}", tokens=(1, 2), content="a question", columns={"level": 3})
    return Sample(
        id=number, prompt=prompt, index=number % siblings, epoch=0, cohort=cohort, seed=100 + number, budget=BUDGET
    )


def loaded(count: int = 1, *, siblings: int = 1, grouped: bool = False) -> tuple[Buffer, list[Sample]]:
    buffer = Buffer(grouped=grouped)
    samples = [make_sample(number, siblings=siblings) for number in range(count)]
    buffer.load(samples)
    return buffer, samples


def write(
    buffer: Buffer,
    sample: Sample,
    tokens: list[int],
    *,
    start: int | None = None,
    slot_s: float = 0.0,
    verified: int = 0,
) -> int:
    segment = Segment(buffer.version, list(tokens), [-0.1 * token for token in tokens], slot_s)
    return buffer.append(sample, segment, start=sample.num_tokens if start is None else start, verified=verified)


def bring(buffer: Buffer, sample: Sample, state: State, tokens: list[int] | None = None) -> None:
    """Bring a sample into a state by the shortest way."""
    if state == State.CALLING:
        bring(buffer, sample, State.FINISHED, tokens)
        buffer.call(sample, 1)
        return
    path = [State.PENDING, State.RUNNING, State.FINISHED, State.SCORED, State.TRAINED]
    steps: list[Callable[[], object]] = [
        lambda: (buffer.start(sample), write(buffer, sample, tokens or [4, 5, 6])),
        lambda: buffer.finish(sample, FinishReason.STOP),
        lambda: buffer.score(sample.id, sample.attempt, 1.0),
        lambda: buffer.take([sample]),
    ]
    for step in steps[: path.index(state)]:
        step()
    assert sample.state == state


VERBS: dict[str, Callable[[Buffer, Sample], object]] = {
    "admitted": lambda buffer, sample: buffer.start(sample),
    "tokens arrive": lambda buffer, sample: write(buffer, sample, [7]),
    "answer complete": lambda buffer, sample: buffer.finish(sample, FinishReason.LENGTH),
    "interrupted": lambda buffer, sample: buffer.interrupt(sample),
    "attempt failed": lambda buffer, sample: buffer.fail(sample),
    "tools called": lambda buffer, sample: buffer.call(sample, 1),
    "fed": lambda buffer, sample: buffer.feed(sample, [9]),
    "failed too often": lambda buffer, sample: buffer.give_up(sample),
    "in a batch": lambda buffer, sample: buffer.take([sample]),
    "fate resume": lambda buffer, sample: buffer.requeue(sample, Mode.RESUME),
    "fate replay": lambda buffer, sample: buffer.requeue(sample, Mode.REPLAY),
    "fate restart": lambda buffer, sample: buffer.requeue(sample, Mode.FRESH),
}
ALLOWED: dict[str, dict[State, State]] = {
    "admitted": {State.PENDING: State.RUNNING},
    "tokens arrive": {State.RUNNING: State.RUNNING},
    "answer complete": {State.RUNNING: State.FINISHED, State.CALLING: State.FINISHED},
    "tools called": {State.FINISHED: State.CALLING},
    "fed": {State.FINISHED: State.PENDING, State.CALLING: State.PENDING},
    "interrupted": {State.RUNNING: State.PENDING},
    "attempt failed": {State.RUNNING: State.PENDING},
    "failed too often": {State.RUNNING: State.FINISHED},
    "in a batch": {State.SCORED: State.TRAINED},
    **{
        fate: dict.fromkeys((State.PENDING, State.FINISHED, State.SCORED), State.PENDING)
        for fate in ("fate resume", "fate replay")
    },
    "fate restart": dict.fromkeys((State.PENDING, State.CALLING, State.FINISHED, State.SCORED), State.PENDING),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("state", list(State))
def test_the_table_of_transitions(verb: str, state: State) -> None:
    buffer, (sample, other) = loaded(2)
    bring(buffer, sample, state)
    to = ALLOWED[verb].get(state)
    if to is None:
        before = json.dumps(buffer.state_dict())
        with pytest.raises(AssertionError, match="sample 0"):
            VERBS[verb](buffer, sample)
        assert json.dumps(buffer.state_dict()) == before, "a refused transition left a trace"
        return
    VERBS[verb](buffer, sample)
    assert sample.state == to
    where = {held_in for held_in, held in buffer.in_state.items() if sample.id in held}
    assert where == ({to} if to != State.TRAINED else set())
    assert (sample.id in buffer.samples) == (to != State.TRAINED)
    assert other.state == State.PENDING


def test_what_changes_on_the_way() -> None:
    buffer, (sample,) = loaded()
    assert (sample.attempt, sample.num_tokens, list(buffer.unstarted), list(buffer.waiting)) == (0, 0, [0], [])
    buffer.start(sample)
    assert (sample.attempt, buffer.num_started, list(buffer.unstarted)) == (1, 1, [])
    write(buffer, sample, [4, 5])
    buffer.interrupt(sample)
    assert (sample.num_interrupts, sample.tokens, list(buffer.waiting)) == (1, [4, 5], [0])
    assert buffer.requeue(sample, Mode.RESUME) == 0
    buffer.start(sample)
    buffer.fail(sample)
    assert (sample.attempt, sample.num_failures, sample.tokens) == (2, 1, [4, 5])
    assert buffer.requeue(sample, Mode.FRESH) == 2
    assert (sample.tokens, sample.num_restarts, sample.known_length) == ([], 1, 2)
    buffer.start(sample)
    write(buffer, sample, [8])
    buffer.finish(sample, FinishReason.STOP)
    assert buffer.score(0, 3, 0.5) is sample
    assert (sample.reward, sample.finish_reason) == (0.5, FinishReason.STOP)
    assert buffer.requeue(sample, Mode.REPLAY) == 0
    # A complete answer keeps reward and reason until a token changes.
    assert (sample.reward, sample.finish_reason, sample.mode, sample.tokens) == (
        0.5,
        FinishReason.STOP,
        Mode.REPLAY,
        [8],
    )
    assert (list(buffer.waiting), list(buffer.unverified)) == ([0], [0])
    assert buffer.num_ready == 0
    buffer.start(sample)
    assert buffer.give_up(sample) == 1
    assert (sample.finish_reason, sample.tokens, sample.num_failures) == (FinishReason.FAILED, [], 2)
    buffer.score(0, 4, 0.0)
    buffer.version = 6
    assert buffer.take([sample]) == [sample]
    assert (sample.trained_version, buffer.num_trained, buffer.num_updates, buffer.num_started) == (6, 1, 1, 0)
    assert not buffer.cohorts


@pytest.mark.parametrize("state", [state for state in State if state != State.FINISHED])
def test_a_score_without_its_answer_is_ignored(state: State) -> None:
    buffer, (sample, _) = loaded(2)
    bring(buffer, sample, state)
    before = json.dumps(buffer.state_dict())
    assert buffer.score(sample.id, sample.attempt, 9.0) is None
    assert json.dumps(buffer.state_dict()) == before


def test_what_belongs_to_an_older_attempt_is_ignored() -> None:
    buffer, (sample,) = loaded()
    buffer.start(sample)
    buffer.interrupt(sample)
    buffer.start(sample)
    buffer.finish(sample, FinishReason.STOP)
    assert buffer.score(0, 1, 1.0) is None
    assert buffer.score(0, 2, 1.0) is sample


def test_a_cohort_is_loaded_once() -> None:
    buffer, _ = loaded(2)
    for wrong in ([], [make_sample(1, cohort=1)], [make_sample(5, cohort=4)]):
        with pytest.raises(AssertionError):
            buffer.load(wrong)
    assert buffer.load([make_sample(2, cohort=1)]).id == 1
    assert (buffer.next_cohort, buffer.num_loaded) == (2, 3)


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_tokens_are_appended_by_version() -> None:
    buffer, (sample,) = loaded()
    buffer.start(sample)
    assert write(buffer, sample, [1, 2], slot_s=2.0) == 0
    assert write(buffer, sample, [3], slot_s=1.0) == 0
    buffer.version = 1
    assert write(buffer, sample, [4], slot_s=0.5) == 0
    assert [(s.version, s.tokens, s.slot_s) for s in sample.segments] == [(0, [1, 2, 3], 3.0), (1, [4], 0.5)]
    assert sample.versions == [0, 0, 0, 1]
    assert sample.logprobs == pytest.approx([-0.1, -0.2, -0.3, -0.4])
    assert (sample.oldest_version, sample.staleness(3), sample.known_length) == (0, 3, 4)


def test_what_several_versions_wrote_comes_in_one_piece() -> None:
    def spelled(version: int, tokens: list[int]) -> Segment:
        return Segment(version=version, tokens=tokens, logprobs=[-1.0] * len(tokens), slot_s=float(len(tokens)))

    buffer, (sample,) = loaded()
    buffer.start(sample)
    buffer.extend(sample, [spelled(0, [1, 2]), spelled(2, [3])], start=0)
    buffer.extend(sample, [spelled(2, [4, 5]), spelled(3, [6])], start=3)
    held = [(s.version, s.tokens, s.logprobs, s.slot_s) for s in sample.segments]
    assert held == [(0, [1, 2], [-1.0] * 2, 2.0), (2, [3, 4, 5], [-1.0] * 3, 3.0), (3, [6], [-1.0], 1.0)]
    assert (sample.num_tokens, sample.known_length, sample.mode) == (6, 6, Mode.RESUME)


@pytest.mark.parametrize(
    ("start", "versions", "count", "num_logprobs", "message"),
    [
        (2, [1], 1, 1, "tokens at 2, but it holds 3"),
        (3, [1, 2], 4, 4, "exceeds its budget of 10"),
        (3, [1], 2, 1, "2 tokens, 1 log-probs"),
        (3, [1], 0, 0, "a segment of 0 tokens"),
        (3, [2, 1], 1, 1, "version 1 after 2"),
        (3, [0], 1, 1, "version 0 after 1"),
    ],
)
def test_segments_that_do_not_fit_are_refused(
    start: int, versions: list[int], count: int, num_logprobs: int, message: str
) -> None:
    buffer, (sample,) = loaded()
    buffer.version = 1
    buffer.start(sample)
    write(buffer, sample, [1, 2, 3])
    segments = [Segment(version=v, tokens=[1] * count, logprobs=[0.0] * num_logprobs) for v in versions]
    with pytest.raises(AssertionError, match=message):
        buffer.extend(sample, segments, start=start)
    assert sample.tokens == [1, 2, 3]


@pytest.mark.parametrize(
    ("start", "tokens", "num_logprobs", "message"),
    [
        (4, [1], 1, "tokens at 4, but it holds 3"),
        (3, [1] * 8, 8, "exceeds its budget of 10"),
        (0, [1] * 11, 11, "exceeds its budget of 10"),
        (3, [1, 2], 1, "2 tokens, 1 log-probs"),
    ],
)
def test_tokens_that_cannot_be_are_refused(start: int, tokens: list[int], num_logprobs: int, message: str) -> None:
    buffer, (sample,) = loaded()
    bring(buffer, sample, State.RUNNING)
    with pytest.raises(AssertionError, match=message):
        buffer.append(sample, Segment(0, tokens, [0.0] * num_logprobs), start=start)
    assert sample.tokens == [4, 5, 6]


def replaying(segments: list[Segment]) -> tuple[Buffer, Sample]:
    """A sample with these segments that runs as a replay under version 2."""
    buffer, (sample,) = loaded()
    buffer.start(sample)
    for segment in segments:
        buffer.version = segment.version
        write(buffer, sample, segment.tokens, slot_s=segment.slot_s)
    buffer.version = 2
    buffer.interrupt(sample)
    buffer.requeue(sample, Mode.REPLAY)
    buffer.start(sample)
    return buffer, sample


def test_a_replay_keeps_the_slot_time_of_what_it_verified() -> None:
    # 4 tokens in 4 s, then 2 in 1 s. Verified: the first 5, so 4 + 0.5 s are kept and one token is discarded; the two
    # tokens that follow take 3 s.
    old = [Segment(version=0, tokens=[1, 2, 3, 4], logprobs=[], slot_s=4.0)]
    old.append(Segment(version=1, tokens=[5, 6], logprobs=[], slot_s=1.0))
    buffer, sample = replaying(old)
    assert write(buffer, sample, [1, 2, 3, 4, 5], start=0, verified=5) == 1
    assert write(buffer, sample, [9, 9], slot_s=3.0) == 0
    assert [(s.version, s.tokens) for s in sample.segments] == [(2, [1, 2, 3, 4, 5, 9, 9])]
    assert sample.segments[0].slot_s == pytest.approx(7.5)
    assert sample.known_length == 7


def test_a_replay_that_verifies_nothing_starts_over() -> None:
    buffer, sample = replaying([Segment(version=0, tokens=[1, 2, 3], logprobs=[], slot_s=3.0)])
    assert write(buffer, sample, [7], start=0, slot_s=1.0) == 3
    assert [(s.version, s.tokens, s.slot_s) for s in sample.segments] == [(2, [7], 1.0)]
    assert sample.known_length == 3


def test_only_what_was_verified_counts_as_kept() -> None:
    # From position 1: 2 was verified, 8 differs, and the 4 after it is equal but was decoded again.
    buffer, sample = replaying([Segment(version=0, tokens=[1, 2, 3, 4], logprobs=[], slot_s=4.0)])
    assert write(buffer, sample, [2, 8, 4], start=1, slot_s=2.0, verified=1) == 2
    assert [(s.version, s.tokens) for s in sample.segments] == [(0, [1]), (2, [2, 8, 4])]
    assert [s.slot_s for s in sample.segments] == pytest.approx([1.0, 3.0])


def test_no_more_can_be_verified_than_is_there() -> None:
    buffer, sample = replaying([Segment(version=0, tokens=[1, 2], logprobs=[], slot_s=2.0)])
    with pytest.raises(AssertionError, match="holds 2"):
        write(buffer, sample, [1, 2, 3], start=0, verified=3)


def test_the_age_of_a_running_attempt() -> None:
    buffer, (fresh, resumed, replayed) = loaded(3)
    for sample in (resumed, replayed):
        bring(buffer, sample, State.RUNNING)
        buffer.interrupt(sample)
    buffer.version = 4
    assert (buffer.oldest_version(fresh), buffer.staleness(fresh, 9)) == (None, 0)
    buffer.requeue(resumed, Mode.RESUME)
    buffer.requeue(replayed, Mode.REPLAY)
    for sample in (fresh, resumed, replayed):
        buffer.start(sample)
    # A replay writes its tokens again under the version it started with; a resumed sample keeps version 0.
    assert [buffer.oldest_version(sample) for sample in (fresh, resumed, replayed)] == [4, 0, 4]
    assert buffer.staleness(resumed, 5) == 5


# ---- groups ---------------------------------------------------------------------------------------------------------


def test_siblings_are_ready_together() -> None:
    buffer, samples = loaded(4, siblings=2, grouped=True)
    bring(buffer, samples[0], State.SCORED)
    assert (buffer.num_ready, buffer.num_ready_soon) == (0, 0)
    bring(buffer, samples[1], State.FINISHED)
    assert (buffer.num_ready, buffer.num_ready_soon) == (0, 2)
    buffer.score(1, 1, 0.0)
    assert (buffer.num_ready, buffer.num_ready_soon) == (2, 0)
    assert [s.id for group in buffer.ready.values() for s in group.samples] == [0, 1]
    buffer.requeue(samples[0], Mode.RESUME)
    assert (buffer.num_ready, buffer.ready) == (0, {})


def test_half_a_group_is_never_trained() -> None:
    buffer, samples = loaded(2, siblings=2, grouped=True)
    for sample in samples:
        bring(buffer, sample, State.SCORED)
    with pytest.raises(AssertionError, match="half of group"):
        buffer.take([samples[0]])


def test_without_groups_each_sample_is_ready_by_itself() -> None:
    buffer, samples = loaded(2, siblings=2)
    bring(buffer, samples[0], State.SCORED)
    assert buffer.num_ready == 1
    bring(buffer, samples[1], State.FINISHED)
    assert buffer.num_ready_soon == 1
    assert [len(held) for held in buffer.in_state.values()] == [0, 0, 0, 1, 1]


def test_expected_length_learns_from_siblings_and_earlier_epochs() -> None:
    buffer, samples = loaded(4, siblings=4, grouped=True)
    assert buffer.expected_length(samples[3]) == 0
    bring(buffer, samples[0], State.FINISHED, tokens=[1] * 2)
    bring(buffer, samples[1], State.SCORED, tokens=[1] * 6)
    bring(buffer, samples[2], State.RUNNING, tokens=[1] * 9)  # not finished, so it does not affect the estimate
    assert buffer.expected_length(samples[3]) == 4
    assert buffer.expected_length(samples[2]) == 9
    # The next epoch: (2 + 6 + 9 + 3) tokens in 4 samples.
    buffer.score(0, 1, 0.0)
    buffer.finish(samples[2], FinishReason.STOP)
    buffer.score(2, 1, 0.0)
    bring(buffer, samples[3], State.SCORED, tokens=[1] * 3)
    buffer.take(samples)
    again = make_sample(4, siblings=5, cohort=1)
    assert again.prompt.id == "p0"
    again.epoch = 1
    buffer.load([again])
    assert buffer.expected_length(again) == 5


# ---- durable form ---------------------------------------------------------------------------------------------------


def through_json(buffer: Buffer) -> Buffer:
    return Buffer.from_state_dict(json.loads(json.dumps(buffer.state_dict())))


def test_the_durable_form_holds_everything() -> None:
    buffer, samples = loaded(10, siblings=2, grouped=True)
    states = [State.PENDING, State.RUNNING, State.FINISHED, State.SCORED, State.SCORED, State.SCORED]
    for sample, state in zip(samples[2:8], states, strict=True):
        bring(buffer, sample, state)
    buffer.interrupt(samples[3])
    buffer.requeue(samples[3], Mode.REPLAY)
    for sample in samples[:2]:
        bring(buffer, sample, State.SCORED, tokens=[3])
    buffer.take(samples[:2])
    buffer.version = 1
    again = through_json(buffer)
    assert again.state_dict() == buffer.state_dict()
    assert again.samples == buffer.samples
    assert again.in_state == buffer.in_state
    assert (list(again.unstarted), list(again.waiting)) == (list(buffer.unstarted), list(buffer.waiting))
    assert (again.ready, again.num_ready) == (buffer.ready, buffer.num_ready)
    assert (again.cohorts, again.next_cohort) == (buffer.cohorts, buffer.next_cohort)
    assert again.num_trained == buffer.num_trained
    assert again.expected_length(again.samples[9]) == buffer.expected_length(samples[9])


def test_running_samples_are_read_back_as_interrupted() -> None:
    buffer, (sample, _) = loaded(2)
    bring(buffer, sample, State.RUNNING)
    again = through_json(buffer)
    held = again.samples[0]
    assert (held.state, held.tokens, held.attempt) == (State.PENDING, [4, 5, 6], 1)
    assert (list(again.waiting), list(again.unstarted)) == ([0], [1])
    again.start(held)
    assert held.attempt == 2


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("grouped", [False, True])
def test_a_run_continues_from_the_durable_form(strategy: Strategy, grouped: bool) -> None:
    """Stop half-way, save the buffer, load it into another controller and continue: every sample is trained once."""
    knobs = resolve_knobs(strategy, 4)
    policy = ScriptedPolicy(longest=30, length_change=0.3, divergence=0.05)
    setting = {"policy": policy, "slots": 6, "num_samples": 64, "siblings": 2, "grouped": grouped, "score_lag": 2}
    first, second = scripted_run(knobs, **setting), scripted_run(knobs, **setting)
    first.controller.should_stop = lambda: (
        first.controller.buffer.num_trained >= 20 and bool(first.controller.buffer.samples)
    )
    assert not first.controller.run()
    buffer = through_json(first.controller.buffer)
    assert 20 <= buffer.num_trained < 64
    assert buffer.samples
    second.controller.load_samples(0, buffer.num_loaded)  # continue with the next data
    second.controller.buffer = buffer
    second.engine.publish(buffer.version, None)
    assert second.controller.run()
    trained = [sample.id for run in (first, second) for sample in run.trained]
    assert sorted(trained) == list(range(64))
    assert buffer.num_trained == 64
    bound = knobs.max_staleness
    ages = [sample.staleness(batch.version) for batch in second.learner.batches for sample in batch.samples]
    assert min(ages) >= 0
    assert bound is None or max(ages) <= bound
