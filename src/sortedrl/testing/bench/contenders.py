"""The engines that `bench engine` compares in its own process: ours, and two ways of transformers.

A contender's `run` samples the job's prompts once and says how many tokens that made, in what time. Whoever cannot give
all tokens with finite log-probs fails the benchmark: a speed without them would be no speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from sortedrl.config import SortedConfig
from sortedrl.engine.base import Delta, Finished, Request, Sampling
from sortedrl.errors import EngineError
from sortedrl.records import sample_seed
from sortedrl.run.builders.parts import build_engine

_PAGE = 32
_BATCH_TOKENS = 2048
_CHECKED = 8  # answers of which log-probs are looked at


@dataclass(slots=True, kw_only=True)
class Job:
    folder: Path
    model: Any  # float32
    prompts: list[list[int]]
    new_tokens: int
    dtype: torch.dtype  # ours
    peer_dtype: torch.dtype
    threads: int


@dataclass(slots=True, kw_only=True, frozen=True)
class Timing:
    tokens: int
    wall_s: float
    cpu_s: float  # of the whole process


class Contender(Protocol):
    def run(self, seed: int, new_tokens: int) -> Timing: ...

    def close(self) -> None: ...


def timed(sample: Callable[[], list[list[float]]], num_expected: int) -> Timing:
    """Time a call that returns the log-probs of all answers, and check that none is missing."""
    wall, cpu = time.perf_counter(), time.process_time()
    logprobs = [value for answer in sample() for value in answer]
    timing = Timing(tokens=len(logprobs), wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)
    if len(logprobs) != num_expected or not all(map(math.isfinite, logprobs)):
        raise EngineError(f"{len(logprobs)} log-probs for {num_expected} tokens: the engine did not do its work")
    return timing


class Ours:
    def __init__(self, job: Job, dtype: torch.dtype) -> None:
        self._job = job
        self._tokens: list[list[int]] = []
        self._logprobs: list[list[float]] = []
        longest = max(map(len, job.prompts))
        config = SortedConfig(
            task={"max_prompt_tokens": longest},
            engine={
                "slots": len(job.prompts),
                "max_new_tokens": job.new_tokens,
                "dtype": str(dtype).removeprefix("torch."),
            },
            schedule={"strategy": "sorted-partial"},
        )
        self._engine = build_engine(config, job.model, config.knobs)

    def run(self, seed: int, new_tokens: int) -> Timing:
        return timed(lambda: self._sample(seed, new_tokens), len(self._job.prompts) * new_tokens)

    def _sample(self, seed: int, new_tokens: int) -> list[list[float]]:
        sampling = Sampling()
        self._engine.submit(
            Request(
                sample=number,
                attempt=0,
                prompt=prompt,
                budget=new_tokens,
                seed=sample_seed(seed, 0, str(number), 0),
                sampling=sampling,
            )
            for number, prompt in enumerate(self._job.prompts)
        )
        tokens: list[list[int]] = [[] for _ in self._job.prompts]
        logprobs: list[list[float]] = [[] for _ in self._job.prompts]
        num_finished = 0
        while num_finished < len(logprobs):
            for event in self._engine.poll():
                if isinstance(event, Delta):
                    tokens[event.sample] += event.tokens
                    logprobs[event.sample] += event.logprobs
                num_finished += isinstance(event, Finished)
        self._tokens, self._logprobs = tokens, logprobs
        return logprobs

    @torch.inference_mode()
    def gap(self) -> float:
        """Mean difference of the last round's log-probs to those of a plain float32 pass, over a few answers."""
        gaps: list[torch.Tensor] = []
        for prompt, tokens, logprobs in zip(self._job.prompts[:_CHECKED], self._tokens, self._logprobs, strict=False):
            logits_tv = self._job.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            plain_t = logits_tv.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).flatten()
            gaps.append((plain_t - torch.tensor(logprobs)).abs())
        return float(torch.cat(gaps).mean())

    def close(self) -> None:
        self._engine.close()


class LogProbs(LogitsProcessor):
    """Notes the log-prob of every token that `generate` takes; keeping all logits would need gigabytes."""

    def __init__(self) -> None:
        self._before: torch.Tensor | None = None
        self.steps: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.take(input_ids)
        self._before = scores.float().log_softmax(-1)
        return scores

    def take(self, input_ids: torch.Tensor) -> None:
        if self._before is not None:
            self.steps.append(self._before.gather(1, input_ids[:, -1:]).squeeze(1))


class Generate:
    """transformers' `generate` on one left-padded batch."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._model = copy_of(job)
        longest = max(map(len, job.prompts))
        self._ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in job.prompts])
        self._mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in job.prompts])

    def run(self, seed: int, new_tokens: int) -> Timing:
        return timed(lambda: self._sample(seed, new_tokens), len(self._job.prompts) * new_tokens)

    @torch.inference_mode()
    def _sample(self, seed: int, new_tokens: int) -> list[list[float]]:
        torch.manual_seed(seed)
        noted = LogProbs()
        ids = self._model.generate(
            self._ids,
            attention_mask=self._mask,
            generation_config=sampling_config(new_tokens),
            logits_processor=LogitsProcessorList([noted]),
        )
        noted.take(ids)
        return torch.stack(noted.steps, 1).tolist()

    def close(self) -> None:
        pass


class Continuous:
    """transformers' continuous batching; it gives its log-probs itself where it can."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._model = copy_of(job)
        try:
            self.run(0, 2)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise EngineError(f"transformers' continuous batching does not run here: {reason}") from error

    def run(self, seed: int, new_tokens: int) -> Timing:
        return timed(lambda: self._sample(seed, new_tokens), len(self._job.prompts) * new_tokens)

    def _sample(self, seed: int, new_tokens: int) -> list[list[float]]:
        from transformers import ContinuousBatchingConfig

        longest = max(map(len, self._job.prompts)) + self._job.new_tokens
        outputs = self._model.generate_batch(
            self._job.prompts,
            generation_config=sampling_config(new_tokens),
            # Left to itself it takes nearly all memory of a machine without a GPU.
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=_PAGE,
                num_blocks=len(self._job.prompts) * (longest // _PAGE + 2),
                max_batch_tokens=max(_BATCH_TOKENS, longest),
                return_logprobs=True,
                seed=seed,
            ),
        )
        return [list(output.logprobs) for output in outputs.values()]

    def close(self) -> None:
        pass


def copy_of(job: Job) -> Any:
    """The model in the peers' precision, without an end token; in float32 it is shared, since nobody changes it."""
    model = job.model
    if job.peer_dtype != torch.float32:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=job.peer_dtype)
    # `generate` fills what its configuration leaves open from the model's, an end token included.
    model.generation_config.eos_token_id = None
    return model.eval()


def sampling_config(new_tokens: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens, pad_token_id=0
    )
