"""A sampler for verl's v1 trainers, named in its configuration:

    trainer.v1.sampler.custom_sampler.path=pkg://sortedrl.adapters.verl
    trainer.v1.sampler.custom_sampler.name=SortedSampler
    +trainer.v1.sampler.sampler_kwargs.run_dir=runs/verl
    +trainer.v1.sampler.sampler_kwargs.order=shortest-first

verl keeps the answers in TransferQueue and generates them; the sampler chooses which prompt groups a step trains. It
drops no group for being stale: with max_off_policy_strategy=wait verl waits for those at their bound. Failed groups are
cleared and refilled as verl does it. Which groups were trained is in our ledger before verl gets the batch, so that a
trainer that was killed trains no group twice. Written for verl 0.9 (`ReplayBufferAsync`); this module imports verl.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transfer_queue import KVBatchMeta  # pyright: ignore[reportMissingImports]
from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync  # pyright: ignore[reportMissingImports]

from sortedrl.adapters.prompt_groups import CompleteGroup, PromptGroups
from sortedrl.errors import ConfigError

TRAIN = "train"


class SortedSampler(ReplayBufferAsync):
    """Takes whole prompt groups by length and age, each once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.max_off_policy_threshold is not None and self.max_off_policy_strategy != "wait":
            raise ConfigError(
                "max_off_policy_strategy=drop throws away long answers, which are stale most often: set it to wait"
            )
        chosen = dict(self.sampler_kwargs or {})
        self._run_dir = chosen.pop("run_dir", None)
        self._order = chosen.pop("order", "shortest-first")
        self._max_wait = int(chosen.pop("max_wait", 4))
        if "poll_interval" in chosen:
            self.poll_interval = float(chosen.pop("poll_interval"))
        if chosen:
            raise ConfigError(
                f"unknown sampler_kwargs {', '.join(chosen)}: they are run_dir, order, max_wait, poll_interval"
            )
        self.groups: PromptGroups | None = None

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """The next batch; the first step of a process says from which checkpoint verl continues."""
        if partition_id != TRAIN:
            return super().sample(global_steps, partition_id, batch_size)
        if self.groups is None:
            run_dir = None if self._run_dir is None else Path(self._run_dir)
            self.groups = PromptGroups(batch_size, order=self._order, max_wait=self._max_wait, run_dir=run_dir)
            batches_per_step = int(dict(self.trainer_config or {}).get("parameter_sync_step") or 1)
            self.groups.begin(updates_done=max(global_steps - 1, 0) * batches_per_step)
        if self.groups.knobs.update_batch != batch_size:
            raise ConfigError(
                f"verl asks for {batch_size} prompts after {self.groups.knobs.update_batch}: keep one size"
            )
        return super().sample(global_steps, partition_id, batch_size)

    def _terminal_eviction_reasons(self, global_steps: int, partition_id: str) -> tuple[Any, ...]:
        """Before verl counts what it can sample: clear groups that were trained before a crash, and note new ones."""
        reasons = super()._terminal_eviction_reasons(global_steps, partition_id)
        if partition_id == TRAIN and self.groups is not None:
            done = {uid for uid in self.finished_keys[partition_id] if self.groups.is_trained(uid)}
            self._clear_groups(partition_id, done)
            self.groups.offer(self._complete(partition_id))
        return reasons

    def _select_prompt_uids(
        self, partition_id: str, sampleable_keys: set[str], batch_size: int
    ) -> tuple[list[str], dict[str, dict[str, Any]], dict[str, int]]:
        chosen, partition, steps = super()._select_prompt_uids(partition_id, sampleable_keys, batch_size)
        if partition_id == TRAIN and self.groups is not None:
            taken = self.groups.take(sorted(sampleable_keys))
            assert taken is not None, "verl counted enough groups, and each of them was offered"
            chosen = taken
        return chosen, partition, steps

    def _complete(self, partition_id: str) -> list[CompleteGroup]:
        """The finished groups with their lengths, in the order in which verl issued them."""
        lengths: dict[str, int] = {}
        steps = self.prompt_global_steps[partition_id]
        for key, tag in self.partitions[partition_id].items():
            uid = key.split("_")[0]
            lengths[uid] = max(lengths.get(uid, 0), int(tag.get("response_len") or 0))
        finished = sorted(self.finished_keys[partition_id], key=lambda uid: (steps.get(uid, 0), uid))
        return [CompleteGroup(id=uid, num_tokens=lengths.get(uid, 0)) for uid in finished]
