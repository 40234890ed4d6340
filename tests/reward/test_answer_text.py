"""The text that reward functions get is that of the tokenizer's own `decode`."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sortedrl.reward.answer_text import decoder_of

WORDS = ["<eos>", "Ann", "Bob", ".", " ,", "Ġis", "Ġ,", "Ã", "©"]


def tokenizer(kind: str = "bpe", **options: Any) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    if kind == "bpe":
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        backend.decoder = decoders.ByteLevel()
    else:
        backend = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<eos>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", **options)


class Loud(PreTrainedTokenizerFast):
    """A class that decodes in its own way."""

    def _decode(self, *args: Any, **options: Any) -> str:
        return super()._decode(*args, **options).upper()


@pytest.mark.parametrize("kind", ["bpe", "words"])
@pytest.mark.parametrize("tidies", [False, True])
def test_decoders_agree(kind: str, tidies: bool) -> None:
    given = tokenizer(kind, clean_up_tokenization_spaces=tidies)
    for tokens in ([], [1, 5, 2, 6, 3, 0], [7, 8, 7], [0, 0, 4, 3]):
        assert decoder_of(given)(tokens) == given.decode(tokens, skip_special_tokens=True)


def test_a_class_of_its_own_decodes_itself() -> None:
    loud = Loud(tokenizer_object=tokenizer().backend_tokenizer, eos_token="<eos>")
    assert decoder_of(loud)([1, 5, 2, 0]) == loud.decode([1, 5, 2], skip_special_tokens=True) == "ANN ISBOB"


def test_words_that_are_tidied_go_through_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    decode = PreTrainedTokenizerFast._decode
    monkeypatch.setattr(PreTrainedTokenizerFast, "_decode", lambda *a, **o: called.append("") or decode(*a, **o))
    decoder_of(tokenizer())([1, 2])
    assert called == []
    decoder_of(tokenizer("words", clean_up_tokenization_spaces=True))([1, 2])
    assert called == [""]
