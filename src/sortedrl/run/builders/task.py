"""Builds the task of the `[task]` section: its rows, how they become prompts, and its reward functions.

`parts.py` calls `build_task` for a run; commands such as `sft` and `doctor` call it too. Missing files, columns and
names raise here, before a model is loaded.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from sortedrl.config import SortedConfig
from sortedrl.config.sections import TaskSection
from sortedrl.errors import ConfigError, SortedRLError, first_line
from sortedrl.reward.worker import NOT_COLUMNS
from sortedrl.tasks.base import DatasetTask, RewardFunc, RowSequence, Task
from sortedrl.tasks.files import ChosenRows, FileRows, read_rows, split_off
from sortedrl.tasks.knights import KnightsTask
from sortedrl.tasks.logic import INSTRUCTION as LOGIC_INSTRUCTION
from sortedrl.tasks.logic import LogicRlRows, LogicTask, logic_reward
from sortedrl.tasks.suites import MATH_INSTRUCTION
from sortedrl.tasks.wording import PLACE, WordedRows, Wording

PREFIX = "reasoning_gym:"
NAMES = ("knights", "logic", "math", "dataset")
REWARDS = {"math": "sortedrl.tasks.math:math_reward", "logic": "sortedrl.tasks.logic:logic_reward"}
FILE_KEYS = ("path", "split", "eval_path", "eval_split", "columns")
WORDING_KEYS = ("template", "system", "chat")
ROLLOUT_ARGUMENTS = NOT_COLUMNS | {"trainer_state", "log_extra", "log_metric"}


def build_task(config: SortedConfig) -> Task:
    """The configured task; `task.reward` replaces its reward functions."""
    section, seed = config.task, config.run.seed
    rewards = load_rewards(section.reward)
    match section.name.partition(":")[0]:
        case "knights":
            _refuse(section, *FILE_KEYS, *WORDING_KEYS, "options")
            task = KnightsTask(seed=seed, people=people_of(section))
        case "logic" if section.path:
            task = _logic_rl_task(section, rewards or (logic_reward,))
        case "logic":
            _refuse(section, *FILE_KEYS, "options")
            task = LogicTask(seed=seed, people=people_of(section), wording=wording_of(section, LOGIC_INSTRUCTION))
        case "math":
            task = _dataset_task(section, rewards or load_rewards("math"), MATH_INSTRUCTION)
        case "dataset":
            if not rewards:
                raise ConfigError("task.name dataset needs task.reward: set module:function, or math")
            task = _dataset_task(section, rewards, "")
        case "reasoning_gym" if section.name.startswith(PREFIX):
            task = _gym_task(section, seed)
        case _:
            raise ConfigError(f"task.name {section.name!r} is not known{_nearest_task(section.name)}")
    return dataclasses.replace(task, reward_funcs=rewards) if rewards else task  # type: ignore[type-var]


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


def _dataset_task(section: TaskSection, rewards: Sequence[RewardFunc], instruction: str) -> DatasetTask:
    _refuse(section, "options")
    required = {"prompt", *(column for reward in rewards for column in needed_columns(reward))}
    rows, heldout = _read_both(section, required)
    wording = wording_of(section, instruction)
    return _split_task(section, WordedRows(rows=rows, wording=wording), heldout, wording, rewards)


def _logic_rl_task(section: TaskSection, rewards: Sequence[RewardFunc]) -> DatasetTask:
    _refuse(section, "options")
    rows, heldout = _read_both(section, {"prompt", "names", "solution_text_format"})
    wording = wording_of(section, LOGIC_INSTRUCTION)
    worded = WordedRows(rows=LogicRlRows(rows=rows), wording=wording)
    own = None if heldout is None else LogicRlRows(rows=heldout)
    return dataclasses.replace(_split_task(section, worded, own, wording, rewards), group_column="people")


def _read_both(section: TaskSection, required: set[str]) -> tuple[FileRows, FileRows | None]:
    """Training rows, and held-out rows if `eval_path` or `eval_split` is set."""
    if not section.path:
        raise ConfigError(f"task.name {section.name} needs task.path: a file, a folder or a dataset's name on the hub")
    rows = read_rows(section.path, columns=section.columns, split=section.split, required=required)
    if not section.eval_path and not section.eval_split:
        return rows, None
    source = section.eval_path or section.path
    return rows, read_rows(source, columns=section.columns, split=section.eval_split, required=required)


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


def load_rewards(spec: str) -> tuple[RewardFunc, ...]:
    """The functions that `task.reward` names; the current folder is searched for their modules too."""
    return tuple(_load_reward(name.strip()) for name in spec.split(",") if name.strip())


def _load_reward(name: str) -> Callable[..., Any]:
    module, colon, qualname = REWARDS.get(name, name).partition(":")
    if not colon or not module or not qualname:
        raise ConfigError(f"task.reward {name!r}: write module:function, or one of {', '.join(REWARDS)}")
    if module.startswith("."):
        raise ConfigError(f"task.reward {name!r} is relative: name the whole module, as in package.module:function")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # reward workers get the same path
    try:
        function = attrgetter(qualname)(importlib.import_module(module))
    except SortedRLError:
        raise
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"task.reward {name!r} cannot be loaded: {error}; check that its module can be imported from this folder"
        ) from error
    except Exception as error:  # the module is the user's code
        why = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"task.reward {name!r} cannot be loaded: {why}; correct its module") from error
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
            raise ConfigError(f"task.{key} has no effect on task.name {section.name}: remove it")


def _nearest_task(name: str) -> str:
    near = difflib.get_close_matches(name, NAMES, n=1)
    if near:
        return f": did you mean {near[0]}?"
    return f": the tasks are {', '.join(NAMES)} and {PREFIX}NAME"
