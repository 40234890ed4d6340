"""From the tokens of an answer to what reward functions read: text, or the messages of a conversation.

`scorer.py` submits answers as tokens. A scoring thread of `pool.py` reads them just before it calls a function, so the
training loop does not wait for it. transformers' `decode` first looks at every token in Python, which takes as long as
decoding, and it keeps Python's lock. Where it only calls the tokenizers library, a `TextDecoder` calls that itself, and
for many tokens through `decode_batch`, which releases the lock: then the training loop runs at the same time.

Guarantees: the text is that of `tokenizer.decode(tokens, skip_special_tokens=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Text = str | list[dict[str, str]]
"""A text, or messages."""

# A thread that released Python's lock may get it back only after 5 ms, so few tokens are decoded without releasing it.
_MANY_TOKENS = 4096


class TextDecoder:
    """Decodes without special tokens. Threads may share it with others that use the tokenizer to encode."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._library = _library_copy(tokenizer)

    def texts(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """The text of each answer."""
        if self._library is None:
            return [self._tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]
        if sum(map(len, answers)) < _MANY_TOKENS:
            return [self._library.decode(tokens, skip_special_tokens=True) for tokens in answers]
        return self._library.decode_batch(answers, skip_special_tokens=True)


@dataclass(slots=True, kw_only=True, frozen=True, eq=False)
class UnreadAnswer:
    """A complete answer; `read` makes what a reward function gets of several of them, in any thread."""

    tokens: Sequence[int]
    masked: Sequence[range] = ()
    read: Callable[[Sequence[UnreadAnswer]], Sequence[Text]]


def _library_copy(tokenizer: Any) -> Any:
    """A copy of the tokenizers library's object, if transformers would only call that; None otherwise.

    The library refuses to change settings of an object that another thread uses, and transformers changes them before
    it encodes. So decoding in other threads has an object of its own.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not _only_calls_the_library(tokenizer):
        return None
    try:
        return type(backend).from_str(backend.to_str())
    except Exception:  # the library raises Exception itself; a decoder written in Python cannot be copied
        return None


def _only_calls_the_library(tokenizer: Any) -> bool:
    """Whether the tokenizer decodes as transformers' own class does, and does not change the text afterwards."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    names = ("decode", "_decode")
    if any(getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name) for name in names):
        return False
    # transformers tidies spaces if a tokenizer asks for it, except those of byte-pair encodings, where that does harm.
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    is_forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True)
    return not tokenizer.clean_up_tokenization_spaces or (is_bpe and not is_forced)
