"""A toy policy with an exactly known gradient, and samples of it that the real scheduler has trained.

`off_policy.py` and tests/learner/test_off_policy.py draw from it. The policy writes answers of 1 to 6 tokens over
{END, a, b} from six free logits, so expected reward and gradient are sums over its 127 answers. The real controller,
schedule and buffer (`sorted-partial`, resume) train cohorts on the simulated engine, while the weights pass through
three versions. Guarantees: tokens are drawn with the noise of the engines from the current version; the engine records
a token's log-prob when it draws the token; the weights of all versions are fixed before sampling starts.

Shapes: n samples, l positions (padded), v versions, s states, t tokens, k free logits of a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np
import torch
from numpy.typing import NDArray

from sortedrl.buffer import Buffer
from sortedrl.clock import VirtualClock
from sortedrl.controller import Controller, LoopParts, LoopSettings
from sortedrl.engine.base import Sampling
from sortedrl.engine.sampling.noise import gumbel, int_tensor
from sortedrl.engine.sim.engine import SimEngine
from sortedrl.records import Batch, Prompt, Sample, sample_seed
from sortedrl.schedule import resolve_knobs
from sortedrl.simulate.run import SimUpdate

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

END, A, B = 0, 1, 2
LONGEST = 6  # answer tokens
UPDATE_BATCH, COHORT_BATCHES, SLOTS = 8, 3, 16
COHORT = UPDATE_BATCH * COHORT_BATCHES
# Free logits of END and a in three states: at the start, after an a, after a b. The logit of b is 0.
FIRST_WEIGHTS: Floats = np.array([[-1.0, 0.0], [-0.6, 0.2], [-0.1, 0.2]])


# ---- the policy and its exact gradient ------------------------------------------------------------------------------


def reward(tokens: Sequence[int]) -> float:
    """1 for an answer that ends with END and contains a b directly after an a, else 0."""
    return float(tokens[-1] == END and (A, B) in pairwise(tokens))


def token_logprobs(weights_sk: Floats) -> Floats:
    """Log-probs of END, a and b in each state: at the start, after an a, after a b."""
    logits_st = np.concatenate([weights_sk, np.zeros((3, 1))], axis=1)
    return logits_st - np.log(np.exp(logits_st).sum(axis=1, keepdims=True))


def all_answers() -> list[tuple[int, ...]]:
    """All answers of the policy: with END at the end, or truncated at the maximum length."""
    bodies: list[tuple[int, ...]] = [body for length in range(LONGEST) for body in product((A, B), repeat=length)]
    return [*((*body, END) for body in bodies), *product((A, B), repeat=LONGEST)]


@dataclass(slots=True, kw_only=True, frozen=True)
class Answers:
    """Answers as padded arrays."""

    tokens_nl: Ints
    states_nl: Ints
    is_token_nl: Bools

    @classmethod
    def of(cls, answers: Iterable[Sequence[int]]) -> Answers:
        tokens_nl = np.array([[*answer, *[-1] * (LONGEST - len(answer))] for answer in answers], dtype=np.int64)
        is_token_nl = tokens_nl >= 0
        tokens_nl = np.where(is_token_nl, tokens_nl, END)
        states_nl = np.concatenate([np.zeros((len(tokens_nl), 1), dtype=np.int64), tokens_nl[:, :-1]], axis=1)
        return cls(tokens_nl=tokens_nl, states_nl=states_nl, is_token_nl=is_token_nl)

    def logprobs(self, weights_sk: Floats) -> Floats:
        """Log-prob of each token, and 0 for padding."""
        return np.where(self.is_token_nl, token_logprobs(weights_sk)[self.states_nl, self.tokens_nl], 0.0)

    def gradients(self, weights_sk: Floats, coefficients_nl: Floats) -> Floats:
        """For each answer the sum over its tokens of coefficient x gradient of the log-prob, [n, free logits]."""
        probs_st = np.exp(token_logprobs(weights_sk))
        scores_nlk = np.eye(3)[self.tokens_nl][..., :2] - probs_st[self.states_nl][..., :2]
        used_nl = np.where(self.is_token_nl, coefficients_nl, 0.0)
        grads_nsk = np.einsum("nl,nls,nlk->nsk", used_nl, np.eye(3)[self.states_nl], scores_nlk, optimize=True)
        return grads_nsk.reshape(len(grads_nsk), -1)


def exact(weights_sk: Floats) -> tuple[float, Floats]:
    """Expected reward and its gradient, by enumeration."""
    listed = all_answers()
    answers = Answers.of(listed)
    weighted_n = np.exp(answers.logprobs(weights_sk).sum(axis=1)) * np.array([reward(answer) for answer in listed])
    gradient = answers.gradients(weights_sk, np.repeat(weighted_n[:, None], LONGEST, axis=1)).sum(axis=0)
    return float(weighted_n.sum()), gradient


def trajectory(rate: float) -> list[Floats]:
    """Weights of the versions 0, 1 and 2: steps of exact gradient ascent, fixed before anything is sampled."""
    versions = [FIRST_WEIGHTS]
    for _ in range(COHORT_BATCHES - 1):
        versions.append(versions[-1] + rate * exact(versions[-1])[1].reshape(3, 2))
    return versions


# ---- sampling through the scheduler ---------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class ToyScript:
    """The policy as a script for the simulated engine.

    A draft holds, for each answer, the tokens written so far and the rest that the current version would write.
    """

    logprobs_vst: list[list[list[float]]]
    noise: dict[int, list[list[float]]]  # by seed: positions x tokens
    drafts: dict[int, list[tuple[int, float, int]]] = field(default_factory=dict)  # token, log-prob, version

    def length(self, seed: int, start: int, version: int) -> int:
        draft = self.drafts.setdefault(seed, [])
        assert start <= len(draft), f"a draft of {len(draft)} tokens cannot continue at token {start}"
        del draft[start:]
        state = draft[-1][0] if draft else 0
        while len(draft) < LONGEST:
            logprobs_t, noise_t = self.logprobs_vst[version][state], self.noise[seed][len(draft)]
            state = max((END, A, B), key=lambda token: logprobs_t[token] + noise_t[token])
            draft.append((state, logprobs_t[state], version))
            if state == END:
                break
        return len(draft)

    def token(self, seed: int, position: int, version: int) -> int:
        return self._written(seed, position, version)[0]

    def logprob(self, seed: int, position: int, version: int) -> float:
        return self._written(seed, position, version)[1]

    def is_last(self, seed: int, position: int, version: int) -> bool:
        return self._written(seed, position, version)[0] == END

    def _written(self, seed: int, position: int, version: int) -> tuple[int, float, int]:
        written = self.drafts[seed][position]
        assert written[2] == version, f"token {position} was written by version {written[2]}, not {version}"
        return written


@dataclass(slots=True, kw_only=True)
class BatchKeeper:
    """A learner that only keeps the batches; the weights of all versions are fixed in advance."""

    clock: VirtualClock
    batches: list[Batch] = field(default_factory=list)
    source: object = None

    def start(self, batch: Batch) -> SimUpdate:
        self.batches.append(batch)
        return SimUpdate(clock=self.clock, ready_at=self.clock.now())


@dataclass(slots=True, kw_only=True, frozen=True)
class ToyScore:
    key: tuple[int, int]
    reward: float


@dataclass(slots=True, kw_only=True)
class ToyScorer:
    scores: list[ToyScore] = field(default_factory=list)

    def submit(self, sample: Sample) -> None:
        self.scores.append(ToyScore(key=(sample.id, sample.attempt), reward=reward(sample.tokens)))

    def poll(self, timeout: float) -> list[ToyScore]:
        scores, self.scores = self.scores, []
        return scores


def train_cohort(cohort: int, run_seed: int, logprobs_vst: list[list[list[float]]]) -> list[Sample]:
    """Train one cohort through versions 0 to 2; returns its samples in the order of training."""
    prompt = Prompt(id=f"toy{cohort}", tokens=(0,), content="")
    seeds = [sample_seed(run_seed, 0, prompt.id, index) for index in range(COHORT)]
    rows = int_tensor(seeds).repeat_interleave(LONGEST)
    noise_nlt = gumbel(rows, torch.arange(LONGEST).repeat(COHORT), 3).view(COHORT, LONGEST, 3).tolist()
    clock = VirtualClock()
    learner = BatchKeeper(clock=clock)
    script = ToyScript(logprobs_vst=logprobs_vst, noise=dict(zip(seeds, noise_nlt, strict=True)))
    Controller(
        Buffer(),
        LoopParts(
            engine=SimEngine(script, slots=SLOTS, clock=clock),
            learner=learner,
            scorer=ToyScorer(),
            load_samples=lambda number, count: [
                Sample(id=index, prompt=prompt, index=index, epoch=0, cohort=number, seed=seed, budget=LONGEST)
                for index, seed in enumerate(seeds)
            ],
        ),
        LoopSettings(
            knobs=resolve_knobs("sorted-partial", UPDATE_BATCH, cohort_batches=COHORT_BATCHES),
            total_samples=COHORT,
            sampling=Sampling(),
        ),
        clock=clock,
    ).run()
    return [sample for batch in learner.batches for sample in batch.samples]


@dataclass(slots=True, kw_only=True, frozen=True)
class Drawn:
    """Trained samples as arrays, cohort by cohort."""

    answers: Answers
    behaviour_nl: Floats  # log-probs as recorded, 0 for padding
    versions_nl: Ints  # of tokens as recorded, -1 for padding
    rewards_n: Floats
    trained_n: Ints  # current version when a sample was trained

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Drawn:
        held = list(samples)
        padded = [(sample, LONGEST - sample.num_tokens) for sample in held]
        return cls(
            answers=Answers.of(sample.tokens for sample in held),
            behaviour_nl=np.array([[*sample.logprobs, *[0.0] * pad] for sample, pad in padded]),
            versions_nl=np.array([[*sample.versions, *[-1] * pad] for sample, pad in padded]),
            rewards_n=np.array([sample.reward for sample in held], dtype=np.float64),
            trained_n=np.array([sample.trained_version for sample in held], dtype=np.int64),
        )

    @property
    def num_versions_n(self) -> Ints:
        """How many versions wrote each sample."""
        return np.sum([(self.versions_nl == version).any(axis=1) for version in range(COHORT_BATCHES)], axis=0)


def train_cohorts(cohorts: Iterable[int], run_seed: int, versions: Sequence[Floats]) -> Iterator[Sample]:
    logprobs_vst = [token_logprobs(weights_sk).tolist() for weights_sk in versions]
    for cohort in cohorts:
        yield from train_cohort(cohort, run_seed, logprobs_vst)
