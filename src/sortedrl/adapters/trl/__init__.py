"""Our scheduler inside TRL's trainers: `sorted_rollouts` for GRPOTrainer, `sorted_worker` for AsyncGRPOTrainer.

    trainer = GRPOTrainer(..., rollout_func=sorted_rollouts(strategy="sorted-replay"))

TRL's hooks are experimental and change between minor releases, so the versions that this module was tested with are
checked at import. docs/guides/trl.md is the guide.
"""

from sortedrl.adapters.trl.versions import check_version

check_version()

from sortedrl.adapters.trl.async_grpo import SortedWorker, sorted_worker  # noqa: E402  after the check of the version
from sortedrl.adapters.trl.grpo import SortedRollouts, sorted_rollouts  # noqa: E402

__all__ = ["SortedRollouts", "SortedWorker", "sorted_rollouts", "sorted_worker"]
