"""The connection to Ray: a cluster that runs, or one of this machine's own that listens on loopback only.

`build/parts.py` connects before it imports anything that needs Ray, since Ray decides when it is imported on which
addresses it listens. What it keeps true: without an address nothing of Ray can be reached from another machine.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from typing import Any

from sortedrl.errors import EngineError

# Ray's own switch: without clusters it binds to 127.0.0.1, on any system.
CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# Ray would let its workers stand back behind every other process of the machine, the learner included.
NICENESS = "RAY_worker_niceness"


def is_connected() -> bool:
    """Whether this process has a Ray already, its own or a cluster's."""
    ray: Any = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def connect(address: str | None = None) -> bool:
    """Join the cluster at an address (`auto`: the one of this machine), or start Ray here. False if that was done."""
    if importlib.util.find_spec("ray") is None:
        raise EngineError("a pool of engines, or a learner of several ranks, needs Ray: pip install 'sortedrl[ray]'")
    if address is None and "ray" not in sys.modules:
        os.environ.setdefault(CLUSTERS, "0")
        os.environ.setdefault(NICENESS, "0")
    import ray

    if ray.is_initialized():
        return False
    _silence()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is not None:
            ray.init(address=address, **quiet)
        else:
            ray.init(include_dashboard=False, num_cpus=os.cpu_count(), **quiet)
    except Exception as error:  # a start that takes too long raises no narrower kind
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = "on this machine" if address is None else f"at {address!r}"
        raise EngineError(
            f"Ray cannot be had {where} ({why}): start it with `ray start --head`, or give the address of one that runs"
        ) from error
    return True


def _silence() -> None:
    """Keep Ray off stdout, where `--json` promises one object and nothing else.

    It prints there that a worker died, whatever `log_to_driver` says. The pool logs that itself, and stops or goes on.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    worker._worker_logs_enabled = False  # the switch with which Ray's own debugger keeps the terminal to itself


def disconnect() -> None:
    import ray

    ray.shutdown()
