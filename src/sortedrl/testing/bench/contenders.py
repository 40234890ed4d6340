"""The engines that `bench engine` compares: the local engine, two ways of transformers, and vLLM.

`engine.py` calls a contender's `run`, which samples the job's prompts once and returns the number of tokens and the
time. Guarantees: a contender that does not return all tokens with finite log-probs fails the benchmark, so a speed
always belongs to completed work.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
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
_CHECKED = 8  # answers whose log-probs are compared with a plain pass
_VLLM_SCRIPT = Path(__file__).with_name("vllm_rounds.py")
_CHECKOUT = Path(__file__).parents[4]  # of the repository, unless the package was installed as a wheel
_VLLM_REMEDY = (
    "run `make vllm` in a checkout of this repository, or set --vllm-python or SORTEDRL_VLLM_PYTHON to the Python of "
    "an environment with vLLM"
)


@dataclass(slots=True, kw_only=True)
class SamplingJob:
    folder: Path
    model: Any  # float32
    prompts: list[list[int]]
    new_tokens: int
    dtype: torch.dtype  # of the local engine
    peer_dtype: torch.dtype
    threads: int


@dataclass(slots=True, kw_only=True, frozen=True)
class RoundTiming:
    tokens: int
    wall_s: float
    cpu_s: float  # of all threads


class Contender(Protocol):
    def run(self, seed: int, new_tokens: int) -> RoundTiming: ...

    def close(self) -> None: ...


def timed(sample: Callable[[], list[list[float]]], num_expected: int) -> RoundTiming:
    """Time a call that returns the log-probs of all answers, and check that they are complete."""
    wall, cpu = time.perf_counter(), time.process_time()
    logprobs = [value for answer in sample() for value in answer]
    timing = RoundTiming(tokens=len(logprobs), wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)
    if len(logprobs) != num_expected or not all(map(math.isfinite, logprobs)):
        raise EngineError(f"{len(logprobs)} log-probs for {num_expected} tokens: the engine's answers are not complete")
    return timing


class LocalContender:
    def __init__(self, job: SamplingJob, dtype: torch.dtype) -> None:
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

    def run(self, seed: int, new_tokens: int) -> RoundTiming:
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
        """The mean difference between the last round's log-probs and a plain float32 pass, over a few answers."""
        gaps: list[torch.Tensor] = []
        for prompt, tokens, logprobs in zip(self._job.prompts[:_CHECKED], self._tokens, self._logprobs, strict=False):
            logits_tv = self._job.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
            plain_t = logits_tv.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).flatten()
            gaps.append((plain_t - torch.tensor(logprobs)).abs())
        return float(torch.cat(gaps).mean())

    def close(self) -> None:
        self._engine.close()


class LogprobRecorder(LogitsProcessor):
    """Records the log-prob of every token that `generate` samples; keeping all logits would need gigabytes."""

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


class GenerateContender:
    """transformers' `generate` on one left-padded batch."""

    def __init__(self, job: SamplingJob) -> None:
        self._job = job
        self._model = peer_model(job)
        longest = max(map(len, job.prompts))
        self._ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in job.prompts])
        self._mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in job.prompts])

    def run(self, seed: int, new_tokens: int) -> RoundTiming:
        return timed(lambda: self._sample(seed, new_tokens), len(self._job.prompts) * new_tokens)

    @torch.inference_mode()
    def _sample(self, seed: int, new_tokens: int) -> list[list[float]]:
        torch.manual_seed(seed)
        recorder = LogprobRecorder()
        ids = self._model.generate(
            self._ids,
            attention_mask=self._mask,
            generation_config=sampling_config(new_tokens),
            logits_processor=LogitsProcessorList([recorder]),
        )
        recorder.take(ids)
        return torch.stack(recorder.steps, 1).tolist()

    def close(self) -> None:
        pass


class ContinuousContender:
    """transformers' continuous batching, which returns log-probs itself."""

    def __init__(self, job: SamplingJob) -> None:
        self._job = job
        self._model = peer_model(job)
        try:
            self.run(0, 2)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise EngineError(f"transformers' continuous batching does not run here: {reason}") from error

    def run(self, seed: int, new_tokens: int) -> RoundTiming:
        return timed(lambda: self._sample(seed, new_tokens), len(self._job.prompts) * new_tokens)

    def _sample(self, seed: int, new_tokens: int) -> list[list[float]]:
        from transformers import ContinuousBatchingConfig

        longest = max(map(len, self._job.prompts)) + self._job.new_tokens
        outputs = self._model.generate_batch(
            self._job.prompts,
            generation_config=sampling_config(new_tokens),
            # By default it takes nearly all memory of a machine without a GPU.
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


def find_vllm_python(given: str | None) -> str | None:
    """The Python of an environment with vLLM: the given one, SORTEDRL_VLLM_PYTHON, or that of `make vllm`.

    `make vllm` sets up `.venv-vllm` in the checkout, which is this package's or the current folder.
    """
    named = given or os.environ.get("SORTEDRL_VLLM_PYTHON")
    if named is not None:
        return named
    environments = [folder / ".venv-vllm" for folder in (Path.cwd(), _CHECKOUT)]
    return next((str(env / "bin" / "python") for env in environments if (env / ".ready").exists()), None)


class VllmContender:
    """vLLM in a separate process, because it pins other package versions than this package.

    The process runs `vllm_rounds.py` with the Python of an environment that has vLLM. vLLM runs inside that process
    with all threads, which is its fastest way on a CPU. Both sides exchange one JSON line per round.
    """

    def __init__(self, job: SamplingJob, python: str | None) -> None:
        if python is None or not Path(python).is_file():
            raise EngineError(f"vLLM was not found ({python or 'no .venv-vllm here'}): {_VLLM_REMEDY}")
        threads = str(job.threads)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [python, "-P", str(_VLLM_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        settings = {
            "model": str(job.folder),
            "dtype": str(job.peer_dtype).removeprefix("torch."),
            "prompts": job.prompts,
            "max_length": max(map(len, job.prompts)) + job.new_tokens + 1,
            "threads": job.threads,
        }
        try:
            self._ask(settings)
        except EngineError:
            self.close()
            raise

    def run(self, seed: int, new_tokens: int) -> RoundTiming:
        return RoundTiming(**self._ask({"seed": seed, "new_tokens": new_tokens}))

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None, "opened with PIPE"
        assert self._process.stdout is not None, "opened with PIPE"
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the process wrote its error before it ended
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "its process ended without a message"}
        if "error" in answer:
            raise EngineError(f"vLLM does not run here: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process, which exits when its input is closed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def peer_model(job: SamplingJob) -> Any:
    """The model in the peers' precision, without an end token. In float32 it is the job's own model."""
    model = job.model
    if job.peer_dtype != torch.float32:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(job.folder, dtype=job.peer_dtype)
    # `generate` takes settings that its configuration does not set, such as an end token, from the model.
    model.generation_config.eos_token_id = None
    return model.eval()


def sampling_config(new_tokens: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens, pad_token_id=0
    )
