"""Evaluate a model on test suites: `sortedrl eval` calls `evaluate_suites`.

All answers of all suites are one oversubscribed batch through the engine (`evaluate.answer_all`); reward workers mark
them while the engine decodes. Guarantees: an answer depends only on model, problem, seed and sampling settings, not on
the other suites of the same call.
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
from sortedrl.external.hub import shown, split_revision
from sortedrl.learner.model import check_model_folder, load_tokenizer, read_window
from sortedrl.learner.smollm2 import model_note
from sortedrl.records import Prompt
from sortedrl.reward.scorer import SampleScorer
from sortedrl.run.builders.engine import build_engine, build_sampling
from sortedrl.run.builders.generation import stop_token_ids
from sortedrl.run.builders.parts import build_rewards, load_model, named_model_path
from sortedrl.run.checkpoint_folder import Checkpoints
from sortedrl.run.evaluate import EvalAnswer, answer_all
from sortedrl.run.scores import Figures, Graded, figures
from sortedrl.tasks.base import Row, make_prompt
from sortedrl.tasks.suites import Suite, find_suites, load_suite, read_mark, suite_mark

SAMPLED_TEMPERATURE = 0.6  # default for several answers to a problem
DEFAULT_TOKENS = 1024  # of an answer, if the model has positions for as many
ANY_LENGTH = 2**31  # no limit of their own: prompts must only fit the model's window


@dataclass(slots=True, kw_only=True, frozen=True)
class SuiteEvalSettings:
    """`temperature` None: 0 (greedy) for one answer per problem, 0.6 for several.

    `max_tokens` None: 1024, or fewer if the model has positions for fewer.
    """

    model: str
    suites: str
    samples: int = 1
    limit: int | None = None
    data: Path | None = None
    engine: str = "local"
    slots: int = 32
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int = 0
    threads: int = 1
    workers: int = 1
    timeout_s: float = 10.0

    @property
    def used_temperature(self) -> float:
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.samples == 1 else SAMPLED_TEMPERATURE


@dataclass(slots=True, kw_only=True, frozen=True)
class SuiteAnswer:
    """One answer with its mark, as `write_answers` writes it."""

    suite: str
    problem: int
    sample: int
    text: str
    length: int
    finish: str
    is_right: bool


@dataclass(slots=True, kw_only=True)
class SuiteEvalResult:
    settings: SuiteEvalSettings
    suites: dict[str, Figures]
    answers: list[SuiteAnswer]
    seconds: float
    num_tokens: int
    busy_share: float  # share of slot time in which slots were busy

    def as_dict(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "suites": {name: asdict(found) for name, found in self.suites.items()},
            "model": settings.model,
            "model_note": model_note(settings.model) or None,
            "engine": settings.engine,
            "samples": settings.samples,
            "temperature": settings.used_temperature,
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
        """Write every answer with its mark to a JSONL file."""
        try:
            path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in self.answers), encoding="utf-8")
        except OSError as error:
            raise DataError(f"cannot write {path}: {error.strerror or error}; give another file") from error


OnProgress = Callable[[int, int, float], None]
"""Called with the number of marked answers, the number of all answers, and the share of right ones so far."""


def evaluate_suites(settings: SuiteEvalSettings, on_progress: OnProgress | None = None) -> SuiteEvalResult:
    suites = find_suites(settings.suites)
    torch.set_num_threads(settings.threads)
    folder = find_model(settings.model)
    tokenizer = load_tokenizer(folder)
    prompts = {suite.name: _prompts(suite, settings, tokenizer) for suite in suites}
    longest = max(len(prompt.tokens) for each in prompts.values() for prompt in each)
    budget = _token_budget(settings.max_tokens, folder, longest)
    settings = replace(settings, max_tokens=budget)
    config = _config(settings, folder, longest, budget)
    answers = {name: _requested_answers(each, settings) for name, each in prompts.items()}
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
            budget=budget,
            seed=settings.seed,
            on_scored=_counting(len(every), on_progress) if on_progress is not None else None,
        )
        seconds, stats = time.perf_counter() - start, engine.stats()
    return SuiteEvalResult(
        settings=settings,
        suites={name: figures([[_graded(a) for a in each] for each in of]) for name, of in answers.items()},
        answers=[one for name, of in answers.items() for one in _suite_answers(name, of, tokenizer)],
        seconds=seconds,
        num_tokens=stats.decoded_tokens,
        busy_share=stats.busy_slot_s / (settings.slots * seconds) if seconds else 0.0,
    )


def _counting(total: int, on_progress: OnProgress) -> Callable[[EvalAnswer], None]:
    num_marked = num_right = 0
    on_progress(0, total, 0.0)

    def count(answer: EvalAnswer) -> None:
        nonlocal num_marked, num_right
        num_marked += 1
        num_right += read_mark(answer.reward)[0]
        on_progress(num_marked, total, num_right / num_marked)

    return count


def find_model(name: str) -> Path:
    """The folder of a model by its name, path or id (`owner/name@revision`); for a run directory, a checkpoint."""
    path = Path(name)
    if (path / "checkpoints").is_dir():
        checkpoint = Checkpoints(path / "checkpoints").latest()
        if checkpoint is None:
            raise ModelError(f"the run in {path} has no whole checkpoint: give the folder of a model")
        return check_model_folder(checkpoint)
    return check_model_folder(named_model_path(*split_revision(name)))


def _prompts(suite: Suite, settings: SuiteEvalSettings, tokenizer: Any) -> list[Prompt]:
    rows: list[Row] = load_suite(
        suite, data=settings.data, limit=settings.limit, is_chat=tokenizer.chat_template is not None
    )
    return [
        make_prompt(row, tokenizer, prompt_id=f"{suite.name}/{number}", max_tokens=ANY_LENGTH)
        for number, row in enumerate(rows)
    ]


def _token_budget(given: int | None, folder: Path, longest: int) -> int:
    """The longest answer in tokens: as given, or as many as the model has positions for, up to the default."""
    window = read_window(folder)
    if given is None:
        given = DEFAULT_TOKENS if window is None else max(1, min(DEFAULT_TOKENS, window - longest))
    if window is not None and longest + given > window:
        raise ModelError(
            f"the longest prompt has {longest} tokens, and with --max-tokens {given} that is more than "
            f"the {window} positions of the model in {shown(folder)}: lower --max-tokens"
        )
    return given


def _config(settings: SuiteEvalSettings, folder: Path, longest: int, budget: int) -> SortedConfig:
    """A configuration with the settings that the engine and the reward workers read."""
    return SortedConfig(
        run={"seed": settings.seed, "threads": settings.threads},
        task={"max_prompt_tokens": longest},
        model={"path": str(folder)},
        schedule={"strategy": "sync"},
        engine={"kind": settings.engine, "slots": settings.slots, "max_new_tokens": budget},
        reward={"workers": settings.workers, "timeout_s": settings.timeout_s},
    )


def _requested_answers(prompts: Sequence[Prompt], settings: SuiteEvalSettings) -> list[list[EvalAnswer]]:
    """The answers to generate, by problem; answers to one problem are adjacent, so that they can share its prefill."""
    temperature, indices = settings.used_temperature, range(settings.samples)
    return [[EvalAnswer(prompt=p, temperature=temperature, index=i) for i in indices] for p in prompts]


def _graded(answer: EvalAnswer) -> Graded:
    is_right, vote = read_mark(answer.reward)
    return replace(answer.graded(vote), reward=float(is_right))


def _suite_answers(suite: str, answers: Sequence[Sequence[EvalAnswer]], tokenizer: Any) -> list[SuiteAnswer]:
    return [
        SuiteAnswer(
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
