"""The user's own objects: by module:Object, by entry point, as objects; what is recorded, and every way to be wrong."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sortedrl import SortedConfig, SortedTrainer
from sortedrl.cli import app
from sortedrl.config.plug_points import POINTS
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.errors import ConfigError, ScheduleError
from sortedrl.external.plugins import import_object, lacking, name_of
from sortedrl.learner.algorithms import ALGORITHMS, Algorithm
from sortedrl.schedule import SortedSchedule
from sortedrl.tasks.knights import KnightsTask

SMALL: dict[str, Any] = {
    "run": {"samples": 16, "report": False},
    "schedule": {"update_batch": 8},
    "engine": {"slots": 8, "max_new_tokens": 8},
    "learner": {"group_size": 2},
    "eval": {"prompts": 0},
    "checkpoint": {"every_updates": 1},
}
MODULE = """
from sortedrl.schedule import SortedSchedule
from sortedrl.learner.algorithms import ALGORITHMS
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.tasks.knights import KnightsTask

GRPO = ALGORITHMS["grpo"]
KNOBS = {"interrupted": "resume", "max_staleness": 3, "on_bound": "wait"}
NUMBER = 3

class Mine(SortedSchedule):
    knobs = {"lookahead": 2}

def centred(rewards, groups, scope):
    return rewards - scope(rewards).mean

def engine(model, *, slots, max_length, decode, share=1.0):
    return LocalEngine(model, slots=slots, max_length=max_length, decode=decode)

def task(*, seed, people=2):
    return KnightsTask(seed=seed, people={people: 1.0})

class Tracker:
    def __init__(self, run_dir, settings):
        self.path = run_dir / "told.txt"
    def write(self, step, scalars):
        self.path.write_text(str(step))
    def close(self):
        pass

