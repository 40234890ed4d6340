"""The text that reward functions get is that of the tokenizer's own `decode`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sortedrl.reward.answer_text import TextDecoder

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
    answers = [[], [1, 5, 2, 6, 3, 0], [7, 8, 7], [0, 0, 4, 3], [1, 6, 7] * 2000]  # few tokens, and many
    expected = [given.decode(tokens, skip_special_tokens=True) for tokens in answers]
    assert TextDecoder(given).texts(answers[:4]) == expected[:4]
    assert TextDecoder(given).texts(answers) == expected


def test_a_tokenizer_that_cannot_be_copied_decodes_itself() -> None:
    class Shouting:
        def decode_chain(self, tokens: list[str]) -> list[str]:
            return [token.upper() for token in tokens]

    given = tokenizer()
    given.backend_tokenizer.decoder = decoders.Decoder.custom(Shouting())
    assert TextDecoder(given).texts([[1, 2], [2]]) == ["ANNBOB", "BOB"]
    assert TextDecoder(given).texts([[1, 2] * 3000]) == ["ANNBOB" * 3000]


def test_encoding_may_change_settings_while_another_thread_decodes() -> None:
    given = tokenizer()
    decoder, answers = TextDecoder(given), [[1, 5, 2] * 2000] * 20
    expected, texts, errors = [given.decode(tokens) for tokens in answers], [""], []
    done = threading.Event()

    def decode() -> None:
        for _ in range(5):
            texts[:] = decoder.texts(answers)
        done.set()

    thread = threading.Thread(target=decode)
    thread.start()
    while not done.is_set():
        try:
            given.backend_tokenizer.enable_truncation(max_length=8)
            given.backend_tokenizer.no_truncation()
        except Exception as error:
            errors.append(error)
    thread.join()
    assert (texts, errors) == (expected, [])


def test_a_class_of_its_own_decodes_itself() -> None:
    loud = Loud(tokenizer_object=tokenizer().backend_tokenizer, eos_token="<eos>")
    assert (
        TextDecoder(loud).texts([[1, 5, 2, 0]]) == [loud.decode([1, 5, 2], skip_special_tokens=True)] == ["ANN ISBOB"]
    )


def test_words_that_are_tidied_go_through_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    decode = PreTrainedTokenizerFast._decode
    monkeypatch.setattr(PreTrainedTokenizerFast, "_decode", lambda *a, **o: called.append("") or decode(*a, **o))
    TextDecoder(tokenizer()).texts([[1, 2]])
    assert called == []
    TextDecoder(tokenizer("words", clean_up_tokenization_spaces=True)).texts([[1, 2]])
    assert called == [""]
