"""A reward model as a reward function: a sequence classifier with one label scores prompt and answer.

`task.reward` and `SortedTrainer(reward_funcs=...)` name one by its folder or its id on the hub, as TRL does. `parts.py`
loads it before training starts. It is called in a thread of this process (`reward/caller.py`), on the GPU if there is
one, and reads texts as TRL does: the prompt followed by the answer, or the chat template over all messages.

Guarantees: no code from the folder is run and pickled weights are refused; a model without a trained head for one
number is refused. Neighbours in a batch change a reward by rounding errors only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sortedrl.errors import ModelError, first_line
from sortedrl.external.hub import Commits, fetch, shown, split_revision
from sortedrl.weights import no_progress_bars

_BATCH_TOKENS = 16384  # of one forward pass, padding included


def is_model_name(name: str) -> bool:
    """Whether an entry of `task.reward` names a model: a folder, or an id with its owner."""
    return Path(name).is_dir() or ("/" in name and ":" not in name)


@dataclass(slots=True, kw_only=True, eq=False)
class RewardModel:
    """A reward function with TRL's signature. It must be loaded before it is called."""

    name: str
    model: Any = field(default=None, repr=False)
    tokenizer: Any = field(default=None, repr=False)

    def load(self, commits: Commits | None = None) -> None:
        """Fetch and load the model, unless that has been done."""
        if self.model is not None:
            return
        from sortedrl.learner.model import check_model_folder, load_tokenizer  # at need: it loads transformers

        name, revision = split_revision(self.name)
        key = f"reward model {self.name}"
        found = fetch(name, key=key, revision=revision, commits=commits, label="reward model")
        folder = check_model_folder(found)
        self.tokenizer = load_tokenizer(folder)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.tokenizer.pad_token_id is None:
            raise ModelError(
                f"the tokenizer of the reward model {shown(folder)} has no pad token and no end token: add one"
            )
        self.model = _load_classifier(folder)
        self.model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        assert self.model is not None, "a reward model is called before it is loaded"
        texts = [self._text(prompt, answer) for prompt, answer in zip(prompts, completions, strict=True)]
        tokens = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        rewards = [0.0] * len(texts)
        for numbers in _batches([len(row) for row in tokens]):
            for number, reward in zip(numbers, self._score([tokens[number] for number in numbers]), strict=True):
                rewards[number] = reward
        return rewards

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        return self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)

    def _score(self, tokens: list[list[int]]) -> list[float]:
        import torch

        batch = self.tokenizer.pad({"input_ids": tokens}, padding_side="right", return_tensors="pt")
        with torch.inference_mode():
            return self.model(**batch.to(self.model.device)).logits[:, 0].float().tolist()


def load_reward_models(functions: Sequence[Callable[..., Any]], commits: Commits) -> None:
    """Load those of the reward functions that are models."""
    for function in functions:
        if isinstance(function, RewardModel):
            function.load(commits)


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of rows in batches of similar length, each of at most `_BATCH_TOKENS` tokens with padding."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        if batch and (len(batch) + 1) * lengths[number] > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _load_classifier(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification

    has_gpu = torch.cuda.is_available()
    try:
        with no_progress_bars():
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                folder,
                num_labels=1,
                dtype="auto" if has_gpu else torch.float32,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"the reward model {shown(folder)} cannot be loaded: {first_line(error)}") from error
    model, info = loaded
    absent = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if absent:
        raise ModelError(
            f"{shown(folder)} is no reward model, because {absent[0]} is missing or has another shape: give a "
            "sequence classifier with one label"
        )
    return model.to("cuda" if has_gpu else "cpu").requires_grad_(False).eval()
