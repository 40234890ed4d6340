"""What a task provides (rows with a prompt, reward functions, held-out rows), and the stream of prompts made from it.

A row is a dict with `prompt` (text, or a list of chat messages) and further columns, as in TRL datasets. The loader
takes prompts from a `PromptStream`, scoring calls `reward_funcs`, evaluation uses `heldout` rows.

Guarantees: the n-th prompt of a stream depends on task, seed and n only, so a saved cursor resumes exactly; within an
epoch every row of a finite dataset occurs once; the id of a prompt names its row, not the epoch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sortedrl.errors import DataError
from sortedrl.records import Prompt

Row = dict[str, Any]
RewardFunc = Callable[..., list[float]]
"""`fn(prompts, completions, **columns) -> list[float]`; completions are text when prompts are text."""
_LONGEST_TOKEN = 1024  # characters; vocabularies have none that is longer


class Rows(Protocol):
    """Rows by number. `size` is None if the task generates rows on demand without end."""

    @property
    def size(self) -> int | None: ...

    def row(self, index: int) -> Row: ...


class Task(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def train(self) -> Rows: ...

    @property
    def reward_funcs(self) -> Sequence[RewardFunc]: ...

    @property
    def group_column(self) -> str | None:
        """The column by which accuracy is reported in groups, if any."""
        ...

    def heldout(self, num: int) -> list[Row]:
        """Return at most `num` rows that training never uses, the same ones at every call."""
        ...


class RowSequence(Protocol):
    """What a list of dicts and a `datasets.Dataset` have in common."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(slots=True, kw_only=True, frozen=True)
class DatasetRows:
    """A finite dataset in the order of its file. A stream shuffles it for every epoch."""

    name: str
    rows: RowSequence

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def numbers(self) -> Sequence[int]:
        """The number of each row in its file, even if only some rows are used."""
        return getattr(self.rows, "indices", range(len(self.rows)))

    def row(self, index: int) -> Row:
        row = dict(self.rows[index])
        check_row(row, f"{self.name}/{self.numbers[index]}")
        return row


@dataclass(slots=True, kw_only=True, frozen=True)
class DatasetTask:
    """A task from a sequence of rows, such as a list of dicts or a `datasets.Dataset`, and reward functions."""

    rows: RowSequence
    reward_funcs: Sequence[RewardFunc]
    eval_rows: RowSequence | None = None
    name: str = "dataset"
    group_column: str | None = None

    def __post_init__(self) -> None:
        if len(self.rows) == 0:
            raise DataError(f"dataset {self.name!r} is empty; give it at least one row")
        if not self.reward_funcs:
            raise DataError(f"dataset {self.name!r} has no reward function; pass at least one")
        self.train.row(0)
        self.heldout(1)

    @property
    def train(self) -> DatasetRows:
        return DatasetRows(name=self.name, rows=self.rows)

    def heldout(self, num: int) -> list[Row]:
        if self.eval_rows is None:
            return []
        source = DatasetRows(name=f"{self.name}-eval", rows=self.eval_rows)
        return [source.row(index) for index in range(min(num, source.size))]


