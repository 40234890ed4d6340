"""How a model writes tool calls and reads their results, by its tokenizer and chat template.

`environment/loop.py` asks a `Dialect` for the calls of a finished turn and for the tokens to feed after it. Where the
tokenizer has a `response_template`, transformers parses the turn; otherwise calls are the common
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Results follow as the chat template writes `tool` messages;
after a text prompt they follow as `<tool_response> ... </tool_response>`.

Guarantees: whatever the model wrote, `calls` returns; a malformed call is a `ToolCall` with an error. A name that is no
tool's is printable text. A special token that occurs in such a name or in a tool's text is broken up, so that neither
can end a turn or write in another role.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from sortedrl.environment.base import EnvironmentSpec, ToolCall
from sortedrl.errors import ConfigError, first_line
from sortedrl.records import Sample
from sortedrl.reward.answer_text import TextDecoder
from sortedrl.reward.worker import printable

MAX_CALLS = 16  # in one turn; further ones are answered with an error
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_MAX_SHOWN = 80


class Dialect:
    """`is_chat`: whether prompts are messages. `tokenizer` is a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any, spec: EnvironmentSpec, *, is_chat: bool) -> None:
        self._tokenizer = tokenizer
        self._decoder = TextDecoder(tokenizer)
        self._spec = spec
        self._is_chat = is_chat
        self._stops = {token for token in (tokenizer.eos_token, tokenizer.pad_token) if token}
        specials = {*tokenizer.all_special_tokens, *getattr(tokenizer, "added_tokens_encoder", {})}
        self._specials = sorted((text for text in specials if text.strip() and len(text) > 1), key=len, reverse=True)
        if is_chat:
            self._check_template()

    # ---- calls -------------------------------------------------------------------------------------------------------

    def calls(self, sample: Sample) -> list[ToolCall]:
        """The calls of the sample's last turn; none if the answer is complete."""
        turns = turns_of(sample)
        return self._calls(turns[-1], sample.prompt.tokens) if turns else []

    def history(self, sample: Sample) -> list[list[ToolCall]]:
        """The calls of the earlier turns, whose results the sample holds."""
        return [self._calls(turn, sample.prompt.tokens) for turn in turns_of(sample)[:-1]]

    def _calls(self, tokens: Sequence[int], prompt: Sequence[int]) -> list[ToolCall]:
        found = self._parsed(tokens, prompt)
        if found is None:
            found = [self._read(match[1], match[2]) for match in _CALL.finditer(self._text(tokens))]
        allowed = [self._checked(call) for call in found[:MAX_CALLS]]
        too_many = ToolCall(name="", error=f"too many calls in one turn: make at most {MAX_CALLS}")
        return [*allowed, *([too_many] if len(found) > MAX_CALLS else [])]

    def _parsed(self, tokens: Sequence[int], prompt: Sequence[int]) -> list[ToolCall] | None:
        """The calls as transformers parses them; None if this tokenizer has no template, or it does not match."""
        if getattr(self._tokenizer, "response_template", None) is None:
            return None
        try:
            parsed = self._tokenizer.parse_response(list(tokens), prefix=list(prompt), tools=list(self._spec.tools))
            calls = parsed.get("tool_calls") or []
            return [_as_call(call["function"]) for call in calls] or None
        except Exception:  # the model wrote it; the common format is tried next
            return None

    def _read(self, body: str, closing: str) -> ToolCall:
        if closing != "</tool_call>":
            return ToolCall(name="", error="a tool call was not closed: end it with </tool_call>")
        try:
            value = json.loads(body)
        except (ValueError, RecursionError) as error:
            return ToolCall(name="", error=f"a tool call is not valid JSON ({first_line(error)[:_MAX_SHOWN]})")
        return _as_call(value)

    def _checked(self, call: ToolCall) -> ToolCall:
        """The call; if its name is that of no tool, with an error, and a name that can be stored and printed."""
        if call.name in self._spec.tool_names:
            return call
        shown, known = printable(call.name)[:_MAX_SHOWN], ", ".join(self._spec.tool_names)
        return ToolCall(name=shown, error=call.error or f"there is no such tool: the tools are {known}")

    def _text(self, tokens: Sequence[int]) -> str:
        """The text with special tokens, because `<tool_call>` may be one; without those that end a turn."""
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        for stop in self._stops:
            text = text.replace(stop, "")
        return text

    # ---- results -----------------------------------------------------------------------------------------------------

    def fed(self, calls: Sequence[ToolCall], texts: Sequence[str]) -> list[int]:
        """The tokens that tell the results of a turn's calls, up to where the model goes on."""
        safe = [self.harmless(text) for text in texts]
        if not self._is_chat:
            told = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in safe)
            return list(self._tokenizer(f"\n{told}\n", add_special_tokens=False)["input_ids"])
        known = self._spec.tool_names
        names = [call.name if call.name in known else self.harmless(call.name) or known[0] for call in calls]
        messages = [{"role": "tool", "name": name, "content": text} for name, text in zip(names, safe, strict=True)]
        return self._suffix(messages)

    def harmless(self, text: str) -> str:
        """The text with special tokens broken up."""
        for special in self._specials:
            if special in text:
                text = text.replace(special, f"{special[0]} {special[1:]}")
        return text

    def _suffix(self, messages: list[dict[str, str]]) -> list[int]:
        """What the template adds for tool messages, found with a short made-up conversation, as TRL does."""
        call = {"type": "function", "function": {"name": messages[0]["name"], "arguments": {}}}
        before = [{"role": "user", "content": "."}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        prefix, eos = self._rendered(before, is_open=False), self._tokenizer.eos_token_id
        ends = [place for place, token in enumerate(prefix) if token == eos]
        if ends:  # some templates write a line end after the token that ends the turn
            prefix = prefix[: ends[-1] + 1]
        whole = self._rendered([*before, *messages], is_open=True)
        if whole[: len(prefix)] != prefix:
            raise ValueError("the chat template renders earlier messages differently once a tool message follows")
        return whole[len(prefix) :]

    def _rendered(self, messages: list[dict[str, Any]], *, is_open: bool) -> list[int]:
        rendered = self._tokenizer.apply_chat_template(messages, add_generation_prompt=is_open, return_dict=True)
        return list(rendered["input_ids"])

    def _check_template(self) -> None:
        if self._tokenizer.chat_template is None:
            return  # rows of messages are refused with their own message
        try:
            message = {"role": "tool", "name": self._spec.tool_names[0], "content": "found it"}
            self._suffix([message])
            asked = {"role": "user", "content": "."}
            told = "found it" in self._tokenizer.apply_chat_template([asked, message], tokenize=False)
        except Exception as error:  # templates raise errors of many kinds
            raise ConfigError(
                f"the tokenizer's chat template cannot tell a tool's result ({first_line(error)[:160]}): use a model "
                "whose template has the role tool, or give the prompts as text"
            ) from error
        if not told:
            raise ConfigError(
                "the tokenizer's chat template leaves out tool messages: use a model whose template has the role tool, "
                "or give the prompts as text"
            )

    # ---- for readers -------------------------------------------------------------------------------------------------

    def conversation(self, tokens: Sequence[int], masked: Sequence[range]) -> list[dict[str, str]]:
        """The answer as messages: what the model wrote, and what tools returned. Any thread may call this."""
        roles: list[str] = []
        parts: list[list[int]] = []
        end = 0
        for fed in (*masked, range(len(tokens), len(tokens))):
            for role, part in (("assistant", tokens[end : fed.start]), ("tool", tokens[fed.start : fed.stop])):
                if len(part):
                    roles.append(role)
                    parts.append(list(part))
            end = fed.stop
        texts = self._decoder.texts(parts)
        return [{"role": role, "content": text.strip()} for role, text in zip(roles, texts, strict=True)]


def turns_of(sample: Sample) -> list[list[int]]:
    """The tokens that the model wrote, turn by turn."""
    turns: list[list[int]] = []
    is_new = True
    for segment in sample.segments:
        if segment.is_masked:
            is_new = True
        elif is_new:
            turns.append(list(segment.tokens))
            is_new = False
        else:
            turns[-1] += segment.tokens
    return turns


def _as_call(value: Any) -> ToolCall:
    """A call from parsed JSON, or one that says what is wrong with it."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall(name="", error='a tool call must be an object with "name" and "arguments"')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name=value["name"], error='"arguments" of a tool call must be an object')
    return ToolCall(name=value["name"], arguments=arguments)
