"""An exam: a model answers test suites, and its answers become figures.

`sortedrl eval` calls `take_exam`. Suites, samples and temperatures do not wait for each other: all answers are one
oversubscribed batch through the engine (`evaluate.answer_all`), marked in reward workers while the engine goes on. What
it keeps true: an answer depends on model, problem, seed and sampling alone, not on which other suites are asked for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from sortedrl.config import SortedConfig
from sortedrl.errors import DataError, ModelError
from sortedrl.learner.model import check_model_folder, load_tokenizer, read_window
from sortedrl.records import Prompt
from sortedrl.reward.scorer import SampleScorer
from sortedrl.run.builders.engine import build_engine, build_sampling
from sortedrl.run.builders.parts import build_rewards, load_model, named_model_path, stop_token_ids
from sortedrl.run.checkpoint import Checkpoints
from sortedrl.run.evaluate import Answer, answer_all
from sortedrl.run.scores import Figures, Graded, figures
from sortedrl.tasks.base import Row, make_prompt
from sortedrl.tasks.suites import Suite, find_suites, load_suite, read_mark, suite_mark

SAMPLED_TEMPERATURE = 0.6  # of several answers to a problem, where nothing else is said
ANY_LENGTH = 2**31  # prompts are as long as they are; the model's window is what they have to fit


@dataclass(slots=True, kw_only=True, frozen=True)
class ExamSettings:
    """`temperature` None: greedy for one answer a problem, 0.6 for several."""

    model: str
    suites: str
    samples: int = 1
    limit: int | None = None
    data: Path | None = None
    engine: str = "local"
    slots: int = 32
    max_tokens: int = 1024
    temperature: float | None = None
    seed: int = 0
    threads: int = 1
    workers: int = 1
    timeout_s: float = 10.0

    @property
    def heat(self) -> float:
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.samples == 1 else SAMPLED_TEMPERATURE


@dataclass(slots=True, kw_only=True, frozen=True)
class Written:
    """One answer as it is kept."""

    suite: str
    problem: int
    sample: int
    text: str
    length: int
    finish: str
    is_right: bool


@dataclass(slots=True, kw_only=True)
class ExamResult:
    settings: ExamSettings
    suites: dict[str, Figures]
    written: list[Written]
    seconds: float
    num_tokens: int
    busy_share: float  # of slots over time

    def as_dict(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "suites": {name: found.as_dict() for name, found in self.suites.items()},
            "model": settings.model,
            "engine": settings.engine,
            "samples": settings.samples,
            "temperature": settings.heat,
            "max_tokens": settings.max_tokens,
            "seed": settings.seed,
            "wall_s": self.seconds,
            "generated_tokens": self.num_tokens,
            "tokens_per_s": self.num_tokens / self.seconds if self.seconds else 0.0,
            "busy_share": self.busy_share,
        }

    def table(self) -> Table:
        k = self.settings.samples
        heads = ("suite", "problems", f"mean@{k}", f"pass@{k}", f"maj@{k}", "length", "truncated")
        table = Table(*heads, box=None)
        for name, found in self.suites.items():
            table.add_row(
                name,
                f"{found.num_problems:,}",
                _with_error(found.mean_at_k, found.mean_at_k_se),
                _with_error(found.pass_at_k, found.pass_at_k_se),
                _with_error(found.maj_at_k, found.maj_at_k_se),
                f"{found.mean_length:,.0f}",
                f"{found.truncation_rate:.1%}",
            )
        return table

    def write_answers(self, path: Path) -> None:
        """Every answer with its mark, one JSON object a line."""
        try:
            path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in self.written), encoding="utf-8")
        except OSError as error:
            raise DataError(f"cannot write {path}: {error.strerror or error}; name another file") from error


OnProgress = Callable[[int, int, float], None]
"""Answers marked, answers in all, and the share of right ones so far."""


def take_exam(settings: ExamSettings, on_progress: OnProgress | None = None) -> ExamResult:
    suites = find_suites(settings.suites)
    torch.set_num_threads(settings.threads)
    folder = find_model(settings.model)
    tokenizer = load_tokenizer(folder)
    prompts = {suite.name: _prompts(suite, settings, tokenizer) for suite in suites}
    config = _config(settings, folder, max(len(prompt.tokens) for each in prompts.values() for prompt in each))
    answers = {name: _blank(each, settings) for name, each in prompts.items()}
    every = [answer for each in answers.values() for of_problem in each for answer in of_problem]
    with ExitStack() as stack:
        model, _ = load_model(folder)
        engine = build_engine(config, model, config.knobs)
        stack.callback(engine.close)
        rewards = stack.enter_context(build_rewards(config, [suite_mark]))
        rewards.start()
        start = time.perf_counter()
        answer_all(
            engine,
            SampleScorer(pool=rewards, tokenizer=tokenizer),
            every,
            sampling=build_sampling(config, stop_token_ids(model, tokenizer)),
            budget=settings.max_tokens,
            seed=settings.seed,
            on_scored=_counting(len(every), on_progress) if on_progress is not None else None,
        )
        seconds, stats = time.perf_counter() - start, engine.stats()
    return ExamResult(
        settings=settings,
        suites={name: figures([[_graded(a) for a in each] for each in of]) for name, of in answers.items()},
        written=[one for name, of in answers.items() for one in _written(name, of, tokenizer)],
        seconds=seconds,
        num_tokens=stats.decoded_tokens,
        busy_share=stats.busy_slot_s / (settings.slots * seconds) if seconds else 0.0,
    )


def _counting(total: int, on_progress: OnProgress) -> Callable[[Answer], None]:
    num_marked = num_right = 0
    on_progress(0, total, 0.0)

    def count(answer: Answer) -> None:
        nonlocal num_marked, num_right
        num_marked += 1
        num_right += read_mark(answer.reward)[0]
        on_progress(num_marked, total, num_right / num_marked)

    return count


def find_model(name: str) -> Path:
    """A model's folder: as a configuration names it, or the last checkpoint of a run's directory."""
    path = Path(name)
    if (path / "checkpoints").is_dir():
        checkpoint = Checkpoints(path / "checkpoints").latest()
        if checkpoint is None:
            raise ModelError(f"the run in {path} has no whole checkpoint: name a model's folder")
        return check_model_folder(checkpoint)
    return check_model_folder(named_model_path(name))


def _prompts(suite: Suite, settings: ExamSettings, tokenizer: Any) -> list[Prompt]:
    rows: list[Row] = load_suite(
        suite, data=settings.data, limit=settings.limit, is_chat=tokenizer.chat_template is not None
    )
    return [
        make_prompt(row, tokenizer, prompt_id=f"{suite.name}/{number}", max_tokens=ANY_LENGTH)
        for number, row in enumerate(rows)
    ]


def _config(settings: ExamSettings, folder: Path, longest: int) -> SortedConfig:
    """The part of a run's configuration that engine and rewards read."""
    window = read_window(folder)
    if window is not None and longest + settings.max_tokens > window:
        raise ModelError(
            f"the longest prompt has {longest} tokens, and with --max-tokens {settings.max_tokens} that is more than "
            f"the {window} positions of the model in {folder}: lower --max-tokens"
        )
    return SortedConfig(
        run={"seed": settings.seed, "threads": settings.threads},
        task={"max_prompt_tokens": longest},
        model={"path": str(folder)},
        schedule={"strategy": "sync"},
        engine={"kind": settings.engine, "slots": settings.slots, "max_new_tokens": settings.max_tokens},
        reward={"workers": settings.workers, "timeout_s": settings.timeout_s},
    )


def _blank(prompts: Sequence[Prompt], settings: ExamSettings) -> list[list[Answer]]:
    """The answers that are wanted, by problem; those of one problem follow each other, and share its prefill."""
    heat, indices = settings.heat, range(settings.samples)
    return [[Answer(prompt=prompt, temperature=heat, index=index) for index in indices] for prompt in prompts]


def _graded(answer: Answer) -> Graded:
    is_right, vote = read_mark(answer.reward)
    return replace(answer.graded(vote), reward=float(is_right))


def _written(suite: str, answers: Sequence[Sequence[Answer]], tokenizer: Any) -> list[Written]:
    return [
        Written(
            suite=suite,
            problem=problem,
            sample=answer.index,
            text=tokenizer.decode(answer.tokens, skip_special_tokens=True),
            length=len(answer.tokens),
            finish=str(answer.reason),
            is_right=read_mark(answer.reward)[0],
        )
        for problem, of_problem in enumerate(answers)
        for answer in of_problem
    ]


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"
