"""tools-tiny, the embedded model that calls a tool: its word-level tokenizer, its tiny Llama and its cold start.

The checkpoint is package data in `tools_tiny/`. `sortedrl sft OUT --model tools-tiny` calls `rebuild`, which makes the
same checkpoint again with its defaults. Calls are the common JSON form: parts of it are words of the vocabulary, such
as `{"who":` and `"Ann"}}`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from sortedrl.tasks.knights import NAMES
from sortedrl.tasks.tiny import EOS, PAD, UNK, make_word_model, make_word_tokenizer
from sortedrl.tasks.tools import NUMBERS, ToolsRows, teach

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from sortedrl.learner.sft import OnStep, SftResult

STEPS = 1500  # the shipped checkpoint was made with these and seed 0
_PATIENT_EXAMPLES = 12_000  # from a teacher that never gives up; after them come those of one that often does
_GIVE_UP = 0.6
_MAX_POSITIONS = 1024
_WORDS = ("?", "answer", "done", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_CALL_WORDS = ('{"name":', '"lookup",', '"arguments":', '{"who":')


# Messages in the words of the vocabulary, so that rows may also be chats, here and in other trainers.
_CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %} <tool_response> {{ m.content }} </tool_response>"
    "{% elif m.role == 'assistant' %} {{ m.content }}{% for call in m.tool_calls or [] %} <tool_call> "
    "{{ call.function | tojson }} </tool_call>{% endfor %} <eos>{% else %} {{ m.content }}{% endif %}{% endfor %}"
)
_RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"(\?|</tool_response>)",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}


def tools_tiny_path() -> Path:
    """The folder of the shipped checkpoint."""
    return Path(str(resources.files("sortedrl.tasks") / "tools_tiny"))


def vocabulary() -> list[str]:
    """Every word of the task. A name that ends a call (`"Ann"}}`) is one word."""
    ends = [f'"{name}"}}}}' for name in NAMES]
    return [PAD, EOS, UNK, *_WORDS, *_CALL_WORDS, *NUMBERS, *NAMES, *ends]


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = make_word_tokenizer(vocabulary(), max_positions=_MAX_POSITIONS)
    tokenizer.chat_template = _CHAT_TEMPLATE
    tokenizer.response_template = _RESPONSE_TEMPLATE
    return tokenizer


def demonstrations(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield rows and their solutions as tokens: first from a patient teacher, then from one that often gives up."""
    rows, rng, number = ToolsRows(seed=f"sft/{seed}"), random.Random(f"teacher/{seed}"), 0
    while True:
        row = rows.row(number)
        give_up = 0.0 if number < _PATIENT_EXAMPLES else _GIVE_UP
        turns, name, words = teach(row, rng, give_up=give_up), row["prompt"].split()[0], []
        for turn in turns[:-1]:
            name = row["book"][name]
            words.append(f"{turn} {EOS} <tool_response> {name} </tool_response>")
        yield tokenizer.encode(row["prompt"]), tokenizer.encode(f"{' '.join([*words, turns[-1]])} {EOS}")
        number += 1


def rebuild(out_dir: Path | str, *, seed: int = 0, steps: int = STEPS, on_step: OnStep | None = None) -> SftResult:
    """Train tools-tiny from scratch. The defaults give the shipped checkpoint."""
    from sortedrl.learner.sft import cold_start

    words, tokenizer = vocabulary(), make_tokenizer()
    return cold_start(
        out_dir,
        model=make_word_model(seed, words, max_positions=_MAX_POSITIONS),
        tokenizer=tokenizer,
        examples=demonstrations(tokenizer, seed=seed),
        steps=steps,
        seed=seed,
        on_step=on_step,
    )
