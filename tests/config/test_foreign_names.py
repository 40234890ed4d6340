"""Names of TRL, verl and OpenRLHF: the message says which key is meant."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sortedrl.config import SortedConfig
from sortedrl.config.foreign_names import IGNORED, NEIGHBOURS, NO_EQUIVALENT, foreign_hint, table
from sortedrl.errors import ConfigError

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_generations=8", "num_generations is TRL's name: set learner.group_size"),
        ("learner.num_generations=8", "num_generations is TRL's name: set learner.group_size"),
        ("learning_rate=1e-6", "learning_rate is TRL's name: set learner.lr"),
        ("output_dir=x", "output_dir is TRL's name: set run.dir and run.name (the run directory is DIR/NAME)"),
        ("beta=0.1", "beta is TRL's name: set learner.kl_coef"),
        ("engine.max_completion_length=9", "max_completion_length is TRL's name: set engine.max_new_tokens"),
        ("deepspeed=x", "deepspeed is TRL's name and has no equivalent here: remove it (learner.ranks shards the "),
        ("rollout.n=8", "rollout.n is verl's name: set learner.group_size"),
        ("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.n is verl's name: set learner.group_size"),
        (
            "actor.ppo_mini_batch_size=8",
            "actor.ppo_mini_batch_size is verl's name: set schedule.update_batch (in samples",
        ),
        ("+actor_rollout_ref.actor.optim.lr=1", "actor_rollout_ref.actor.optim.lr is verl's name: set learner.lr"),
        ("trainer.total_epochs=3", "trainer.total_epochs is verl's name: set run.samples"),
        ("data.max_response_length=9", "data.max_response_length is verl's name: set engine.max_new_tokens"),
        ("algorithm.kl_ctrl.kl_coef=1", "algorithm.kl_ctrl.kl_coef is verl's name: set learner.kl_coef"),
        ("n_samples_per_prompt=8", "n_samples_per_prompt is OpenRLHF's name: set learner.group_size"),
        ("eval.steps=8", "eval.steps is OpenRLHF's name: set eval.every_samples (counted in samples)"),
        ("seed=1", "unknown configuration key 'seed': did you mean run.seed?"),
        ("learner.temperature=1", "unknown configuration key 'learner.temperature': did you mean engine.temperature?"),
        ("lr=1", "unknown configuration key 'lr': did you mean learner.lr or sft.lr?"),
        ("learner.n=1", "unknown configuration key 'learner.n': "),
    ],
)
def test_an_override_of_another_framework_gets_our_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SortedConfig.load(QUICKSTART, [override])
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_files_and_python_get_the_same_hints(tmp_path: Path) -> None:
    expected = "trainer.total_epochs is verl's name: set run.samples"
    (tmp_path / "run.toml").write_text("[trainer]\ntotal_epochs = 3\n[learner]\nnum_generations = 8\n")
    both = f"^num_generations is TRL's name: set learner.group_size; {expected}"
    for make in (
        lambda: SortedConfig.load(tmp_path / "run.toml"),
        lambda: SortedConfig(learner={"num_generations": 8}, trainer={"total_epochs": 3}),
    ):
        with pytest.raises(ConfigError, match=both):
            make()


def test_keys_of_many_parts_are_refused_like_others() -> None:
    tree: dict[str, Any] = {"n": 8}
    for _ in range(900):
        tree = {"rollout": tree}
    with pytest.raises(ConfigError, match=r"^unknown configuration key 'rollout'"):
        SortedConfig(**tree)
    assert foreign_hint("a." * 100_000 + "num_generations") is None


def test_options_of_openrlhf_get_our_key(call: Any) -> None:
    for option, key in (
        ("--n_samples_per_prompt", "learner.group_size"),
        ("--actor_learning_rate", "learner.lr"),
        ("--init_kl_coef", "learner.kl_coef"),
        ("--actor.adam.lr", "learner.lr"),
    ):
        code, out, err = call("train", str(QUICKSTART), option, "1")
        assert (code, out, err) == (2, "", f"error: {option.lstrip('-')} is OpenRLHF's name: set {key}\n")


def test_every_name_has_one_meaning_and_every_key_exists() -> None:
    known = {f"{section}.{key}" for section, values in SortedConfig().resolved().items() for key in values}
    assert {key for row in NEIGHBOURS for key in row.ours} <= known
    for framework in ("trl", "verl", "openrlhf"):
        counts = Counter(name for row in NEIGHBOURS for name in getattr(row, framework))
        assert [name for name, count in counts.items() if count > 1] == []
        for row in NEIGHBOURS:
            for name in getattr(row, framework):
                hint = foreign_hint(name)
                is_ours = any(key.endswith(f".{name}") for key in row.ours)
                assert hint is None if is_ours else all(key in hint for key in row.ours), name
    converted = {name for row in NEIGHBOURS for name in row.trl}
    assert not converted & IGNORED
    assert not (converted | IGNORED) & set(NO_EQUIVALENT)


def test_the_table_of_the_guide_is_generated() -> None:
    assert table() in (ROOT / "docs" / "guides" / "from_trl.md").read_text(encoding="utf-8")