class HalfEngine:
    def __init__(self, model, **options): ...
    def submit(self, requests): ...
    def poll(self, timeout=None): ...
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in with the module `plugged`, and an installed package that declares it."""
    (tmp_path / "plugged.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    yield tmp_path
    for name in ("plugged", "raises", "needy"):
        sys.modules.pop(name, None)


def declare(here: Path, package: str, text: str) -> None:
    folder = here / "site" / f"{package}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    (folder / "entry_points.txt").write_text(text, encoding="utf-8")


def config_of(**sections: dict[str, Any]) -> SortedConfig:
    return SortedConfig(**{name: {**SMALL.get(name, {}), **sections.get(name, {})} for name in {**SMALL, **sections}})


def test_names_declared_by_an_installed_package_train(here: Path) -> None:
    declare(
        here,
        "plugged",
        "[sortedrl.engines]\nmine = plugged:engine\n[sortedrl.algorithms]\nmine = plugged:GRPO\n"
        "[sortedrl.advantages]\ncentred = plugged:centred\n[sortedrl.strategies]\nmine = plugged:Mine\n"
        "[sortedrl.tasks]\nmine = plugged:task\n[sortedrl.trackers]\nmine = plugged:Tracker\n",
    )
    config = config_of(
        engine={"kind": "mine", "options": {"share": 0.5}},
        learner={"algorithm": "mine", "advantage": "centred"},
        schedule={"strategy": "mine", "interrupted": "restart"},
        task={"name": "mine", "options": {"people": 3}},
        track={"to": "mine"},
    )
    assert config.knobs.lookahead == 2
    summary = SortedTrainer(args=config, quiet=True).train()
    assert (summary.samples, summary.strategy) == (16, "mine")
    saved = tomllib.loads((here / "runs/run/config.toml").read_text())
    assert (saved["engine"]["kind"], saved["track"]["to"]) == ("mine", "mine")
    assert (here / "runs/run/told.txt").read_text() == "16"
    with pytest.raises(
        ConfigError, match=r"learner\.algorithm: unknown algorithm 'mime': did you mean mine\? Or choose"
    ):
        config_of(learner={"algorithm": "mime"})


def test_a_name_that_two_packages_declare_is_refused(here: Path) -> None:
    for package, target in (("one", "plugged:engine"), ("two", "plugged:HalfEngine")):
        declare(here, package, f"[sortedrl.engines]\nfast = {target}\n")
    with pytest.raises(ConfigError, match="as plugged:HalfEngine and plugged:engine: write the one that you mean"):
        config_of(engine={"kind": "fast"})


class Mine(SortedSchedule):
    def __init__(self, lookahead: int) -> None:
        self.knobs = {"lookahead": lookahead, "interrupted": "restart"}


def signed(rewards: np.ndarray, groups: Any, scope: Any) -> np.ndarray:
    return np.sign(rewards - 0.5)


class Counter:
    steps: list[int]

    def __init__(self) -> None:
        self.steps = []

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self.steps.append(step)

    def close(self) -> None: ...


def own_trainer(config: SortedConfig, tracker: Counter) -> SortedTrainer:
    return SortedTrainer(
        args=config,
        engine=lambda model, *, slots, max_length, decode: LocalEngine(model, slots=slots, max_length=max_length),
        algorithm=Algorithm(advantage=ALGORITHMS["grpo"].advantage, needs_siblings=True, clip_high=0.5),
        advantage=signed,
        strategy=Mine(3),
        task=KnightsTask(seed=0, people={2: 1.0}),
        trackers=[tracker],
        quiet=True,
    )


def test_objects_are_recorded_by_name_and_resumed_from_python_only(here: Path) -> None:
    tracker = Counter()
    trainer = own_trainer(config_of(), tracker)
    assert (trainer.config.knobs.lookahead, trainer.config.is_grouped) == (3, True)
    summary = trainer.train()
    assert (summary.samples, tracker.steps) == (16, [8, 16])
    assert summary.strategy == f"<{__name__}.Mine>"
    saved = tomllib.loads((here / "runs/run/config.toml").read_text())
    assert saved["learner"]["advantage"] == f"<{__name__}.signed>"
    assert saved["learner"]["algorithm"] == "<sortedrl.learner.algorithms.Algorithm>"
    assert saved["engine"]["kind"] == f"<{__name__}.own_trainer.<locals>.<lambda>>"
    assert saved["task"]["name"] == "<sortedrl.tasks.knights.KnightsTask>"
    assert saved["track"]["to"] == [f"<{__name__}.Counter>"]

    done = CliRunner().invoke(app, ["train", "--resume", "runs/run", "run.samples=32"])
    assert isinstance(done.exception, ConfigError)
    assert "is an object that Python code gave to SortedTrainer: start or resume this run from Python" in str(
        done.exception
    )
    more = config_of(run={"samples": 32})
    assert own_trainer(more, Counter()).train(resume=True).samples == 32
    with pytest.raises(
        ConfigError, match=r"schedule\.strategy was '<.*Mine>' when the run was saved and is 'sync' here"
    ):
        SortedTrainer(args=trainer.config, strategy="sync", quiet=True).train(resume=True)


def test_an_object_is_found_again_in_a_run_without_a_checkpoint(here: Path) -> None:
    config = config_of(checkpoint={"save": False})
    trainer = SortedTrainer(args=config, strategy=Mine(1), quiet=True)
    saved = here / "config.toml"
    saved.write_text(trainer.config.to_toml(), encoding="utf-8")
    assert SortedConfig.load(saved, given=trainer.config).resolved() == trainer.config.resolved()
    with pytest.raises(ConfigError, match=r"with SortedTrainer\(\.\.\., strategy=\.\.\.\)"):
        SortedConfig.load(saved)


def test_an_engine_that_is_ready_gets_the_weights_of_the_run_as_version_0(here: Path) -> None:
    published: list[tuple[int, Any]] = []

    class Ready(LocalEngine):
        def publish(self, version: int, source: Any, *arguments: Any) -> Any:
            published.append((version, source.module))
            return super().publish(version, source, *arguments)

    from sortedrl.learner.model import load_model
    from sortedrl.tasks.tiny import knights_tiny_path

    model, _ = load_model(knights_tiny_path())
    config = config_of(checkpoint={"save": False})
    wrong = Ready(model, slots=4, max_length=264)
    with pytest.raises(ConfigError, match=r"has 4 slots and engine\.slots is 8: make them equal"):
        SortedTrainer(args=config, engine=wrong, quiet=True).train()
    SortedTrainer(args=config, engine=Ready(model, slots=8, max_length=264), quiet=True).train()
    assert [version for version, _ in published] == [0, 1, 2]
    assert published[0][1] is not model


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engine": {"kind": "lokal"}}, r"^engine\.kind: unknown engine 'lokal': did you mean local\? Or choose from"),
        (
            {"engine": {"kind": "x" * 5000}},
            r"unknown engine 'x{200}\.\.\.': choose from local, vllm, or write your own",
        ),
        ({"engine": {"kind": 3}}, r"^engine\.kind: must be a name, module:Object, or in Python an object, not 3$"),
        ({"engine": {"kind": "a\0b:c"}}, r"engine\.kind: must be text without NUL"),
        ({"learner": {"algorithm": "gpro"}}, r"unknown algorithm 'gpro': did you mean gspo or grpo\?"),
        (
            {"learner": {"algorithm": "nowhere:X"}},
            r"algorithm 'nowhere:X' cannot be loaded: there is no module nowhere",
        ),
        ({"learner": {"algorithm": "plugged:GRPQ"}}, r"cannot be loaded: plugged has no GRPQ: did you mean GRPO\?$"),
        ({"learner": {"algorithm": "plugged:"}}, r"algorithm 'plugged:': write module:Object"),
        ({"learner": {"algorithm": "plugged:Mine"}}, r"'plugged:Mine' is not an algorithm: its type is type, not Algo"),
        ({"learner": {"algorithm": "raises:X"}}, r"'raises:X' cannot be loaded: ZeroDivisionError: .*; correct its"),
        ({"learner": {"algorithm": "needy:X"}}, r"cannot be loaded: needy needs absent_vendor, which is not installed"),
        ({"learner": {"advantage": "plugged:NUMBER"}}, r"is not an advantage function: its type is int, which can"),
        (
            {"learner": {"advantage": "leave-one-out", "group_size": 1}},
            "leave-one-out compares siblings, set 2 or more",
        ),
        ({"learner": {"algorithm": "ppo", "advantage": "plugged:centred"}}, "has no effect on ppo, whose critic makes"),
        (
            {"schedule": {"strategy": "plugged:NUMBER"}},
            r"is not a strategy: it has no knobs and no wants_cohort and no",
        ),
        ({"schedule": {"strategy": {"lookahed": 3}}}, r"unknown knob 'lookahed': the knobs are"),
        (
            {"track": {"to": "mlflow"}},
            r"track\.to: unknown tracker 'mlflow': choose from tensorboard, wandb, all, none",
        ),
        ({"task": {"name": "<mine.Task>"}}, r"^task\.name <mine\.Task> is an object that Python code gave"),
    ],
)
def test_a_configuration_that_names_nothing_is_refused(sections: dict[str, Any], message: str, here: Path) -> None:
    (here / "raises.py").write_text("1 / 0", encoding="utf-8")
    (here / "needy.py").write_text("import absent_vendor", encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as raised:
        config_of(**sections)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"engine": {"kind": "plugged:HalfEngine"}},
            r"'plugged:HalfEngine' is not an engine: it has no capabilities and",
        ),
        (
            {"engine": {"kind": "plugged:engine", "options": {"speed": 1}}},
            r"cannot be made: TypeError: .*'speed'; it is",
        ),
        ({"engine": {"kind": "plugged:engine", "replicas": 2}}, r"cannot run in a pool: remove engine\.replicas"),
        (
            {"engine": {"kind": "plugged:engine", "port": 80}},
            r"engine\.port has no effect on engine\.kind 'plugged:engine'",
        ),
        ({"engine": {"options": {"share": 1}}}, r"engine\.options has no effect on engine\.kind local: remove it"),
        (
            {"task": {"name": "plugged:task", "options": {"persons": 1}}},
            r"it is called with \(seed=\.\.\., \*\*task\.op",
        ),
        (
            {"task": {"name": "plugged:task", "options": {"seed": 1, "value": 2}}},
            r"cannot be made: TypeError: .*'value'",
        ),
        ({"task": {"name": "plugged:task", "path": "x.jsonl"}}, r"task\.path has no effect on task\.name plugged:task"),
        ({"task": {"name": "plugged:KNOBS"}}, r"'plugged:KNOBS' is not a task: it has no name and no train and no"),
        ({"track": {"to": ["none", "wandb"]}}, r"track\.to has none beside others: write it alone"),
        (
            {"track": {"to": "plugged:KNOBS"}},
            r"'plugged:KNOBS' is not a tracker: it has no write and no close; see docs",
        ),
    ],
)
def test_an_object_that_does_not_fit_is_refused_before_the_run_starts(
    sections: dict[str, Any], message: str, here: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        SortedTrainer(args=config_of(**sections), quiet=True).train()
    assert "\n" not in str(raised.value)
    assert not (here / "runs").exists()


def test_a_table_in_a_file_is_not_an_object(here: Path) -> None:
    (here / "run.toml").write_text("[schedule.strategy]\nlookahead = 1\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"schedule\.strategy must be text, not a table: write a name or module:Object"
    ):
        SortedConfig.load("run.toml")


def test_a_task_and_a_dataset_are_too_much() -> None:
    with pytest.raises(ConfigError, match="task brings its own rows"):
        SortedTrainer(task=KnightsTask(seed=0, people={2: 1.0}), train_dataset=[{"prompt": "x"}])


def test_nothing_is_imported_before_it_is_used(here: Path) -> None:
    config = config_of(
        engine={"kind": "plugged:engine"}, task={"name": "plugged:task"}, track={"to": "plugged:Tracker"}
    )
    assert config.engine.kind == "plugged:engine"
    assert "plugged" not in sys.modules


def test_a_bad_schedule_stops_the_run_with_a_name_and_the_run_can_be_resumed_with_another(here: Path) -> None:
    (here / "twice.py").write_text(
        "from sortedrl.schedule import SortedSchedule\n"
        "class Twice(SortedSchedule):\n"
        "    def choose_batch(self, buffer, knobs, *, has_data=False):\n"
        "        batch = super().choose_batch(buffer, knobs, has_data=has_data)\n"
        "        return batch if batch is None or buffer.num_updates == 0 else [*batch, batch[0]]\n",
        encoding="utf-8",
    )
    config = config_of(schedule={"strategy": "twice:Twice"})
    with pytest.raises(ScheduleError, match=r"schedule twice:Twice broke a rule: choose_batch names sample \d+ twice"):
        SortedTrainer(args=config, quiet=True).train()
    (here / "twice.py").write_text("from sortedrl.schedule import SortedSchedule as Twice\n", encoding="utf-8")
    sys.modules.pop("twice")
    done = CliRunner().invoke(app, ["train", "--resume", "runs/run", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["runs"][0]["samples"] == 16
    checked = CliRunner().invoke(app, ["ledger", "runs/run", "--verify"])
    assert checked.exit_code == 0, checked.output
    sys.modules.pop("twice")


def test_names_of_objects_hold_no_address() -> None:
    assert name_of(Counter()) == name_of(Counter) == f"<{__name__}.Counter>"
    assert name_of("local") == "local"
    assert name_of({}) == "<builtins.dict>"


def test_lacking_names_all_that_is_missing() -> None:
    assert lacking("text", ("upper", "lower")) == ""
    assert lacking("text", ("upper", "poll", "close")) == "it has no poll and no close"


def test_import_object_walks_to_nested_names() -> None:
    assert import_object("x", "json:JSONDecoder.decode") is json.JSONDecoder.decode
    with pytest.raises(ConfigError, match="JSONDecoder has no decod: did you mean decode"):
        import_object("x", "json:JSONDecoder.decod")


def test_every_point_has_its_own_group_and_argument() -> None:
    assert len({point.group for point in POINTS}) == len({point.argument for point in POINTS}) == len(POINTS) == 7
