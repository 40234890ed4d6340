"""Builds the task of the `[task]` section: its rows, how they become prompts, and its reward functions.

`parts.py` calls `build_task` for a run; commands such as `sft` and `doctor` call it too. Missing files, columns and
names raise here, before a model is loaded.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sortedrl.config import SortedConfig
from sortedrl.config.plug_points import TASK
from sortedrl.config.sections import TaskSection
from sortedrl.environment.scorer import no_reward
from sortedrl.errors import ConfigError
from sortedrl.external.hub import Commits
from sortedrl.external.plugins import import_object, name_of
from sortedrl.reward.worker import NOT_COLUMNS
from sortedrl.tasks.base import DatasetTask, RewardFunc, RowSequence, Task
from sortedrl.tasks.counting import INSTRUCTION as COUNTING_INSTRUCTION
from sortedrl.tasks.counting import CountingTask, Questions
from sortedrl.tasks.files import ChosenRows, FileRows, read_rows, split_off
from sortedrl.tasks.knights import KnightsTask
from sortedrl.tasks.logic import INSTRUCTION as LOGIC_INSTRUCTION
from sortedrl.tasks.logic import LogicRlRows, LogicTask, logic_reward
from sortedrl.tasks.reward_model import RewardModel, is_model_name
from sortedrl.tasks.suites import MATH_INSTRUCTION
from sortedrl.tasks.tools import ToolsTask
from sortedrl.tasks.wording import PLACE, WordedRows, Wording

PREFIX = "reasoning_gym:"
REWARDS = {"math": "sortedrl.tasks.math:math_reward", "logic": "sortedrl.tasks.logic:logic_reward"}
FILE_KEYS = ("path", "revision", "split", "eval_path", "eval_split", "columns")
WORDING_KEYS = ("template", "system", "chat")
ROLLOUT_ARGUMENTS = NOT_COLUMNS | {"trainer_state", "log_extra", "log_metric"}


def build_task(config: SortedConfig, commits: Commits | None = None) -> Task:
    """The configured task; `task.reward` replaces its reward functions. `commits` fixes and notes those of datasets."""
    section, seed = config.task, config.run.seed
    rewards = load_rewards(section.reward, config.run.started_in)
    match section.name.partition(":")[0] if isinstance(section.name, str) else "":
        case "knights":
            _refuse(section, *FILE_KEYS, *WORDING_KEYS, "options")
            task = KnightsTask(seed=seed, people=people_of(section))
        case "logic" if section.path:
            task = _logic_rl_task(section, rewards or (logic_reward,), commits)
        case "logic":
            _refuse(section, *FILE_KEYS, "options")
            task = LogicTask(seed=seed, people=people_of(section), wording=wording_of(section, LOGIC_INSTRUCTION))
        case "tools":
            _refuse(section, *FILE_KEYS, *WORDING_KEYS, "options")
            task = ToolsTask(seed=seed)
        case "counting":
            _refuse(section, *FILE_KEYS)
            task = _counting_task(section, seed)
        case "math":
            task = _dataset_task(section, rewards or load_rewards("math"), MATH_INSTRUCTION, commits)
        case "dataset":
            if not rewards and config.environment.factory == "none":
                raise ConfigError("task.name dataset needs task.reward: set module:function, or math")
            rewards = rewards or (no_reward,)  # the environment gives the reward
            task = _dataset_task(section, rewards, "", commits)
        case "reasoning_gym" if section.name.startswith(PREFIX):
            task = _gym_task(section, seed)
        case _:
            _refuse(section, *FILE_KEYS, *WORDING_KEYS, "reward")
            return TASK.make(section.name, "(seed=..., **task.options)", **{"seed": seed, **section.options})
    return dataclasses.replace(task, reward_funcs=rewards) if rewards else task  # type: ignore[type-var]


def _counting_task(section: TaskSection, seed: int) -> CountingTask:
    names = [option.name for option in dataclasses.fields(Questions)]
    unknown = ", ".join(section.options.keys() - names)
    if unknown:
        raise ConfigError(f"task.options of counting has no {unknown}: set {', '.join(names)} or leave it out")
    questions: Any = section.options  # `Questions` checks the values
    return CountingTask(seed=seed, questions=Questions(**questions), wording=wording_of(section, COUNTING_INSTRUCTION))


def _gym_task(section: TaskSection, seed: int) -> Task:
    from sortedrl.tasks.gym import INSTRUCTION, GymTask  # at need: it loads reasoning-gym, which is optional

    _refuse(section, *FILE_KEYS)
    name, wording = section.name.removeprefix(PREFIX), wording_of(section, INSTRUCTION)
    return GymTask(generator=name, seed=seed, options=section.options, wording=wording)


def wording_of(section: TaskSection, instruction: str) -> Wording:
    if section.template and PLACE not in section.template:
        raise ConfigError(f"task.template does not contain {PLACE}: put it where the prompt goes")
    return Wording(template=section.template, instruction=instruction, system=section.system, is_chat=section.chat)


def people_of(section: TaskSection) -> dict[int, float]:
    try:
        return {int(number): weight for number, weight in section.people.items()}
    except ValueError:
        raise ConfigError(f"task.people must map numbers of people to weights, not {section.people}") from None


# ---- rows ------------------------------------------------------------------------------------------------------------


def _dataset_task(
    section: TaskSection, rewards: Sequence[RewardFunc], instruction: str, commits: Commits | None
) -> DatasetTask:
    _refuse(section, "options")
    required = {"prompt", *(column for reward in rewards for column in needed_columns(reward))}
    rows, heldout = _read_both(section, required, commits)
    wording = wording_of(section, instruction)
    return _split_task(section, WordedRows(rows=rows, wording=wording), heldout, wording, rewards)


def _logic_rl_task(section: TaskSection, rewards: Sequence[RewardFunc], commits: Commits | None) -> DatasetTask:
    _refuse(section, "options")
    rows, heldout = _read_both(section, {"prompt", "names", "solution_text_format"}, commits)
    wording = wording_of(section, LOGIC_INSTRUCTION)
    worded = WordedRows(rows=LogicRlRows(rows=rows), wording=wording)
    own = None if heldout is None else LogicRlRows(rows=heldout)
    return dataclasses.replace(_split_task(section, worded, own, wording, rewards), group_column="people")


def _read_both(section: TaskSection, required: set[str], commits: Commits | None) -> tuple[FileRows, FileRows | None]:
    """Training rows, and held-out rows if `eval_path` or `eval_split` is set."""
    if not section.path:
        raise ConfigError(f"task.name {section.name} needs task.path: a file, a folder or a dataset's name on the hub")
    form: dict[str, Any] = {"columns": section.columns, "required": required, "commits": commits}
    rows = read_rows(section.path, split=section.split, revision=section.revision, **form)
    if not section.eval_path and not section.eval_split:
        return rows, None
    source = section.eval_path or section.path
    revision = section.revision if source == section.path else ""
    return rows, read_rows(source, split=section.eval_split, revision=revision, **form)


def _split_task(
    section: TaskSection,
    rows: WordedRows,
    heldout: RowSequence | None,
    wording: Wording,
    rewards: Sequence[RewardFunc],
) -> DatasetTask:
    train: RowSequence = rows
    eval_rows: RowSequence | None = None if heldout is None else WordedRows(rows=heldout, wording=wording)
    if heldout is None:
        kept, held = split_off(rows.rows, section.eval_share)
        train = ChosenRows(rows=rows, indices=kept)
        eval_rows = ChosenRows(rows=rows, indices=held) if held else None
    return DatasetTask(rows=train, reward_funcs=rewards, eval_rows=eval_rows, name=section.name)


# ---- rewards ---------------------------------------------------------------------------------------------------------


def load_rewards(spec: str, started_in: str = "") -> tuple[RewardFunc, ...]:
    """The functions that `task.reward` names.

    Their modules are looked up in the current folder too, and in the folder that the run was started in.
    """
    for folder in (str(Path.cwd()), started_in):
        if folder and folder not in sys.path:
            sys.path.append(folder)  # reward workers get the same path
    return tuple(_load_reward(name.strip()) for name in spec.split(",") if name.strip())


def _load_reward(name: str) -> Callable[..., Any]:
    if is_model_name(name):
        return RewardModel(name=name)
    spec = REWARDS.get(name, name)
    if ":" not in spec:
        raise ConfigError(
            f"task.reward {name!r}: write module:function, one of {', '.join(REWARDS)}, or a reward model as owner/name"
        )
    function = import_object("task.reward", spec)
    if not callable(function):
        raise ConfigError(f"task.reward {name!r} is not a function: name a callable as module:function")
    return function


def needed_columns(reward: Callable[..., Any]) -> list[str]:
    """The columns that a reward function needs: its parameters without a default."""
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return []
    named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty)
    return [parameter.name for parameter in named if parameter.name not in ROLLOUT_ARGUMENTS]


# ---- messages --------------------------------------------------------------------------------------------------------


def _refuse(section: TaskSection, *keys: str) -> None:
    """Refuse settings that have no effect on this task."""
    for key in keys:
        if getattr(section, key) != type(section).model_fields[key].default:
            raise ConfigError(f"task.{key} has no effect on task.name {name_of(section.name)}: remove it")
