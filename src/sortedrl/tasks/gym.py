"""The generators of reasoning-gym as tasks: `task.name = "reasoning_gym:NAME"`. Their scores are the rewards.

`run/builders/task.py` makes the task, reward workers import `gym_reward`. A row does not contain the generator's data,
which JSON could not carry in full. It names generator, options, seed and number, and the worker generates it again.

Guarantees: `row(i)` depends on name, options, seed and `i` only; a hash of its text decides whether a question is held
out, so training never uses it; an answer that a scorer evaluates as code is passed on only if it is a plain list or
plain arithmetic.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from sortedrl.errors import ConfigError, DataError
from sortedrl.external.extras import extra_message
from sortedrl.tasks.answers import after_thought, completion_text, tagged
from sortedrl.tasks.base import RewardFunc, Row, Rows
from sortedrl.tasks.knights import HELDOUT_SEED
from sortedrl.tasks.wording import Wording

try:  # imported here so that workers load it at their start, which the time limit of calls does not include
    import reasoning_gym  # noqa: F401  # registers the generators
    from reasoning_gym.factory import DATASETS
except ImportError:
    raise ConfigError(extra_message("task.name = reasoning_gym:NAME", "gym")) from None

PREFIX = "reasoning_gym:"
INSTRUCTION = "Give your final answer between <answer> and </answer>, and nothing else there."
_BLOCK = 64  # rows per dataset, because some generators make a whole dataset at once
_TRIES = 8  # items per row; the first that is not held out is used
HELDOUT_SHARE = 4  # one question in this many is held out
_MAX_WRONG_SCORE = 0.05  # reasoning-gym gives up to this for any readable answer, even a wrong one
MAX_ANSWER = 20_000  # characters
# Where generators that have no `answer` keep a right one.
_EXAMPLES = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}


def generator_names() -> list[str]:
    return sorted(DATASETS)


def gym_reward(prompts: Sequence[Any], completions: Sequence[Any], gym: Sequence[Any], **columns: Any) -> list[float]:
    """Reward function: the generator's score of the text in the last answer tags, 0.0 without them."""
    return [score(completion_text(given), origin) for given, origin in zip(completions, gym, strict=True)]


def score(completion: str, origin: Mapping[str, Any]) -> float:
    answer = tagged(after_thought(completion))
    if not answer or len(answer) > MAX_ANSWER or not is_harmless(origin["name"], answer):
        return 0.0
    dataset, item = _make_item(origin["name"], origin["seed"], json.dumps(origin["options"]), origin["item"])
    with contextlib.redirect_stdout(io.StringIO()):  # some scorers print
        found = float(dataset.score_answer(answer, item))
    return found if found > _MAX_WRONG_SCORE else 0.0


def reference_answer(name: str, item: Mapping[str, Any]) -> str | None:
    """A right answer, if the generator provides one."""
    answer = item["answer"] if item["answer"] is not None else item["metadata"].get(_EXAMPLES.get(name, ""))
    return answer if answer is None or isinstance(answer, str) else json.dumps(answer)


# ---- answers that scorers evaluate -----------------------------------------------------------------------------------

LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
_PLAIN_LIST = re.compile(r"[\w\s,'\"\[\]]*")
_PLAIN_FORMULA = re.compile(r"[0-9A-Za-z\s+*/^()=.,-]*")
_CALL = re.compile(r"([A-Za-z]\w*)\s*\(")
_ATTRIBUTE = re.compile(r"[A-Za-z)\d]\s*\.\s*[A-Za-z]")
_TALL_POWER = re.compile(r"\*\*[\s(-]*\d{3,}|\*\*[\s(-]*\w+[\s)]*\*\*|\d{40,}")
_FUNCTIONS = frozenset(
    (
        *("Abs", "exp", "ln", "log", "sqrt"),
        *("acos", "asin", "atan", "cos", "cosh", "cot", "csc", "sec", "sin", "sinh", "tan"),
    )
)


