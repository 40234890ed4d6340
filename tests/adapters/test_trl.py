"""TRL's two trainers with our scheduler inside, on the embedded model: each option of docs/guides/trl.md."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sortedrl.cli.inspect import answer_decoder
from sortedrl.errors import ConfigError, RunDirError
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.sample_history import read_history
from sortedrl.ledger.verify import verify as verify_ledger
from sortedrl.records import Prompt
from sortedrl.tasks.knights import DEFAULT_PEOPLE, KnightsRows, verify
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.telemetry.report.report import write_report

trl = pytest.importorskip("trl", reason="TRL is an optional package: pip install 'sortedrl[trl]'")

from datasets import IterableDataset  # noqa: E402

from sortedrl.adapters.trl import sorted_rollouts, sorted_worker  # noqa: E402
from sortedrl.adapters.trl import versions as trl_versions  # noqa: E402
from sortedrl.adapters.trl.completions import completions_of  # noqa: E402
from sortedrl.adapters.trl.grpo import check_trainer  # noqa: E402
from sortedrl.adapters.trl.on_cpu import trl_on_cpu  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
BUDGET, GROUP, BATCH, STEPS = 40, 2, 8, 4
ROWS = [KnightsRows(seed=0, people=dict(DEFAULT_PEOPLE)).row(number) for number in range(24)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(knights_tiny_path())


def dataset(rows: list[dict[str, Any]] = ROWS) -> Any:
    from datasets import Dataset
    from datasets.table import InMemoryTable

    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return Dataset(InMemoryTable.from_pydict(columns), fingerprint=f"rows{len(rows)}{sorted(columns)}")


def common(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "num_generations": GROUP,
        "per_device_train_batch_size": BATCH,
        "max_completion_length": BUDGET,
        "gradient_checkpointing": False,
        "learning_rate": 1e-3,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "temperature": 1.0,
        **changes,
    }


def make_model() -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_pretrained(knights_tiny_path(), dtype=torch.float32)


def right(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Right answers are rare at this length, so longer ones get some reward too: every group has a signal."""
    found = verify(prompts, completions, answer)
    return [value + 0.01 * len(text) for value, text in zip(found, completions, strict=True)]


def grpo(folder: Path, tokenizer: Any, rollouts: Any, *, rewards: Any = right, **changes: Any) -> Any:
    options = {name: changes.pop(name) for name in ("peft_config", "eval_dataset") if name in changes}
    return trl.GRPOTrainer(
        model=make_model(),
        reward_funcs=rewards,
        args=trl.GRPOConfig(**common(folder, **changes)),
        train_dataset=dataset(),
        processing_class=tokenizer,
        rollout_func=rollouts,
        **options,
    )


def assert_proven(run_dir: Path, num_samples: int) -> None:
    with Ledger(run_dir) as ledger:
        assert verify_ledger(ledger).violations == []
        assert list(ledger.rows("SELECT count(*) FROM trained")) == [(num_samples,)]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["samples"]) == ("complete", num_samples)
    assert (summary["ledger"]["lost"], summary["ledger"]["duplicated"]) == (0, 0)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# ---- GRPOTrainer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        "sync",
        "sorted-replay",
        "async-on-policy",
        pytest.param("sorted-on-policy", marks=pytest.mark.slow),
        pytest.param("tail-batching", marks=pytest.mark.slow),
    ],
)
def test_grpo_trains_with_each_on_policy_strategy(strategy: str, tmp_path: Path, tokenizer: Any) -> None:
    rollouts = sorted_rollouts(strategy)
    trainer = grpo(tmp_path, tokenizer, rollouts)
    seen = watch_logprobs(trainer, rollouts)
    trainer.train()
    assert rollouts.summary.staleness_max == 0
    assert rollouts.summary.updates == STEPS
    assert_proven(tmp_path / "sortedrl", STEPS * BATCH)
    assert len(seen) == STEPS
    assert max(seen) < 1e-4  # the engine's log-probs are those of the weights that TRL trains


