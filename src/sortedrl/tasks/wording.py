"""The text around a prompt: template, instruction, system message, chat or plain text.

Tasks hold one `Wording` and apply it to their rows. A prompt that is already a chat stays as it is. The task's
instruction is left out if the prompt itself says how to answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from sortedrl.tasks.base import Row, RowSequence

PLACE = "{prompt}"
_ANSWER_MARKS = ("\\boxed", "<answer>")  # a prompt with one of these needs no further instruction


@dataclass(slots=True, kw_only=True, frozen=True)
class Wording:
    """`template` contains `{prompt}`. Without a template, `instruction` follows the prompt."""

    template: str = ""
    instruction: str = ""
    system: str = ""
    is_chat: bool = False

    def apply(self, row: Row) -> Row:
        prompt = row.get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            return row  # a chat, or a prompt that `check_row` refuses
        text = self._worded(prompt)
        if not self.is_chat and not self.system:
            return {**row, "prompt": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {**row, "prompt": [*system, {"role": "user", "content": text}]}

    def _worded(self, prompt: str) -> str:
        if self.template:
            return self.template.replace(PLACE, prompt)
        if not self.instruction or any(mark in prompt for mark in _ANSWER_MARKS):
            return prompt
        return f"{prompt}\n{self.instruction}"


@dataclass(slots=True, kw_only=True, frozen=True)
class WordedRows:
    """Rows of a dataset with a wording applied."""

    rows: RowSequence
    wording: Wording

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Row:
        return self.wording.apply(dict(self.rows[index]))