def is_harmless(name: str, answer: str) -> bool:
    """Whether a scorer that evaluates text as Python may get this answer: it calls only known functions."""
    if name in LISTS:
        return _PLAIN_LIST.fullmatch(answer) is not None and "__" not in answer
    if name in FORMULAS:
        calls = set(_CALL.findall(answer)) - _FUNCTIONS
        has_names_only = all(len(call) == 1 for call in calls)  # x(y) is meant as a product
        return (
            _PLAIN_FORMULA.fullmatch(answer) is not None
            and has_names_only
            and not _ATTRIBUTE.search(answer)
            and not _TALL_POWER.search(answer.replace("^", "**"))
        )
    return True


# ---- generators ------------------------------------------------------------------------------------------------------


def _check_generator(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a generator or an option that reasoning-gym does not have."""
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.4)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else "the names are in docs/guides/own_data.md"
        raise ConfigError(f"task.name {PREFIX + name!r}: reasoning-gym has no generator {name!r}; {hint}")
    known = [entry.name for entry in fields(DATASETS[name][1]) if entry.name not in ("seed", "size")]
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise ConfigError(f"task.options: {PREFIX}{name} has no option {option!r}; {hint}")


@lru_cache(maxsize=64)
def make_dataset(name: str, seed: str, options_json: str = "{}") -> Any:
    """Make the dataset of one block of rows."""
    cls, config_cls = DATASETS[name]
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=4).digest(), "little")
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(options_json).items()}
    try:
        config = config_cls(seed=number, size=_BLOCK * _TRIES, **options)
        if hasattr(config, "validate"):  # some generators have no such method
            config.validate()
        return cls(config=config)
    except (AssertionError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:160] or type(error).__name__
        raise ConfigError(
            f"reasoning-gym cannot make {name} with task.options {options}: {why}; change them"
        ) from error


@lru_cache(maxsize=1024)  # siblings share an item, and some generators take seconds to make one
def _make_item(name: str, seed: str, options_json: str, number: int) -> tuple[Any, Mapping[str, Any]]:
    """Return an item and the dataset that scores it."""
    dataset = make_dataset(name, seed, options_json)
    return dataset, dataset[number]


def is_heldout(question: str) -> bool:
    digest = hashlib.blake2b(question.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELDOUT_SHARE == 0


@dataclass(slots=True, kw_only=True, frozen=True)
class GymRows:
    """Training questions, generated without end."""

    generator: str
    seed: int | str
    options: Mapping[str, Any]
    wording: Wording

    @property
    def size(self) -> None:
        return None

    def row(self, index: int) -> Row:
        block, place = divmod(index, _BLOCK)
        for attempt in range(_TRIES):
            row = self.item(block, place + attempt * _BLOCK)
            if not is_heldout(row["prompt"]):
                return self.wording.apply(row)
        raise DataError(
            f"{PREFIX}{self.generator} makes too few different questions to hold some out; give it other task.options"
        )

    def item(self, block: int, number: int) -> Row:
        seed = f"{self.seed}/{block}"
        _, item = _make_item(self.generator, seed, json.dumps(dict(self.options)), number)
        origin = {"name": self.generator, "seed": seed, "item": number, "options": dict(self.options)}
        return {"prompt": item["question"], "answer": reference_answer(self.generator, item), "gym": origin}


@dataclass(slots=True, kw_only=True, frozen=True)
class GymTask:
    """A task from one generator. Held-out questions do not depend on the run's seed."""

    generator: str
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    wording: Wording = field(default_factory=lambda: Wording(instruction=INSTRUCTION))
    group_column: str | None = None
    reward_funcs: Sequence[RewardFunc] = (gym_reward,)

    def __post_init__(self) -> None:
        _check_generator(self.generator, self.options)
        make_dataset(self.generator, f"{self.seed}/0", json.dumps(dict(self.options)))

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.generator}"

    @property
    def train(self) -> Rows:
        return self._rows(self.seed)

    def _rows(self, seed: int | str) -> GymRows:
        return GymRows(generator=self.generator, seed=seed, options=self.options, wording=self.wording)

    def heldout(self, num: int) -> list[Row]:
        """Return distinct questions, fewer than `num` if the generator has too few."""
        source = self._rows(HELDOUT_SEED)
        found: dict[str, Row] = {}
        for number in range(2 * HELDOUT_SHARE * num):
            if len(found) == num:
                break
            row = source.item(*divmod(number, _BLOCK * _TRIES))
            if is_heldout(row["prompt"]):
                found.setdefault(row["prompt"], self.wording.apply(row))
        return list(found.values())