def check_row(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a row without a usable prompt."""
    if "prompt" not in row:
        columns = ", ".join(repr(column) for column in row) or "none"
        raise DataError(f"row {where} has no column 'prompt' (it has: {columns}); rename the column with the question")
    prompt = row["prompt"]
    is_text = isinstance(prompt, str) and bool(prompt.strip())
    is_chat = isinstance(prompt, list) and bool(prompt) and all(_is_message(message) for message in prompt)
    if not (is_text or is_chat):
        raise DataError(
            f"row {where} has the prompt {prompt!r:.80}; it must be text that is not empty, "
            "or a list of messages with 'role' and 'content', both text"
        )


def _is_message(message: object) -> bool:
    return isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))


@dataclass(slots=True, kw_only=True)
class PromptStream:
    """The tokenized prompts of a task, one after the other. `tokenizer` is a Hugging Face tokenizer."""

    task: Task
    tokenizer: Any
    seed: int
    max_prompt_tokens: int
    tools: Sequence[dict[str, Any]] = ()  # schemas that chat templates show to the model
    cursor: int = 0  # prompts taken so far
    _order: tuple[int, list[int]] | None = field(default=None, repr=False)  # the last epoch and its order of rows

    def take(self, num_prompts: int) -> list[tuple[int, Prompt]]:
        """Return the next prompts, each with its epoch."""
        taken = [self._at(position) for position in range(self.cursor, self.cursor + num_prompts)]
        self.cursor += num_prompts
        return taken

    def first_rows(self, num_rows: int) -> Iterator[tuple[int, Row]]:
        """The rows of the first prompts of the stream, each with its number in its file. The cursor stays."""
        for position in range(num_rows):
            _, number, row = self._row_at(position)
            yield number, row

    def state_dict(self) -> dict[str, int]:
        return {"cursor": self.cursor, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if state["seed"] != self.seed:
            raise DataError(
                f"the data cursor was saved with seed {state['seed']}, this run has seed {self.seed}; "
                f"resume with run.seed={state['seed']}"
            )
        self.cursor = state["cursor"]

    def _at(self, position: int) -> tuple[int, Prompt]:
        epoch, number, row = self._row_at(position)
        return epoch, make_prompt(
            row,
            self.tokenizer,
            prompt_id=f"{self.task.name}/{number}",
            max_tokens=self.max_prompt_tokens,
            tools=self.tools,
        )

    def _row_at(self, position: int) -> tuple[int, int, Row]:
        """Epoch, number in its file, and row at a position of the stream."""
        rows = self.task.train
        size = rows.size
        epoch, index = (0, position) if size is None else self._shuffled(*divmod(position, size), size)
        number = rows.numbers[index] if isinstance(rows, DatasetRows) else index
        return epoch, number, rows.row(index)

    def _shuffled(self, epoch: int, offset: int, size: int) -> tuple[int, int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(size))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return epoch, self._order[1][offset]


def make_prompt(
    row: Row, tokenizer: Any, *, prompt_id: str, max_tokens: int, tools: Sequence[dict[str, Any]] = ()
) -> Prompt:
    """Check and tokenize a row; a chat template shows `tools`."""
    check_row(row, prompt_id)
    prompt = row["prompt"]
    # A tokenizer needs about a hundred times the memory of its text, so a text that cannot fit is not given to it.
    num_chars = len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)
    if num_chars > _LONGEST_TOKEN * max_tokens:
        raise _too_long(prompt_id, f"{num_chars:,} characters", max_tokens)
    tokens = tuple(encode_prompt(prompt, tokenizer, prompt_id, tools))
    if len(tokens) > max_tokens:
        raise _too_long(prompt_id, f"{len(tokens)} tokens", max_tokens)
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return Prompt(id=prompt_id, tokens=tokens, content=prompt, columns=columns)


def _too_long(prompt_id: str, size: str, max_tokens: int) -> DataError:
    return DataError(
        f"the prompt of row {prompt_id} has {size}, more than the limit of {max_tokens} tokens; shorten or leave out "
        "that row, or raise task.max_prompt_tokens"
    )


def encode_prompt(
    prompt: str | list[dict[str, str]], tokenizer: Any, where: str, tools: Sequence[dict[str, Any]] = ()
) -> list[int]:
    """Tokenize a prompt so that an answer can follow it."""
    try:
        return _encode(prompt, tokenizer, where, tools)
    except DataError:
        raise
    except Exception as error:  # tokenizers and chat templates raise errors of many kinds
        why = " ".join(str(error).split())[:160]
        raise DataError(
            f"the prompt of row {where} cannot be encoded ({why}); correct or leave out that row"
        ) from error


def _encode(
    prompt: str | list[dict[str, str]], tokenizer: Any, where: str, tools: Sequence[dict[str, Any]]
) -> list[int]:
    if not isinstance(prompt, str):
        if tokenizer.chat_template is None:
            raise DataError(
                f"row {where} holds chat messages, but the tokenizer has no chat template; "
                "use a chat model, or give the prompts as text"
            )
        shown = {"tools": list(tools)} if tools else {}
        return list(
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, **shown)["input_ids"]
        )
    tokens = list(tokenizer(prompt, add_special_tokens=True)["input_ids"])
    if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id:  # some tokenizers end every text with it
        tokens.pop()
    if tokenizer.unk_token_id is not None and 2 * tokens.count(tokenizer.unk_token_id) > len(tokens):
        raise DataError(
            f"most words of the prompt of row {where} are unknown to the tokenizer; use a model made for this task"
        )
    return tokens