def watch_logprobs(trainer: Any, rollouts: Any) -> list[float]:
    """The largest difference between the log-probs of each batch and those of the trainer's model."""
    seen: list[float] = []
    trainer.rollout_func = lambda prompts, owner: compare(rollouts(prompts, owner), trainer.model, seen)
    return seen


def compare(batch: dict[str, Any], model: Any, seen: list[float]) -> dict[str, Any]:
    gaps = []
    for prompt, answer, logprobs in zip(*(batch[k] for k in ("prompt_ids", "completion_ids", "logprobs")), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0].float()
        found = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)[torch.arange(len(answer)), torch.tensor(answer)]
        gaps.append(float((found - torch.tensor(logprobs)).abs().max()))
    seen.append(max(gaps))
    return batch


def test_trl_logs_the_prompts_that_were_answered(tmp_path: Path, tokenizer: Any) -> None:
    asked: list[tuple[str, str]] = []

    def remember(prompts: list[str], completions: list[str], answer: list[str], **rest: Any) -> list[float]:
        wanted = {row["prompt"]: row["answer"] for row in ROWS}
        assert [wanted[prompt] for prompt in prompts] == answer  # columns belong to their prompts
        rest["log_extra"]("first_word", [prompt.split()[0] for prompt in prompts])
        asked.extend(zip(prompts, completions, strict=True))
        return right(prompts, completions, answer)

    trainer = grpo(tmp_path, tokenizer, sorted_rollouts("sorted-replay"), rewards=remember)
    trainer.train()
    logs = trainer._logs
    shown = list(zip(logs["prompt"], logs["completion"], strict=True))
    assert shown
    assert set(shown) <= set(asked)
    assert [prompt.split()[0] for prompt, _ in shown] == list(logs["extra"]["first_word"])
    for (prompt, completion), reward in zip(shown, logs["rewards"]["remember"], strict=True):
        answer = next(row["answer"] for row in ROWS if row["prompt"] == prompt)
        assert reward == pytest.approx(right([prompt], [completion], [answer])[0], rel=1e-6)


def test_answers_to_chats_are_messages(tokenizer: Any) -> None:
    tokens = tokenizer("try Ann=knight")["input_ids"]
    chat = Prompt(id="p", tokens=(1,), content=[{"role": "user", "content": "?"}])
    assert completions_of([chat], [tokens], tokenizer) == [[{"role": "assistant", "content": "try Ann=knight"}]]
    text = Prompt(id="q", tokens=(1,), content="?")
    assert completions_of([text], [tokens], tokenizer) == ["try Ann=knight"]


def test_several_reward_functions_keep_their_weights(tmp_path: Path, tokenizer: Any) -> None:
    async def shorter(completions: list[str], **_: Any) -> list[float | None]:
        return [None if "answer" not in text else -float(len(text.split())) for text in completions]

    def words(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text.split())) for text in completions]

    trainer = grpo(
        tmp_path, tokenizer, sorted_rollouts(), rewards=[words, shorter], reward_weights=[1.0, 0.5], max_steps=2
    )
    trainer.train()
    entry = next(e for e in reversed(trainer.state.log_history) if "reward" in e)
    assert entry["rewards/words/mean"] > 0
    assert "rewards/shorter/mean" in entry
    with Ledger(tmp_path / "sortedrl") as ledger:
        rewards = [row[0] for row in ledger.rows("SELECT reward FROM trained WHERE number = 1")]
    assert math.fsum(rewards) / len(rewards) == pytest.approx(entry["reward"], rel=1e-5)
    told = read_metrics(tmp_path / "sortedrl")[-1]["learner"]
    assert told["loss"] == pytest.approx(entry["loss"], rel=1e-6)
    assert (told["lr"], told["entropy"]) == pytest.approx((entry["learning_rate"], entry["entropy"]), rel=1e-6)
    page = write_report([tmp_path / "sortedrl"], tmp_path / "report.html", find_decode=answer_decoder).read_text()
    for chart in ("learner-loss", "learner-grad-norm", "learner-entropy", "learner-lr", "function-0", "function-1"):
        assert f"chart-{chart}" in page
    with Ledger(tmp_path / "sortedrl") as ledger:
        history = read_history(ledger, 0)
    assert json.dumps(tokenizer.decode(history.tokens))[1:20] in page  # answers are shown as text


