"""Supervised fine-tuning from a configuration: examples from rows and tasks, packed loss, and the saved model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sortedrl.config import SortedConfig
from sortedrl.environment.base import describe
from sortedrl.environment.dialect import Dialect
from sortedrl.errors import DataError
from sortedrl.learner.model import load_tokenizer
from sortedrl.learner.pack import packed_attention
from sortedrl.learner.sft import answer_loss, packed_loss, pad_batch
from sortedrl.records import Prompt, Sample, Segment
from sortedrl.run.builders.parts import load_model
from sortedrl.run.sft_run import check_fit, make_example, read_examples, run_sft, task_examples
from sortedrl.tasks.knights import KnightsTask, verify
from sortedrl.tasks.tiny import knights_tiny_path, make_model
from sortedrl.tasks.tools import Book, ToolsTask
from sortedrl.tasks.tools_model import tools_tiny_path

TOKENIZER = load_tokenizer(knights_tiny_path())


def test_packed_and_padded_losses_and_gradients_agree() -> None:
    model = make_model(seed=0)
    batch = [([5, 6, 7], [8, 9]), ([5, 6], [7, 10, 11, 12]), ([5, 6, 7], [13])]
    with packed_attention(model):
        packed = packed_loss(model, batch)
        packed.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    padded = answer_loss(model, *pad_batch(batch))
    padded.backward()
    torch.testing.assert_close(packed, padded)
    wanted = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == len(wanted) > 0
    for found, parameter in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, parameter, rtol=1e-4, atol=1e-6)


def test_an_example_is_prompt_completion_and_end() -> None:
    prompt, answer = make_example({"prompt": "Ann says Bob-knave", "completion": "try Ann=knight"}, TOKENIZER, "row")
    assert prompt == TOKENIZER.encode("Ann says Bob-knave")
    assert answer == [*TOKENIZER.encode("try Ann=knight"), TOKENIZER.eos_token_id]
    chat = {"prompt": "Ann says Bob-knave", "completion": [{"role": "assistant", "content": "try Ann=knight"}]}
    assert make_example(chat, TOKENIZER, "row") == (prompt, answer)


def test_messages_are_put_through_the_chat_template() -> None:
    tokenizer = load_tokenizer(knights_tiny_path())
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }} . {% endfor %}{% if add_generation_prompt %}?{% endif %}"
    )
    messages = [{"role": "user", "content": "Ann says"}, {"role": "assistant", "content": "yes"}]
    prompt, answer = make_example({"messages": messages}, tokenizer, "row")
    assert tokenizer.decode(prompt) == "Ann says . ?"
    assert tokenizer.decode(answer) == "yes <eos>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Ann", "text": "x"}, r"row 7 has no column 'completion'; it has: prompt, text; .*sft.columns"),
        ({"completion": "x"}, "has no column 'prompt'"),
        ({"prompt": "Ann", "completion": " "}, "completion ' ': it must be text and not empty"),
        ({"prompt": "Ann", "completion": []}, "must be text and not empty"),
        ({"messages": [{"role": "user", "content": "x"}]}, "ends with an assistant message"),
        ({"messages": "x"}, "must be a list"),
    ],
)
def test_rows_that_are_no_examples_are_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        make_example(row, TOKENIZER, "row 7")


def test_a_tasks_task_examples_are_right_and_of_training_puzzles() -> None:
    task = KnightsTask(seed=2)
    rows = list(task_examples(task, 20))
    heldout = {row["prompt"] for row in task.heldout(200)}
    assert not heldout & {row["prompt"] for row in rows}
    scores = [verify([row["prompt"]], [row["completion"]], [row["answer"]])[0] for row in rows]
    assert scores == [1.0] * 20


def test_demonstrations_with_a_tool_are_what_a_run_would_feed() -> None:
    """The tokens of a demonstration are those of turns with their calls, and of results as the run's dialect feeds."""
    tokenizer = load_tokenizer(tools_tiny_path())
    dialect = Dialect(tokenizer, describe(Book), is_chat=False)
    num_whole = 0
    for row in task_examples(ToolsTask(seed=3), 40, tokenizer.eos_token):
        prompt, answer = make_example(row, tokenizer, "row")
        *turns, last = [turn.split("</tool_response>")[-1] for turn in row["completion"].split(tokenizer.eos_token)]
        sample = Sample(0, Prompt("p", tuple(prompt), ""), 0, 0, 0, 0, 999)
        name = row["prompt"].split()[0]
        for turn in turns:
            written = [*tokenizer(turn)["input_ids"], tokenizer.eos_token_id]
            sample.segments.append(Segment(0, written, [0.0] * len(written)))
            (call,) = dialect.calls(sample)
            assert call.arguments == {"who": name}
            name = row["book"][name]
            fed = dialect.fed([call], [name])
            sample.segments.append(Segment(0, fed, [0.0] * len(fed), 0.0, True))
        assert last.split() == ["answer", name, "done"]
        assert [*sample.tokens, *tokenizer(last)["input_ids"], tokenizer.eos_token_id] == answer
        num_whole += len(turns) == row["hops"]
    assert 8 < num_whole < 32  # the teacher often gives up


def write_config(folder: Path, **sft: Any) -> SortedConfig:
    return SortedConfig(run={"dir": str(folder), "samples": 32}, sft={"batch_tokens": 512, "lr": 3e-3, **sft})


def test_tuning_on_a_file_learns_it_and_saves_a_model_that_loads(tmp_path: Path) -> None:
    task = KnightsTask(seed=5)
    rows = [{"q": row["prompt"], "a": row["completion"]} for row in task_examples(task, 40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "q", "completion": "a"}
    config = write_config(tmp_path, path=str(tmp_path / "rows.jsonl"), columns=columns, epochs=4, warmup_steps=2)
    batch = read_examples(config, TOKENIZER)
    assert len(batch) == 40
    before = answer_loss(load_model(knights_tiny_path())[0], *pad_batch(batch)).item()
    losses: list[float] = []
    totals: list[int] = []
    result = run_sft(config, tmp_path / "out", lambda step, loss: losses.append(loss), totals.append)
    assert totals == [result.steps] == [len(losses)]
    # Four epochs: every answer token was trained four times.
    assert result.num_tokens == 4 * sum(len(answer) for _, answer in batch)
    model, _ = load_model(tmp_path / "out")
    assert answer_loss(model, *pad_batch(batch)).item() < 0.9 * before


def test_steps_and_examples_are_limits(tmp_path: Path) -> None:
    config = write_config(tmp_path, examples=12, epochs=50, steps=2)
    assert len(read_examples(config, TOKENIZER)) == 12
    assert run_sft(config, tmp_path / "out").steps == 2


def test_an_example_has_to_fit_the_model() -> None:
    check_fit([([1] * 24, [2] * 1000)], knights_tiny_path())
    with pytest.raises(DataError, match=r"longest example has 1025 tokens, more than the 1024 positions"):
        check_fit([([1], [2]), ([1] * 25, [2] * 1000)], knights_tiny_path())


def test_an_example_has_to_fit_a_batch(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"knights/\d+ has \d+ tokens, more than sft.batch_tokens 20"):
        read_examples(write_config(tmp_path, batch_tokens=20), TOKENIZER)
