"""A sampler for NeMo-RL's asynchronous loop, named in its configuration:

    async_rl:
      sampler: {name: custom, target: "sortedrl.adapters.nemo_rl:SortedSampler", groups_per_step: 32, max_staleness: 2}

NeMo-RL calls `admit` before it starts a batch of prompts, `select` when it wants to train, `evict` and
`should_abort_inflight` to let stale work go. This sampler lets nothing go: it starts no more than the staleness bound
allows to train, and it waits for what would be too old one version later. So long answers are trained like all others.

It follows the interface as documented (`PromptGroupSampler`) and is tested with a double of its buffer, not with
NeMo-RL itself. Importing this module needs nothing of NeMo-RL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sortedrl.adapters.prompt_groups import CompleteGroup, PromptGroups
from sortedrl.errors import ConfigError

POLL_S = 0.005


class SortedSampler:
    """Admission, selection and the ledger for NeMo-RL's prompt groups.

    `buffer` is NeMo-RL's replay buffer: parallel lists `meta_list`, `start_weight_list` and `ready_list`, and `remove`.
    """

    def __init__(
        self,
        buffer: Any,
        *,
        groups_per_step: int,
        max_staleness: int = 1,
        order: str = "shortest-first",
        max_wait: int = 4,
        run_dir: str | None = None,
    ) -> None:
        if max_staleness < 0:
            raise ConfigError(f"max_staleness must be 0 or more, not {max_staleness}")
        self._buffer = buffer
        self._max_staleness = max_staleness
        self._dispatched = -1  # the last batch that was admitted
        self._updates_done = 0
        self._groups = PromptGroups(
            groups_per_step, order=order, max_wait=max_wait, run_dir=None if run_dir is None else Path(run_dir)
        )

    # ---- the rollout side -------------------------------------------------------------------------------------------

    async def admit(self, *, trainer_version_fn: Callable[[], int]) -> int | None:
        """Wait until the next batch of prompts can be trained within the bound, in batches of one step."""
        while self._dispatched >= trainer_version_fn() + self._max_staleness:
            await asyncio.sleep(POLL_S)
        self._dispatched += 1
        return None

    def should_abort_inflight(self, *, start_weight_version: int, current_train_weight: int) -> bool:
        """Never: training waits for an answer that reaches the bound."""
        return False

    # ---- the training side ------------------------------------------------------------------------------------------

    async def select(
        self, *, current_train_weight: int, min_prompt_groups: int, max_prompt_groups: int
    ) -> tuple[Any, int]:
        """One step's groups, or nothing while one that is at its bound is still being written."""
        count, buffer = self._groups.knobs.update_batch, self._buffer
        if not min_prompt_groups <= count <= max_prompt_groups:
            raise ConfigError(
                f"NeMo-RL asks for {min_prompt_groups} to {max_prompt_groups} groups and groups_per_step is {count}: "
                "make them equal"
            )
        self._groups.begin(self._updates_done)
        ready = [place for place, is_ready in enumerate(buffer.ready_list) if is_ready]
        self._groups.offer(complete_group(buffer.meta_list[i]) for i in ready)
        oldest = current_train_weight - self._max_staleness
        if any(w <= oldest and not r for w, r in zip(buffer.start_weight_list, buffer.ready_list, strict=True)):
            return None, 0
        places = {group_id(buffer.meta_list[i]): i for i in ready}
        due = [name for name, i in places.items() if buffer.start_weight_list[i] <= oldest]
        taken = self._groups.take(places, first=due)
        if taken is None:
            return None, 0
        chosen = [places[name] for name in taken]
        metas = [buffer.meta_list[i] for i in chosen]
        await buffer.remove(chosen, remove_in_dp=False)
        return metas[0].concat(*metas[1:]), len(metas)

    async def evict(self, *, current_train_weight: int) -> int:
        """Drops nothing: `admit` starts no more than can be trained in time."""
        return 0

    # ---- facts ------------------------------------------------------------------------------------------------------

    @property
    def is_on_policy(self) -> bool:
        return self._max_staleness == 0

    def required_buffer_capacity(self, groups_per_step: int) -> int | None:
        return groups_per_step * (self._max_staleness + 1)

    def set_dispatch_index(self, resume_from_step: int) -> None:
        """NeMo-RL starts, or continues, at this step."""
        if resume_from_step < 0:
            raise ConfigError(f"resume_from_step must be 0 or more, not {resume_from_step}")
        self._dispatched = resume_from_step - 1
        self._updates_done = resume_from_step

    def close(self) -> None:
        self._groups.close()


def group_id(meta: Any) -> str:
    """The id that NeMo-RL gave to a group, or that of its first sample."""
    tag = meta.tags[0] if getattr(meta, "tags", None) else {}
    return str(tag.get("group_id") or meta.sample_ids[0])


def complete_group(meta: Any) -> CompleteGroup:
    lengths = getattr(meta, "sequence_lengths", None)
    return CompleteGroup(id=group_id(meta), num_tokens=max(map(int, lengths)) if lengths else 1)
