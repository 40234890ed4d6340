"""From the tokens of an answer to its text, for reward functions.

`scorer.py` makes a decoder once and calls it for every complete answer, in the thread of the training loop: at
thousands of GPUs this is what that thread does most of the time. transformers' `decode` first looks at every token in
Python, which takes as long as decoding. Where it then only calls the tokenizers library, the decoder calls that itself.

Guarantees: the text is that of `tokenizer.decode(tokens, skip_special_tokens=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Decoder = Callable[[Sequence[int]], str]


def decoder_of(tokenizer: Any) -> Decoder:
    """A function from tokens to text without special tokens."""
    if getattr(tokenizer, "backend_tokenizer", None) is None or not _only_calls_the_library(tokenizer):
        return partial(tokenizer.decode, skip_special_tokens=True)

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.backend_tokenizer.decode(tokens, skip_special_tokens=True)

    return decode


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
