"""sortedrl: online length-aware rollout scheduling for RL post-training of language models.

Most users need `SortedTrainer` and `SortedConfig` only. `sortedrl.buffer` and `sortedrl.schedule` are public too, for
scheduling with your own engine and learner. Importing the package loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sortedrl.config import SortedConfig
    from sortedrl.trainer import SortedTrainer

__version__ = "0.1.0"
__all__ = ["SortedConfig", "SortedTrainer", "__version__"]

_HOMES = {"SortedConfig": "sortedrl.config", "SortedTrainer": "sortedrl.trainer"}


def __dir__() -> list[str]:
    """The public names, also those that are loaded at their first use."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sortedrl' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
