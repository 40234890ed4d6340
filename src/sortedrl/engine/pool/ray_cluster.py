"""The connection to Ray: an existing cluster, or a Ray on this machine that listens on loopback only.

`run/builders` connects before it imports anything that needs Ray, because Ray decides on import on which addresses it
listens. Guarantees: without an address, no part of Ray can be reached from another machine.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from typing import Any

from sortedrl.errors import EngineError

# A switch of Ray: without clusters it binds to 127.0.0.1, on any system.
CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# By default Ray gives its workers a lower priority than all other processes, the learner included.
NICENESS = "RAY_worker_niceness"


def is_connected() -> bool:
    """Whether this process is already connected to a Ray."""
    ray: Any = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def connect(address: str | None = None) -> bool:
    """Join the cluster at `address` (`auto`: this machine's), or start Ray here. False if already connected."""
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
    except Exception as error:  # a start that times out raises no narrower type
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        where = "on this machine" if address is None else f"at {address!r}"
        raise EngineError(
            f"Ray did not start {where} ({why}): start it with `ray start --head`, or set engine.cluster to its address"
        ) from error
    return True


def _silence() -> None:
    """Keep Ray from writing to stdout, where `--json` promises one JSON object and nothing else.

    Ray reports dead workers there even with `log_to_driver=False`. The pool logs them itself.
    """
    worker: Any = importlib.import_module("ray._private.worker")
    worker._worker_logs_enabled = False  # Ray's own debugger uses this switch


def disconnect() -> None:
    import ray

    ray.shutdown()
