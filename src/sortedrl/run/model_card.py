"""The model card of trained weights: README.md with the figures of their run, as the hub shows it.

`export.py` writes it next to weights that leave a run directory. Guarantees: figures are those of `summary.json`; the
card and the configuration that goes with it name no folder of this machine by its path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from sortedrl import __version__
from sortedrl.config import SortedConfig
from sortedrl.config.config import PLACES
from sortedrl.external.hub import Commits, is_repo_id
from sortedrl.learner.smollm2 import NAME as SMOLLM2
from sortedrl.learner.smollm2 import NOTE as SMOLLM2_NOTE
from sortedrl.learner.smollm2 import ORIGINAL as SMOLLM2_ORIGINAL
from sortedrl.telemetry.summary import Summary

CONFIG_FILE = "train_config.toml"
CARD_FILE = "README.md"


@dataclass(slots=True, kw_only=True, frozen=True)
class RunFacts:
    """What a card tells. `version`: number of updates of the weights. `from_python`: parts that no file describes."""

    config: SortedConfig
    summary: Summary | None
    version: int
    base_model: str
    commits: Commits = field(default_factory=dict)
    from_python: tuple[str, ...] = ()

    @property
    def hub_base(self) -> str:
        """The id of the base model on the hub; empty if it came from elsewhere."""
        if self.base_model == SMOLLM2:
            return SMOLLM2_ORIGINAL
        is_hub = "model.path" in self.commits or ("/" in self.base_model and is_repo_id(self.base_model))
        return self.base_model if is_hub else ""


def write_card(folder: Path, facts: RunFacts, *, is_adapter: bool) -> None:
    """Write the card and the configuration of the run."""
    (folder / CARD_FILE).write_text(model_card(facts, is_adapter=is_adapter), encoding="utf-8")
    (folder / CONFIG_FILE).write_text(public_config(facts.config, facts.commits), encoding="utf-8")


def model_card(facts: RunFacts, *, is_adapter: bool) -> str:
    name = facts.config.run.name
    sections = [
        f"---\n{_metadata(facts, is_adapter=is_adapter)}\n---",
        f"# {name}",
        f"{_base(facts)}, trained with sortedrl {__version__}: reinforcement learning, rollouts scheduled by length. "
        + ("These are adapters (peft); load them on their base model." if is_adapter else "These are whole weights."),
        "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in _figures(facts))]),
        _scope(facts),
        "## Reproduce",
        f"```\nsortedrl train {CONFIG_FILE}\n```",
        _completeness(facts),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def public_config(config: SortedConfig, commits: Commits) -> str:
    """The resolved configuration as TOML, with the commits in use, and with absolute paths cut to their last part."""
    tree = config.resolved()
    dataset = config.task.path.partition(":")[0]
    for section, key in (("model", "model.path"), ("lora", "lora.path"), ("task", f"dataset {dataset}")):
        tree[section]["revision"] = commits.get(key) or tree[section]["revision"]
    tree["run"]["dir"] = "runs"
    for name in PLACES:
        section, key = name.split(".")
        tree[section][key] = _without_folder(tree[section][key])
    tree["engine"]["address"] = tree["engine"]["cluster"] = ""
    set_keys = {name: {k: v for k, v in section.items() if v is not None} for name, section in tree.items()}
    return tomli_w.dumps(set_keys)


def _metadata(facts: RunFacts, *, is_adapter: bool) -> str:
    from huggingface_hub import ModelCardData

    config = facts.config
    dataset = config.task.path.partition(":")[0]
    extra: dict[str, Any] = {"base_model": facts.hub_base} if facts.hub_base else {}
    if f"dataset {dataset}" in facts.commits:
        extra["datasets"] = [dataset]
    data = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["sortedrl", "reinforcement-learning", config.learner.algorithm],
        **extra,
    )
    return data.to_yaml()


def _base(facts: RunFacts) -> str:
    if facts.base_model == SMOLLM2:
        return f"`{SMOLLM2}` ({SMOLLM2_NOTE})"
    commit = facts.commits.get("model.path", "")
    shown = _without_folder(facts.base_model) or "A model object"
    return f"`{shown}` (commit {commit})" if commit else f"`{shown}`"


def _figures(facts: RunFacts) -> list[tuple[str, str]]:
    config, summary = facts.config, facts.summary
    rows = [
        ("strategy", f"`{config.schedule.strategy}`"),
        ("algorithm", f"`{config.learner.algorithm}`, answers per prompt: {config.learner.group_size}"),
        ("task", f"`{config.task.name}`" if "task" not in facts.from_python else "rows and rewards given in Python"),
        ("updates of these weights", f"{facts.version:,}"),
    ]
    if summary is None:
        return rows
    rows.append(("samples trained", f"{summary.samples:,} in {summary.updates:,} updates"))
    if summary.staleness_max is not None:
        mean = "" if summary.staleness_mean is None else f"{summary.staleness_mean:.3g} on average, "
        rows.append(("staleness in updates", f"{mean}{summary.staleness_max} at most"))
    for what, before, after in (
        ("held-out accuracy, sampled", summary.accuracy_before, summary.accuracy_after),
        ("held-out accuracy, greedy", summary.greedy_accuracy_before, summary.greedy_accuracy_after),
        ("held-out reward, sampled", summary.heldout_reward_before, summary.heldout_reward_after),
    ):
        if before is not None and after is not None:
            rows.append((what, f"{before:.3f} before, {after:.3f} after"))
    if (counts := summary.ledger) is not None:
        kept = f"{counts.loaded:,} samples loaded, {counts.trained:,} trained"
        rows.append(("ledger", f"{kept}, {counts.lost} lost, {counts.duplicated} trained twice"))
    return rows


def _scope(facts: RunFacts) -> str:
    if facts.summary is None:
        return "The run has not ended, so there is no summary of it."
    if facts.summary.updates != facts.version:
        return f"The figures are those of the whole run; these weights are those after update {facts.version}."
    return ""


def _completeness(facts: RunFacts) -> str:
    missing = [name for name in ("model", "task") if name in facts.from_python]
    if not missing:
        return f"`{CONFIG_FILE}` is the whole configuration of the run."
    what = {"model": "the model", "task": "the rows and reward functions"}
    given = " and ".join(what[name] for name in missing)
    return f"`{CONFIG_FILE}` is the configuration of the run, without {given}: its Python program passed them."


def _without_folder(place: str) -> str:
    """A path of this machine by its last part; anything else as it is."""
    return Path(place).name if place.startswith(("/", "~")) or Path(place).is_absolute() else place
