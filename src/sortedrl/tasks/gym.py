"""The generators of reasoning-gym as tasks: `task.name = "reasoning_gym:NAME"`, each with its own score as the reward.

`build/task.py` makes the task, a reward worker imports `gym_reward`. A row does not carry the generator's data: it says
which generator, options, seed and number it came from, and the worker makes it again, so that nothing is lost.

What this module keeps true: `row(i)` depends on name, options, seed and `i` alone; a question is held out or not by a
hash of its text, so training never sees it; an answer that a scorer would evaluate as code reaches it only if it is a
plain list or plain arithmetic.
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
from sortedrl.tasks.answers import after_thought, tagged
from sortedrl.tasks.base import RewardFunc, Row, Rows
from sortedrl.tasks.knights import HELDOUT_SEED
from sortedrl.tasks.wording import Wording

try:  # here, not at need: what a worker imports at its start does not count against an answer's time
    import reasoning_gym  # noqa: F401  # fills the registry
    from reasoning_gym.factory import DATASETS
except ImportError:
    raise ConfigError("reasoning_gym tasks need the package reasoning-gym: pip install 'sortedrl[gym]'") from None

PREFIX = "reasoning_gym:"
INSTRUCTION = "Give your final answer between <answer> and </answer>, and nothing else there."
BLOCK = 64  # rows that come from one dataset: some generators make all of theirs at once
TRIES = 8  # items for each row, of which the first that is not held out is taken
HELDOUT_SHARE = 4  # one question in this many is held out
CONSOLATION = 0.05  # what reasoning-gym gives for any answer that it can read, however wrong
MAX_ANSWER = 20_000  # characters
# Where generators without an answer of their own keep one that is right.
EXAMPLES = {
    "graph_color": "possible_answer",
    "propositional_logic": "example_answer",
    "rubiks_cube": "example_correct_answer",
}


def generator_names() -> list[str]:
    return sorted(DATASETS)


def gym_reward(prompts: Sequence[Any], completions: Sequence[Any], gym: Sequence[Any], **columns: Any) -> list[float]:
    """The generator's own score of what stands between the last answer tags, 0.0 where there are none."""
    texts = [given if isinstance(given, str) else given[-1]["content"] for given in completions]
    return [score(text, origin) for text, origin in zip(texts, gym, strict=True)]


def score(completion: str, origin: Mapping[str, Any]) -> float:
    answer = tagged(after_thought(completion))
    if not answer or len(answer) > MAX_ANSWER or not is_harmless(origin["name"], answer):
        return 0.0
    dataset, item = make_item(origin["name"], origin["seed"], json.dumps(origin["options"]), origin["item"])
    with contextlib.redirect_stdout(io.StringIO()):  # some scorers print
        found = float(dataset.score_answer(answer, item))
    return found if found > CONSOLATION else 0.0


def reference_answer(name: str, item: Mapping[str, Any]) -> str | None:
    """An answer that is right, if the generator tells one."""
    answer = item["answer"] if item["answer"] is not None else item["metadata"].get(EXAMPLES.get(name, ""))
    return answer if answer is None or isinstance(answer, str) else json.dumps(answer)


# ---- answers that scorers evaluate -----------------------------------------------------------------------------------

LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
PLAIN_LIST = re.compile(r"[\w\s,'\"\[\]]*")
PLAIN_FORMULA = re.compile(r"[0-9A-Za-z\s+*/^()=.,-]*")
CALL = re.compile(r"([A-Za-z]\w*)\s*\(")
ATTRIBUTE = re.compile(r"[A-Za-z)\d]\s*\.\s*[A-Za-z]")
TALL_POWER = re.compile(r"\*\*[\s(-]*\d{3,}|\*\*[\s(-]*\w+[\s)]*\*\*|\d{40,}")
FUNCTIONS = frozenset(
    (
        "Abs",
        "acos",
        "asin",
        "atan",
        "cos",
        "cosh",
        "cot",
        "csc",
        "exp",
        "ln",
        "log",
        "sec",
        "sin",
        "sinh",
        "sqrt",
        "tan",
    )
)


