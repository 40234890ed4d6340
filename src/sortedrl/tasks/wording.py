"""How a prompt is put to a model: text around it, a system message, chat or plain.

Tasks hold one `Wording` and pass their rows through it. A prompt that is a chat already is left as it is; so is a text
that says itself how to answer, as far as the task's own instruction goes.
"""

from __future__ import annotations

from dataclasses import dataclass

from sortedrl.tasks.base import Row, RowSequence

PLACE = "{prompt}"
ANSWER_MARKS = ("\\boxed", "<answer>")  # a prompt with one of these needs no further instruction


@dataclass(slots=True, kw_only=True, frozen=True)
class Wording:
    """`template` has `{prompt}` in it; empty, the prompt stays and `instruction` follows it."""

    template: str = ""
    instruction: str = ""
    system: str = ""
    is_chat: bool = False

    def apply(self, row: Row) -> Row:
        prompt = row.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            return row  # a chat, or what `check_row` refuses
        text = self._worded(prompt)
        if not self.is_chat and not self.system:
            return {**row, "prompt": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {**row, "prompt": [*system, {"role": "user", "content": text}]}

    def _worded(self, prompt: str) -> str:
        if self.template:
            return self.template.replace(PLACE, prompt)
        if not self.instruction or any(mark in prompt for mark in ANSWER_MARKS):
            return prompt
        return f"{prompt}\n{self.instruction}"


@dataclass(slots=True, kw_only=True, frozen=True)
class WordedRows:
    """Rows of a dataset, worded."""

    rows: RowSequence
    wording: Wording

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Row:
        return self.wording.apply(dict(self.rows[index]))
