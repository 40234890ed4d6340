"""How calls are read from what a model wrote, and how results are written for it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sortedrl.environment.base import ToolCall, describe
from sortedrl.environment.dialect import MAX_CALLS, Dialect
from sortedrl.records import Prompt, Sample, Segment
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.tasks.tools import Book
from sortedrl.tasks.tools_model import make_tokenizer, tools_tiny_path

SPEC = describe(Book)


class Letters:
    """A tokenizer with one token per character, and `<end>` as a special token."""

    chat_template = None
    eos_token, pad_token, eos_token_id = "<end>", None, 0
    all_special_tokens = ("<end>",)

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join("<end>" if token == 0 else chr(token) for token in tokens)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [ord(char) for char in text]}


def sample_of(*turns: str | tuple[str]) -> Sample:
    """Texts are what the model wrote; tuples are what it was fed."""
    sample = Sample(
        id=0, prompt=Prompt(id="p", tokens=(63,), content=""), index=0, epoch=0, cohort=0, seed=0, budget=9999
    )
    for turn in turns:
        text, is_masked = (turn, False) if isinstance(turn, str) else (turn[0], True)
        tokens = [ord(char) for char in text] + ([] if is_masked else [0])
        sample.segments.append(Segment(0, tokens, [0.0] * len(tokens), 0.0, is_masked))
    return sample


def call(**value: Any) -> str:
    return f"<tool_call>{json.dumps(value)}</tool_call>"


ASK = call(name="lookup", arguments={"who": "Ann"})


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>{not json}</tool_call>", "a tool call is not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "a tool call is not valid JSON"),
        ('<tool_call>{"name": "lookup"', "a tool call was not closed"),
        ("<tool_call>[1, 2]</tool_call>", 'must be an object with "name" and "arguments"'),
        (call(name="steal", arguments={}), "there is no such tool: the tools are lookup"),
        (call(name="lookup", arguments=[1]), '"arguments" of a tool call must be an object'),
        (call(name="lookup", arguments="{"), '"arguments" of a tool call must be an object'),
    ],
)
def test_a_malformed_call_says_what_is_wrong(text: str, error: str) -> None:
    (found,) = Dialect(Letters(), SPEC, is_chat=False).calls(sample_of(f"well {text}"))
    assert error in found.error


def test_calls_are_those_of_the_last_turn_and_history_has_the_others() -> None:
    dialect = Dialect(Letters(), SPEC, is_chat=False)
    bob = call(name="lookup", arguments='{"who": "Bob"}')
    sample = sample_of(ASK, ("<tool_response>Bob</tool_response>",), f"so {bob} and {ASK}")
    ann, other = ToolCall(name="lookup", arguments={"who": "Ann"}), ToolCall(name="lookup", arguments={"who": "Bob"})
    assert dialect.calls(sample) == [other, ann]
    assert dialect.history(sample) == [[ann]]
    assert dialect.calls(sample_of("no call")) == []
    assert sample.num_turns == 1


def test_too_many_calls_are_answered_with_an_error() -> None:
    found = Dialect(Letters(), SPEC, is_chat=False).calls(sample_of(ASK * (MAX_CALLS + 5)))
    assert [bool(made.error) for made in found] == [False] * MAX_CALLS + [True]


@pytest.mark.parametrize("arguments", [{}, "{"])
def test_a_name_that_cannot_be_encoded_is_escaped(arguments: object) -> None:
    (found,) = Dialect(Letters(), SPEC, is_chat=False).calls(sample_of(call(name="\ud800\x1b", arguments=arguments)))
    assert found.name == r"\ud800\x1b"
    assert found.error


def test_a_name_that_is_no_tool_is_broken_up_for_the_chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dialect, "_check_template", lambda dialect: None)
    monkeypatch.setattr(Dialect, "_suffix", lambda dialect, messages: [message["name"] for message in messages])
    names = [ToolCall(name=name) for name in ("lookup", "x<end>", "")]
    assert Dialect(Letters(), SPEC, is_chat=True).fed(names, ["", "", ""]) == ["lookup", "x< end>", "lookup"]


def test_a_special_token_in_a_result_is_broken_up() -> None:
    dialect = Dialect(Letters(), SPEC, is_chat=False)
    fed = dialect.fed([ToolCall(name="lookup")], ["stop<end> here"])
    assert Letters().decode(fed) == "\n<tool_response>\nstop< end> here\n</tool_response>\n"


def test_the_embedded_tokenizer_reads_and_writes_chats() -> None:
    tokenizer = make_tokenizer()
    dialect = Dialect(tokenizer, SPEC, is_chat=True)
    prompt = tuple(tokenizer.encode("Ann two ?"))
    written = tokenizer.encode('two <tool_call> {"name": "lookup", "arguments": {"who": "Ann"}} </tool_call> <eos>')
    sample = sample_of()
    sample.prompt = Prompt(id="p", tokens=prompt, content=[])
    sample.segments = [Segment(0, written, [0.0] * len(written))]
    (found,) = dialect.calls(sample)
    assert (found.name, found.arguments, found.error) == ("lookup", {"who": "Ann"}, "")
    fed = dialect.fed([found], ["Bob"])
    assert tokenizer.decode(fed) == "<tool_response> Bob </tool_response>"
    told = dialect.conversation([*written, *fed], [range(len(written), len(written) + len(fed))])
    assert [message["role"] for message in told] == ["assistant", "tool"]


def test_the_shipped_tokenizer_is_the_one_that_the_code_makes() -> None:
    from transformers import AutoTokenizer

    shipped, made = AutoTokenizer.from_pretrained(tools_tiny_path()), make_tokenizer()
    assert shipped.get_vocab() == made.get_vocab()
    assert (shipped.chat_template, shipped.response_template) == (made.chat_template, made.response_template)


def test_a_chat_template_without_tools_is_refused() -> None:
    from transformers import AutoTokenizer

    from sortedrl.errors import ConfigError

    tokenizer = AutoTokenizer.from_pretrained(knights_tiny_path())
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="leaves out tool messages"):
        Dialect(tokenizer, SPEC, is_chat=True)
