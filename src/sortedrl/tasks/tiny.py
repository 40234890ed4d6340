"""knights-tiny, the embedded model: its word-level tokenizer, its tiny Llama and its supervised cold start.

The checkpoint is package data in `knights_tiny/`. `sortedrl sft` calls `rebuild`, which makes the same checkpoint again
with its defaults. It loads with AutoTokenizer and AutoModelForCausalLM, and in vLLM, whose CPU kernels need heads of
size 32. torch and transformers are imported inside functions, so that `knights_tiny_path` stays cheap.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from sortedrl.tasks.knights import NAMES, ROLES, KnightsRows, teach

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    from sortedrl.learner.sft import OnStep, SftResult

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
_WORDS = ("says", "both", "either", ".", "?", "try", "yes", "no", "bad", "answer", "done")
_MAX_POSITIONS = 1024
STEPS = 4000  # the shipped checkpoint was made with these, seed 0 and the lessons below
_GIVE_UP = 0.9  # the impatient teacher's probability of giving up after a refuted try


@dataclass(slots=True, kw_only=True, frozen=True)
class Lesson:
    """A part of the cold start: which puzzles are demonstrated, and with which faults."""

    num_examples: int | None  # None: no limit
    people: Mapping[int, float]
    impatient_share: float = 0.0  # share of demonstrations by the teacher that gives up
    overlook: float = 0.0  # probability that a refutation is overlooked


LESSONS = (
    Lesson(num_examples=6_000, people={2: 1, 3: 1}),
    Lesson(num_examples=16_000, people={2: 1, 3: 2, 4: 3, 5: 4}),
    Lesson(num_examples=None, people={2: 3, 3: 3, 4: 2, 5: 2}, impatient_share=0.75, overlook=0.2),
)
"""The model first learns to check from a patient and careful teacher, with small puzzles first, and then bad habits.

Afterwards it is able to persist and to be careful, but seldom does both. Reinforcement learning can then increase the
behaviour that is rewarded. A model that is merely undertrained would make systematic errors, which stay.
"""


def knights_tiny_path() -> Path:
    """The folder of the shipped checkpoint."""
    return Path(str(resources.files("sortedrl.tasks") / "knights_tiny"))


def vocabulary() -> list[str]:
    """Every word of the task. A claim (`Ann-knave`) and a guess (`Ann=knave`) are one word each."""
    claims = [f"{name}-{role}" for name in NAMES for role in ROLES]
    guesses = [f"{name}={role}" for name in NAMES for role in ROLES]
    return [PAD, EOS, UNK, *_WORDS, *NAMES, *claims, *guesses]


def make_tokenizer() -> PreTrainedTokenizerFast:
    return make_word_tokenizer(vocabulary(), max_positions=_MAX_POSITIONS)


def make_word_tokenizer(vocabulary: Sequence[str], *, max_positions: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each word; words are separated by spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token=UNK)
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int) -> LlamaForCausalLM:
    """An untrained model of 163k parameters."""
    return make_word_model(seed, vocabulary(), max_positions=_MAX_POSITIONS)


def make_word_model(seed: int, words: Sequence[str], *, max_positions: int) -> LlamaForCausalLM:
    """An untrained tiny Llama for a vocabulary of words."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    words = list(words)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=words.index(EOS),
        pad_token_id=words.index(PAD),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, eos_token_id=words.index(EOS), pad_token_id=words.index(PAD)
    )
    return model


def demonstrations(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, lessons: Sequence[Lesson] = LESSONS
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield training puzzles and their solution traces as tokens, lesson by lesson."""
    for number, lesson in enumerate(lessons):
        rows = KnightsRows(seed=f"sft/{seed}/{number}", people=lesson.people)
        rng = random.Random(f"teachers/{seed}/{number}")
        for index in count() if lesson.num_examples is None else range(lesson.num_examples):
            puzzle = rows.puzzle(index)
            give_up = _GIVE_UP if rng.random() < lesson.impatient_share else 0.0
            trace = teach(puzzle, rng, give_up=give_up, overlook=lesson.overlook)
            yield tokenizer.encode(puzzle.prompt), tokenizer.encode(f"{trace} {EOS}")


def rebuild(out_dir: Path | str, *, seed: int = 0, steps: int = STEPS, on_step: OnStep | None = None) -> SftResult:
    """Train knights-tiny from scratch. The defaults give the shipped checkpoint."""
    from sortedrl.learner.sft import cold_start

    tokenizer = make_tokenizer()
    return cold_start(
        out_dir,
        model=make_model(seed),
        tokenizer=tokenizer,
        examples=demonstrations(tokenizer, seed=seed),
        steps=steps,
        seed=seed,
        on_step=on_step,
    )