def is_harmless(name: str, answer: str) -> bool:
    """Whether a scorer that evaluates text as Python can be given this answer: it names no function but a formula's."""
    if name in LISTS:
        return PLAIN_LIST.fullmatch(answer) is not None and "__" not in answer
    if name in FORMULAS:
        calls = set(CALL.findall(answer)) - FUNCTIONS
        has_names_only = all(len(call) == 1 for call in calls)  # x(y) is a product that was meant
        return (
            PLAIN_FORMULA.fullmatch(answer) is not None
            and has_names_only
            and not ATTRIBUTE.search(answer)
            and not TALL_POWER.search(answer.replace("^", "**"))
        )
    return True


# ---- generators ------------------------------------------------------------------------------------------------------


def check_generator(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a name or an option that reasoning-gym does not have."""
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=1, cutoff=0.4)
        hint = f"did you mean {PREFIX}{near[0]}?" if near else "the names are in docs/tasks.md"
        raise ConfigError(f"task.name {PREFIX + name!r}: reasoning-gym has no generator {name!r}; {hint}")
    known = [entry.name for entry in fields(DATASETS[name][1]) if entry.name not in ("seed", "size")]
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise ConfigError(f"task.options: {PREFIX}{name} has no option {option!r}; {hint}")


@lru_cache(maxsize=64)
def make_dataset(name: str, seed: str, options_json: str = "{}") -> Any:
    """The items of one block."""
    cls, config_cls = DATASETS[name]
    number = int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=4).digest(), "little")
    options = {key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(options_json).items()}
    try:
        config = config_cls(seed=number, size=BLOCK * TRIES, **options)
        if hasattr(config, "validate"):  # some have no rules
            config.validate()
        return cls(config=config)
    except (AssertionError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:160] or type(error).__name__
        raise ConfigError(f"reasoning-gym cannot make {name} with task.options {options}: {why}; mend them") from error


@lru_cache(maxsize=1024)  # siblings are scored one by one, and some generators take seconds for an item
def make_item(name: str, seed: str, options_json: str, number: int) -> tuple[Any, Mapping[str, Any]]:
    """An item of a block, with the dataset that scores it."""
    dataset = make_dataset(name, seed, options_json)
    return dataset, dataset[number]


def is_heldout(question: str) -> bool:
    digest = hashlib.blake2b(question.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELDOUT_SHARE == 0


@dataclass(slots=True, kw_only=True, frozen=True)
class GymRows:
    """Training questions without end."""

    generator: str
    seed: int | str
    options: Mapping[str, Any]
    wording: Wording

    @property
    def size(self) -> None:
        return None

    def row(self, index: int) -> Row:
        block, place = divmod(index, BLOCK)
        for attempt in range(TRIES):
            row = self.item(block, place + attempt * BLOCK)
            if not is_heldout(row["prompt"]):
                return self.wording.apply(row)
        raise DataError(
            f"{PREFIX}{self.generator} makes too few different questions to hold some out; give it other task.options"
        )

    def item(self, block: int, number: int) -> Row:
        seed = f"{self.seed}/{block}"
        _, item = make_item(self.generator, seed, json.dumps(dict(self.options)), number)
        origin = {"name": self.generator, "seed": seed, "item": number, "options": dict(self.options)}
        return {"prompt": item["question"], "answer": reference_answer(self.generator, item), "gym": origin}


@dataclass(slots=True, kw_only=True, frozen=True)
class GymTask:
    """One generator. Held-out questions do not depend on the run's seed."""

    generator: str
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    wording: Wording = field(default_factory=lambda: Wording(instruction=INSTRUCTION))
    group_column: str | None = None
    reward_funcs: Sequence[RewardFunc] = (gym_reward,)

    def __post_init__(self) -> None:
        check_generator(self.generator, self.options)
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
        """Distinct questions, as long as unseen ones turn up: small generators have fewer."""
        source = self._rows(HELDOUT_SEED)
        found: dict[str, Row] = {}
        for number in range(2 * HELDOUT_SHARE * num):
            if len(found) == num:
                break
            row = source.item(*divmod(number, BLOCK * TRIES))
            if is_heldout(row["prompt"]):
                found.setdefault(row["prompt"], self.wording.apply(row))
        return list(found.values())