@pytest.mark.parametrize(
    ("changes", "updates"),
    [
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 2}, 2),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "steps_per_generation": 2}, 2),
        ({"num_iterations": 2}, 2),
        ({"num_generations": 4, "max_steps": 2}, 2),
    ],
)
def test_batches_follow_trls_sizes(changes: dict[str, Any], updates: int, tmp_path: Path, tokenizer: Any) -> None:
    rollouts = sorted_rollouts("sorted-replay", lookahead=1)
    grpo(tmp_path, tokenizer, rollouts, **changes).train()
    assert (rollouts.summary.updates, rollouts.summary.samples) == (updates, updates * BATCH)
    assert_proven(tmp_path / "sortedrl", updates * BATCH)


def test_the_data_are_those_of_trls_own_sampler(tmp_path: Path, tokenizer: Any) -> None:
    given: list[str] = []
    rollouts = sorted_rollouts("sync")
    trainer = grpo(tmp_path, tokenizer, rollouts, max_steps=3)
    trainer.rollout_func = lambda prompts, owner: (given.append(sorted(prompts)), rollouts(prompts, owner))[1]
    trainer.train()
    answered = [[], [], []]
    with Ledger(tmp_path / "sortedrl") as ledger:
        rows = ledger.rows("SELECT number, prompt FROM trained JOIN samples ON samples.id = trained.sample")
        for number, prompt in rows:
            answered[number].append(ROWS[int(prompt.removeprefix("row/"))]["prompt"])
    assert [sorted(batch) for batch in answered] == given


def test_lora_adapters_are_merged_for_the_engine(tmp_path: Path, tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")
    rollouts = sorted_rollouts("sorted-replay")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = grpo(tmp_path, tokenizer, rollouts, peft_config=lora, learning_rate=1e-2, max_steps=3)
    seen = watch_logprobs(trainer, rollouts)
    trainer.train()
    assert max(seen) < 1e-3
    assert any(float(p.abs().sum()) > 0 for name, p in trainer.model.named_parameters() if "lora_B" in name)
    assert_proven(tmp_path / "sortedrl", 3 * BATCH)


def test_evaluations_are_trls_own(tmp_path: Path, tokenizer: Any) -> None:
    rollouts = sorted_rollouts("sorted-replay")
    held_out = dataset(ROWS[:4])
    trainer = grpo(
        tmp_path,
        tokenizer,
        rollouts,
        eval_dataset=held_out,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=8,
        max_steps=4,
    )
    trainer.train()
    assert sum("eval_reward" in entry for entry in trainer.state.log_history) == 2
    assert_proven(tmp_path / "sortedrl", 4 * BATCH)


def test_a_resumed_run_goes_on_from_trls_checkpoint(tmp_path: Path, tokenizer: Any) -> None:
    class Dies(Exception):
        pass

    def dies_late(prompts: list[str], completions: list[str], answer: list[str], **rest: Any) -> list[float]:
        if rest["trainer_state"].global_step >= 2:
            raise Dies
        return right(prompts, completions, answer)

    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    rollouts = sorted_rollouts("sorted-replay")
    with pytest.raises(Dies):
        grpo(tmp_path, tokenizer, rollouts, rewards=dies_late, **saving).train()
    rollouts.close()
    again = sorted_rollouts("sorted-replay")
    trainer = grpo(tmp_path, tokenizer, again, **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert again.summary.updates == 4
    assert_proven(tmp_path / "sortedrl", 4 * BATCH)
    with Ledger(tmp_path / "sortedrl") as ledger:
        assert len(list(ledger.rows("SELECT lineage FROM lineages"))) == 2
    without = sorted_rollouts("sorted-replay", run_dir=str(tmp_path / "elsewhere"))
    with pytest.raises(RunDirError, match="pass the run_dir of the run that made the checkpoint"):
        grpo(tmp_path, tokenizer, without, **saving).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_vllm": True}, "use_vllm=True makes TRL generate with vLLM beside our engine"),
        ({"tools": [print]}, "sorted_rollouts has no tools"),
        ({"environment_factories": {}}, "sorted_rollouts has no tools, environments"),
        ({"_is_vlm": True}, "environments and images"),
        ({"accelerator": SimpleNamespace(num_processes=2)}, "one training process"),
        ({"train_dataset": IterableDataset.from_generator(lambda: iter(()))}, "pass a Dataset"),
    ],
)
def test_trainers_that_cannot_be_served_are_refused(change: dict[str, Any], message: str) -> None:
    served = {"use_vllm": False, "tools": None, "environment_factories": None, "train_dataset": dataset()}
    served["accelerator"] = SimpleNamespace(num_processes=1)
    check_trainer(SimpleNamespace(**served))
    with pytest.raises(ConfigError, match=message):
        check_trainer(SimpleNamespace(**{**served, **change}))


