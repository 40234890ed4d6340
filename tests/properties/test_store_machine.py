"""A state machine over buffer, store and schedule: the ledger stays correct in any order of actions and crashes.

Hypothesis chooses the next action: load a cohort, submit samples, deliver or verify tokens, finish, interrupt, fail or
score answers, train, publish weights, make a checkpoint, or kill the process. The test keeps a copy of the buffer at
each checkpoint. After a crash, the ledger is cut at the checkpoint, read back and compared with the copy.

A single rule chooses among all actions. With one rule per action, hypothesis would leave out half of them in every run,
and without load, submit, finish, score and train a run makes no progress.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rich.console import Console

from sortedrl import schedule
from sortedrl.buffer import Buffer
from sortedrl.ledger.store import Store
from sortedrl.ledger.tables import ledger_command
from sortedrl.records import FinishReason, Mode, Prompt, Sample, Segment, State
from sortedrl.schedule import Knobs, Strategy, resolve_knobs

SHM = Path("/dev/shm")  # in memory, so that syncs are fast; the code that syncs runs anyway
BUDGET = 12
NUM_PROMPTS = 7  # in an epoch

# Actions on samples with their relative frequencies, and actions on processes.
WEIGHTS = {
    "load": 1,
    "submit": 3,
    "deliver": 6,
    "finish": 4,
    "interrupt": 1,
    "fail": 1,
    "give-up": 1,
    "score": 3,
    "late-score": 1,
    "train": 3,
    "publish": 3,
}
PROCESSES = ["commit", "checkpoint", "crash"]


def as_read_back(buffer: Buffer) -> dict[str, Any]:
    """A copy of the buffer as plain data, with running samples as pending ones."""
    state = buffer.state_dict()
    for sample in state["samples"]:
        if sample["state"] == State.RUNNING:
            sample["state"] = State.PENDING
    return state


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="test-store-", dir=SHM if SHM.is_dir() else None))
        self.has_begun = False

    @initialize(
        strategy=st.sampled_from([Strategy.SORTED_ON_POLICY, Strategy.SORTED_PARTIAL, Strategy.SORTED_REPLAY]),
        siblings=st.integers(1, 3),
        is_grouped=st.booleans(),
        bound=st.sampled_from([0, 1, "none"]),
        lookahead=st.integers(0, 1),
        slots=st.integers(2, 6),
    )
    def begin(
        self, strategy: Strategy, siblings: int, is_grouped: bool, bound: object, lookahead: int, slots: int
    ) -> None:
        self.siblings, self.slots = siblings, slots
        self.knobs: Knobs = resolve_knobs(
            strategy, 2 * siblings, cohort_batches=2, lookahead=lookahead, max_staleness=bound, on_bound="replay"
        )
        self.store = Store.create(self.folder / "ledger.sqlite", grouped=is_grouped, knobs=asdict(self.knobs))
        self.buffer = self.store.restore()
        self.loaded: set[int] = set()
        self.trained: dict[int, int] = {}  # id -> staleness
        self.is_updating = False
        self.has_begun = True
        self.checkpoint()

    @rule(
        what=st.sampled_from([*(name for name in WEIGHTS for _ in range(WEIGHTS[name])), *PROCESSES]),
        which=st.integers(0, 9),
    )
    def happens(self, what: str, which: int) -> None:
        """Do the chosen action, or a possible one if it is impossible now."""
        possible = self.possible(which)
        if what not in possible:
            others = [name for name in possible if name not in PROCESSES] or ["commit"]
            what = others[which % len(others)]
        possible[what]()

    def possible(self, which: int) -> dict[str, Callable[[], object]]:
        buffer, choices = self.buffer, dict[str, Callable[[], object]]()
        if schedule.wants_cohort(buffer, self.knobs, self.slots):
            choices["load"] = self.load
        if schedule.admit(buffer, self.knobs, self.slots):
            choices["submit"] = self.submit
        if buffer.num_running:
            running = list(buffer.in_state[State.RUNNING].values())
            sample = running[which % len(running)]
            reason = FinishReason.LENGTH if sample.num_tokens == BUDGET else FinishReason.STOP
            choices["deliver"] = lambda: self.deliver(sample, which // 2)
            choices["finish"] = lambda: buffer.finish(sample, reason)
            choices["interrupt"] = lambda: buffer.interrupt(sample)
            choices["fail"] = lambda: buffer.fail(sample)
            choices["give-up"] = lambda: buffer.give_up(sample)
        if buffer.in_state[State.FINISHED]:
            choices["score"] = lambda: self.score(0, which / 7)
            choices["late-score"] = lambda: self.score(1, which / 7)
        if not self.is_updating and schedule.choose_batch(buffer, self.knobs):
            choices["train"] = self.train
        if self.is_updating:
            choices["publish"] = self.publish
        else:
            choices["checkpoint"] = self.checkpoint
        return {
            **choices,
            "commit": self.store.commit,
            "crash": lambda: self.crash(is_committed=which % 2 == 0, from_snapshot=which < 3),
        }

    # ---- actions on samples -----------------------------------------------------------------------------------------

    def load(self) -> None:
        first, cohort = self.buffer.num_loaded, self.buffer.next_cohort
        samples = []
        for number in range(first, first + self.knobs.cohort_samples):
            group = number // self.siblings
            epoch, row = divmod(group, NUM_PROMPTS)
            prompt = Prompt(id=f"p{row}", tokens=(1, row), content="?", columns={"answer": row})
            index = number % self.siblings
            samples.append(
                Sample(id=number, prompt=prompt, index=index, epoch=epoch, cohort=cohort, seed=number, budget=BUDGET)
            )
        self.buffer.load(samples)
        self.loaded |= {sample.id for sample in samples}

    def submit(self) -> None:
        for sample in schedule.admit(self.buffer, self.knobs, self.slots):
            is_replay = sample.mode == Mode.REPLAY and bool(sample.segments)
            self.buffer.start(sample)
            if is_replay:
                self.verify(sample)

    def verify(self, sample: Sample) -> None:
        """A replay keeps a part of the tokens that depends on the sample's id, and adds another token."""
        held = sample.tokens
        kept = min(sample.id % (len(held) + 1), BUDGET - 1)
        self.append(sample, [*held[:kept], 90 + sample.id], start=0, verified=kept)

    def deliver(self, sample: Sample, count: int) -> None:
        tokens = [1000 * self.store.seq + position for position in range(count)]
        self.append(sample, tokens[: BUDGET - sample.num_tokens], start=sample.num_tokens)

    def append(self, sample: Sample, tokens: list[int], *, start: int, verified: int = 0) -> None:
        segment = Segment(self.buffer.version, tokens, [-token / 7 for token in tokens], len(tokens) / 3)
        self.buffer.append(sample, segment, start=start, verified=verified)

    def score(self, age: int, reward: float) -> None:
        for sample in list(self.buffer.in_state[State.FINISHED].values()):
            is_failed = sample.finish_reason == FinishReason.FAILED
            scored = self.buffer.score(sample.id, sample.attempt - age, 0.0 if is_failed else reward)
            assert (scored is None) == (age > 0)

    def train(self) -> None:
        for sample in list(self.buffer.in_state[State.RUNNING].values()):
            self.buffer.interrupt(sample)
        version = self.buffer.version
        for sample in self.buffer.take(schedule.choose_batch(self.buffer, self.knobs) or []):
            assert sample.id not in self.trained, f"sample {sample.id} is trained twice"
            self.trained[sample.id] = version - min(sample.versions, default=version)
        self.is_updating = True

    def publish(self) -> None:
        for sample in schedule.interrupts_at_publication(self.buffer, self.knobs):
            self.buffer.interrupt(sample)
        self.buffer.publish(self.buffer.version + 1)
        for sample, fate in schedule.decide_fates(self.buffer, self.knobs):
            self.buffer.requeue(sample, fate.mode)
        self.is_updating = False

    # ---- actions on processes ---------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        self.store.commit(durable=True)
        self.kept = (self.store.seq, as_read_back(self.buffer), set(self.loaded), dict(self.trained))

    def crash(self, *, is_committed: bool, from_snapshot: bool) -> None:
        """End the process; a new one continues from the checkpoint, in its ledger or in a copy of it."""
        lineage, end = self.store.lineage, (self.store.seq, as_read_back(self.buffer))
        seq, state, self.loaded, self.trained = self.kept
        self.store.close(commit=is_committed)
        self.store = Store.open(self.store.path)
        if is_committed:
            assert (self.store.seq, self.store.restore().state_dict()) == end
        self.store.truncate(seq)
        if from_snapshot:
            copy = self.folder / "copy.sqlite"
            self.store.snapshot(copy)
            self.store.close()
            copy.replace(self.store.path)
            self.store = Store.open(self.store.path)
        assert lineage is not None
        assert self.store.begin_lineage() == lineage + 1
        self.buffer = self.store.restore()
        assert self.buffer.state_dict() == state
        self.is_updating = False
        self.checkpoint()

    # ---- invariants -------------------------------------------------------------------------------------------------

    @invariant()
    def no_sample_is_lost_or_duplicated_or_too_stale(self) -> None:
        if not self.has_begun:
            return
        live = set(self.buffer.samples)
        assert live | set(self.trained) == self.loaded
        assert not live & set(self.trained)
        assert (self.buffer.num_loaded, self.buffer.num_trained) == (len(self.loaded), len(self.trained))
        bound = self.knobs.max_staleness
        assert bound is None or max(self.trained.values(), default=0) <= bound

    def teardown(self) -> None:
        if self.has_begun:
            self.store.close()
            store = Store.open(self.store.path)
            assert store.restore().state_dict() == as_read_back(self.buffer)
            store.close()
            self.prove()
        shutil.rmtree(self.folder)

    def prove(self) -> None:
        """Verify the file with the command `ledger`, whose code shares nothing with the buffer."""
        said = io.StringIO()
        console = Console(file=said, width=200)
        code = ledger_command(self.folder, verify=True, sample=None, console=console, as_json=False)
        assert code == 0, said.getvalue()


LedgerMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=100, suppress_health_check=list(HealthCheck), deadline=None
)
TestLedger = LedgerMachine.TestCase
