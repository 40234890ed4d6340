"""Answers as TRL's reward functions get them: text, or for chats a list of one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trl.chat_template_utils import parse_response
from trl.data_utils import is_conversational

from sortedrl.records import Prompt


def completions_of(prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]], tokenizer: Any) -> list[Any]:
    """Decode answers, in the form that belongs to their prompts."""
    is_chat = is_conversational({"prompt": prompts[0].content})
    if not is_chat:
        return tokenizer.batch_decode([list(ids) for ids in tokens], skip_special_tokens=True)
    has_form = getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None)
    if has_form:
        return [
            [parse_response(tokenizer, list(ids), prefix=list(prompt.tokens), tools=[])]
            for prompt, ids in zip(prompts, tokens, strict=True)
        ]
    texts = tokenizer.batch_decode([list(ids) for ids in tokens], skip_special_tokens=True)
    return [[{"role": "assistant", "content": text}] for text in texts]