@pytest.mark.parametrize(
    ("asked", "changes", "message"),
    [
        ({"strategy": "sorted-partial"}, {}, "sorted-partial trains tokens of older weights, and GRPOTrainer"),
        ({"strategy": "async"}, {}, "or use AsyncGRPOTrainer"),
        ({"strategy": "sync-large"}, {}, "sync-large trains tokens of older weights"),
        ({"strategy": "sorted-reply"}, {}, "sorted-replay"),
        ({"update_batch": 4}, {}, "update_batch follows from TRL's arguments"),
        ({"engine": {"slot": 3}}, {}, "slots"),
        ({"engine": {"temperature": 0.7}}, {}, "temperature follows from TRL's arguments"),
        ({"max_prompt_tokens": 3}, {}, "between 1 and 3 are allowed"),
        ({}, {"repetition_penalty": 1.1}, "repetition_penalty"),
        (
            {},
            {"save_strategy": "steps", "save_steps": 3, "steps_per_generation": 2, "per_device_train_batch_size": 4},
            "save_steps 3 falls into the middle of a batch",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_in_one_line(
    asked: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path, tokenizer: Any
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message) as caught:
        grpo(tmp_path, tokenizer, sorted_rollouts(**asked), **changes).train()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("found", ["1.9.0", "1.17.0", "2.0.0", "main"])
def test_other_versions_of_trl_are_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_versions, "version", lambda name: found)
    with pytest.raises(ConfigError, match=f"TRL {found} is installed, and sortedrl.adapters.trl is tested with 1.16"):
        trl_versions.check_version()


def test_a_missing_trl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise trl_versions.PackageNotFoundError(name)

    monkeypatch.setattr(trl_versions, "version", missing)
    with pytest.raises(ConfigError, match=r"needs TRL 1\.16: pip install"):
        trl_versions.check_version()


# ---- AsyncGRPOTrainer -----------------------------------------------------------------------------------------------


def async_grpo(folder: Path, strategy: str, *, rewards: Any = right, **changes: Any) -> tuple[Any, Any]:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    schedule = {
        name: changes.pop(name) for name in ("max_staleness", "on_bound", "lookahead", "engine") if name in changes
    }
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "token_budget": 0, "dtype": "float32"}
    config = AsyncGRPOConfig(**{**common(folder), **sizes, "max_staleness": 40, **changes})
    model = str(knights_tiny_path())
    worker = sorted_worker(
        strategy, model=model, reward_funcs=rewards, args=config, train_dataset=dataset(), **schedule
    )
    trainer = AsyncGRPOTrainer(
        model, args=config, train_dataset=dataset(), rollout_worker=worker, weight_transfer=worker
    )
    worker.attach(trainer)
    return trainer, worker


@pytest.mark.parametrize(
    ("strategy", "schedule", "staleness"),
    [
        ("sync", {}, 0),
        ("sorted-replay", {"lookahead": 1}, 0),
        ("sorted-partial", {}, 4),
        pytest.param("april", {"max_staleness": 3, "on_bound": "replay"}, 3, marks=pytest.mark.slow),
        pytest.param("async", {}, 2, marks=pytest.mark.slow),
        ("async-on-policy", {}, 0),
    ],
)
def test_async_grpo_trains_with_each_strategy(
    strategy: str, schedule: dict[str, Any], staleness: int, tmp_path: Path
) -> None:
    with trl_on_cpu():
        trainer, worker = async_grpo(tmp_path, strategy, **schedule)
        trainer.train()
    assert worker.summary.updates == STEPS
    assert worker.summary.staleness_max <= staleness
    assert_proven(tmp_path / "sortedrl", STEPS * BATCH)
    steps = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert len(steps) == STEPS
    told = [line["learner"]["ratio_mean"] for line in read_metrics(tmp_path / "sortedrl")]
    assert told == pytest.approx([entry["ratio"] for entry in steps], abs=1e-5)
    if staleness == 0:
        assert [entry["ratio"] for entry in steps] == pytest.approx([1.0] * STEPS, abs=1e-5)
        assert max(abs(entry["kl"]) for entry in steps) < 1e-6


def test_async_training_resumes_from_trls_checkpoint(tmp_path: Path) -> None:
    class Dies(Exception):
        pass

    def dies_late(prompts: list[str], completions: list[str], answer: list[str], **rest: Any) -> list[float]:
        if (tmp_path / "checkpoint-4").is_dir():
            raise Dies
        return right(prompts, completions, answer)

    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8}
    with trl_on_cpu():
        trainer, worker = async_grpo(tmp_path, "async-on-policy", rewards=dies_late, **saving)
        with pytest.raises(Dies):
            trainer.train()
        trainer, worker = async_grpo(tmp_path, "async-on-policy", **saving)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert worker.summary.updates == 8
    assert_proven(tmp_path / "sortedrl", 8 * BATCH)
    logs = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert [entry["sample/staleness_max"] for entry in logs] == [0.0] * 8
    assert [entry["ratio"] for entry in logs] == pytest.approx([1.0] * 8, abs=1e-5)


def test_a_worker_that_is_not_attached_is_refused(tmp_path: Path) -> None:
    with trl_on_cpu():
        trainer, worker = async_grpo(tmp_path, "sync")
        worker._trainer = None
        with pytest.raises(ConfigError, match=r"call worker\.attach\(trainer\)"):
            trainer.train()


def test_an_error_in_a_reward_function_ends_async_training(tmp_path: Path) -> None:
    def broken(**_: Any) -> list[float]:
        raise ZeroDivisionError("the reward function is broken")

    with trl_on_cpu():
        trainer, _ = async_grpo(tmp_path, "sync", rewards=broken)
        with pytest.raises(ZeroDivisionError, match="the reward function is broken"):
            trainer.train()


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        ("sync", {"token_budget": 512}, "set token_budget=0"),
        ("sync", {"max_steps": -1}, "set max_steps"),
        ("april", {}, "any number of versions old, and TRL drops"),
    ],
)
def test_async_arguments_that_lose_samples_are_refused(
    strategy: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with trl_on_cpu(), pytest.raises(ConfigError, match=message):
        async_grpo(tmp_path, strategy, **changes)
