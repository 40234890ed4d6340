"""Turns prompts into samples, one cohort at a time. The controller calls `load` when it needs data.

Guarantees: sample ids count up from 0 without gaps; a sample's seed depends on the run's seed, epoch, prompt and
sibling index only; no more than `total_samples` are made; `state_dict` holds the position in the data, so that a
resumed run continues with the next prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sortedrl.records import Prompt, Sample, sample_seed


class Stream(Protocol):
    """Prompts one after the other, each with its epoch; a `PromptStream` of a task, or another trainer's rows."""

    def take(self, num_prompts: int) -> list[tuple[int, Prompt]]: ...

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any) -> None: ...


@dataclass(slots=True, kw_only=True)
class SampleLoader:
    stream: Stream
    seed: int  # of the run
    total_samples: int  # of the run, siblings counted
    siblings: int  # samples per prompt
    max_new_tokens: int  # token limit of each answer
    num_loaded: int = 0

    def load(self, cohort: int, count: int) -> list[Sample]:
        """Return the next `count` samples (fewer at the end of the run) as members of `cohort`."""
        count = max(min(count, self.total_samples - self.num_loaded), 0)  # a resumed run may have a smaller total
        samples = []
        for epoch, prompt in self.stream.take(count // self.siblings):
            for index in range(self.siblings):
                samples.append(
                    Sample(
                        id=self.num_loaded + len(samples),
                        prompt=prompt,
                        index=index,
                        epoch=epoch,
                        cohort=cohort,
                        seed=sample_seed(self.seed, epoch, prompt.id, index),
                        budget=self.max_new_tokens,
                    )
                )
        self.num_loaded += len(samples)
        return samples

    def state_dict(self) -> dict[str, Any]:
        return {"num_loaded": self.num_loaded, "stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_loaded = state["num_loaded"]
        self.stream.load_state_dict(state["stream"])
