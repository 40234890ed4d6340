"""Supervised fine-tuning from a configuration: read examples, train, and save a model that a run can start from.

`sortedrl sft CONFIG` calls `run_sft`. Examples are rows of a dataset, with `prompt` and `completion` or with
`messages` that end with an assistant message. Without `sft.path` they are the task's training prompts, each with a
completion that the task's verifier accepts (of the task `tools`: with those of a teacher that often gives up).

Guarantees: the loss covers only the completion and the end token; a task's held-out prompts are never trained on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from sortedrl.config import SortedConfig
from sortedrl.errors import DataError
from sortedrl.learner.finite_weights import check_weights
from sortedrl.learner.model import check_model_folder, read_window
from sortedrl.learner.pack import check_packing
from sortedrl.learner.sft import Example, OnStep, SftRates, SftResult, finetune, length_batches
from sortedrl.run.builders.parts import build_task, load_model, model_path, own_tokenizer
from sortedrl.run.checkpoint_folder import save_checkpoint
from sortedrl.tasks.base import Row, Task, encode_prompt
from sortedrl.tasks.counting import CountingRows
from sortedrl.tasks.files import read_rows
from sortedrl.tasks.knights import KnightsRows, teach
from sortedrl.tasks.tools import ToolsRows, demonstrate


def run_sft(
    config: SortedConfig,
    out: Path,
    on_step: OnStep | None = None,
    on_start: Callable[[int], None] | None = None,
) -> SftResult:
    """Train the configured model and save it to `out`; `on_start` is called with the number of steps."""
    settings = config.sft
    config.check_startable()
    torch.set_num_threads(config.run.threads)
    torch.manual_seed(config.run.seed)
    folder = check_model_folder(model_path(config))
    tokenizer = own_tokenizer(config, folder, None)
    examples = read_examples(config, tokenizer)
    check_fit(examples, folder)
    model, _ = load_model(folder)
    check_packing(model)
    stream = list(islice(_epochs(examples, config.run.seed), settings.epochs * len(examples)))
    limits = {"batch_tokens": settings.batch_tokens, "seed": config.run.seed}
    num_batches = sum(1 for _ in length_batches(stream, **limits))
    steps = min(settings.steps or num_batches, num_batches)
    if on_start is not None:
        on_start(steps)
    rates = SftRates(muon=None, adamw=settings.lr, warmup_steps=settings.warmup_steps)
    result = finetune(model, stream, steps=steps, **limits, rates=rates, is_packed=True, on_step=on_step)
    check_weights(f"the weights after {steps} steps", model.named_parameters(), remedy="lower sft.lr and start again")
    save_checkpoint(out, model, tokenizer, extra={"sft": {"steps": steps, "config": config.resolved()}})
    return result


def check_fit(examples: Sequence[Example], folder: Path) -> None:
    """Raise if an example is longer than the model's window."""
    window, longest = read_window(folder), max(len(prompt) + len(answer) for prompt, answer in examples)
    if window is not None and longest > window:
        raise DataError(
            f"the longest example has {longest} tokens, more than the {window} positions of the model in {folder}: "
            "remove such rows"
        )


def read_examples(config: SortedConfig, tokenizer: Any) -> list[Example]:
    """The configured examples as tokens; raises if one does not fit a batch."""
    settings = config.sft
    if settings.path:
        source = read_rows(
            settings.path,
            columns=settings.columns,
            split=settings.split or None,
            revision=settings.revision,
            required=(),
        )
        rows = [source[index] for index in range(min(len(source), settings.examples))]
        places = [f"{settings.path}, row {index}" for index in range(len(rows))]
    else:
        task = build_task(config)
        rows = list(task_examples(task, settings.examples, tokenizer.eos_token))
        places = [f"{task.name}/{index}" for index in range(len(rows))]
    examples = [make_example(row, tokenizer, where) for row, where in zip(rows, places, strict=True)]
    for (prompt, answer), where in zip(examples, places, strict=True):
        if len(prompt) + len(answer) > settings.batch_tokens:
            raise DataError(
                f"{where} has {len(prompt) + len(answer)} tokens, more than sft.batch_tokens {settings.batch_tokens}: "
                "raise it, or remove the row"
            )
    return examples


def make_example(row: Mapping[str, Any], tokenizer: Any, where: str) -> Example:
    prompt, completion = _split_row(row, where)
    answer = [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return encode_prompt(prompt, tokenizer, where), answer


def _split_row(row: Mapping[str, Any], where: str) -> tuple[Any, str]:
    """The prompt as given (text or messages), and the completion as text."""
    if "messages" in row:
        messages = row["messages"]
        if not isinstance(messages, list) or len(messages) < 2 or messages[-1].get("role") != "assistant":
            raise DataError(f"{where}: messages must be a list that ends with an assistant message: correct the row")
        prompt, completion = messages[:-1], messages[-1]["content"]
    else:
        for column in ("prompt", "completion"):
            if column not in row:
                raise DataError(
                    f"{where} has no column {column!r}; it has: {', '.join(row)}; name the right one with "
                    f"sft.columns.{column}=NAME, or give messages"
                )
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(completion, list):  # in chat format: one message of the assistant
            completion = completion[-1].get("content") if completion else None
    if not isinstance(completion, str) or not completion.strip():
        raise DataError(f"{where} has the completion {completion!r:.80}: it must be text and not empty")
    return prompt, completion


def task_examples(task: Task, num: int, end_of_turn: str = "") -> Iterator[Row]:
    """A task's training prompts, each with a completion that the task's verifier accepts.

    Only those of `tools` need not be right: their teacher often gives up.
    """
    size = task.train.size
    rng = random.Random("own traces")
    for index in range(num if size is None else min(num, size)):
        row = task.train.row(index)
        if "completion" not in row and "messages" not in row:
            row = {**row, "completion": _completion(task, index, row, rng, end_of_turn)}
        yield row


def _completion(task: Task, index: int, row: Row, rng: random.Random, end_of_turn: str) -> str:
    if isinstance(task.train, KnightsRows):
        return teach(task.train.puzzle(index), rng)
    if isinstance(task.train, ToolsRows):
        return demonstrate(row, rng, end_of_turn)
    answer = row.get("answer")
    if answer in (None, ""):
        raise DataError(f"row {index} of task {task.name} has neither completion nor answer: add one, or set sft.path")
    if isinstance(task.train, CountingRows):
        return str(answer)
    if task.name != "math":
        return f"<answer>{answer}</answer>"
    from sortedrl.tasks.math import reference_answer  # needs a package that other tasks do not

    return f"\\boxed{{{reference_answer(answer)}}}"


def _epochs(examples: Sequence[Example], seed: int) -> Iterator[Example]:
    """All examples, endlessly, in a new random order in each epoch."""
    epoch = 0
    while True:
        order = list(range(len(examples)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield from (examples[index] for index in order)
        epoch += 1
