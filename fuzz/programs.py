"""The programs that scenarios run: the command `sortedrl`, or a script with TRL's trainer.

Each is a function that a forked process calls. `first` is how a run starts, `resume` how it continues.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fuzz import rows, trl_script
from fuzz.scenario import Kind, Scenario

Call = Callable[[], None]

# On a busy machine, or after a pause of a minute, no reward may count as late: another score gives other weights.
_PATIENT = ("reward.grace_s=120", "reward.timeout_s=120")
_SMALL = ("run.report=false", "run.on_no_signal=warn", "run.name=r", "run.dir=runs", *_PATIENT)
BASE = (
    *_SMALL,
    *("eval.prompts=2", "engine.max_new_tokens=24", "engine.slots=8", "schedule.update_batch=8"),
)
_TOOLS = (
    *_SMALL,
    *("eval.prompts=2", "engine.max_new_tokens=64", "engine.slots=8", "schedule.update_batch=8"),
    "environment.timeout_s=5",
)
_ARGUMENTS = {
    Kind.TRAIN: ("quickstart", *BASE),
    Kind.DATA: ("quickstart", *BASE),
    Kind.TOOLS: ("tools", *_TOOLS),
    Kind.RANKS: ("quickstart", *BASE, "learner.ranks=2", "learner.rank_cpus=0.5"),
    Kind.VLLM: ("quickstart", *BASE, "engine=vllm"),
}
# Seconds within which faults from outside come where starting takes long; and after which a process counts as hanging.
_FAULT_S = {Kind.RANKS: 60.0, Kind.VLLM: 90.0}
_LIMIT_S = {Kind.RANKS: 400.0, Kind.VLLM: 500.0}


@dataclass(slots=True, kw_only=True, frozen=True)
class Program:
    """What a scenario runs below the folder `home`."""

    scenario: Scenario
    home: Path

    @property
    def run_dir(self) -> Path:
        """The folder with the ledger."""
        return self._output / "sortedrl" if self.scenario.kind == Kind.TRL else self._output

    @property
    def _output(self) -> Path:
        return self.home / "runs" / "r"

    @property
    def weights(self) -> Path:
        return self._output / "checkpoints"

    @property
    def can_resume(self) -> bool:
        if self.scenario.kind == Kind.TRL:
            return trl_script.newest_checkpoint(self._output) is not None
        return (self._output / "config.toml").is_file()

    @property
    def num_samples(self) -> int | None:
        """How many samples TRL trains; of our own runs the configuration in the run directory knows."""
        if self.scenario.kind != Kind.TRL:
            return None
        return trl_script.num_samples(self.scenario.overrides)

    @property
    def fault_s(self) -> float | None:
        return _FAULT_S.get(self.scenario.kind)

    @property
    def limit_s(self) -> float:
        return _LIMIT_S.get(self.scenario.kind, 180.0)

    @property
    def memory_bytes(self) -> int | None:
        return rows.MEMORY_BYTES if self.scenario.kind == Kind.DATA else None

    def prepare(self) -> None:
        """Make what the first process needs."""
        self.home.mkdir(parents=True, exist_ok=True)
        if self.rows_file:
            rows.write(self.home, self.rows_file, self.scenario.seed)

    @property
    def rows_file(self) -> str:
        """The file with training rows; empty if there is none."""
        given = [text.partition("=")[2] for text in self.scenario.overrides if text.startswith("task.path=")]
        return given[-1] if given and self.scenario.kind == Kind.DATA else ""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Configuration and overrides of a run that is not TRL's."""
        return (*_ARGUMENTS[self.scenario.kind], *self.scenario.overrides)

    def first(self) -> Call:
        scenario = self.scenario
        if scenario.kind == Kind.TRL:
            return partial(trl_script.main, self._output, scenario.overrides)
        return command("train", *self.arguments)

    def resume(self, changes: Sequence[str]) -> Call:
        if self.scenario.kind == Kind.TRL:
            return partial(trl_script.main, self._output, self.scenario.overrides)
        return command("train", "--resume", str(self._output), *changes)


def command(*arguments: str) -> Call:
    """The command `sortedrl` with these arguments."""

    def call() -> None:
        from sortedrl import cli

        sys.argv = ["sortedrl", *arguments]
        cli.main()

    return call
