"""Runs one update at a time, in the caller's thread or in a worker thread.

`TorchLearner` and `ShardedLearner` own one each. Guarantees: two updates never run at once; an update that raises in
the caller's thread leaves no update under way.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from sortedrl.learner.base import UpdateResult


class UpdateRunner:
    """With `overlap`, updates run in a worker thread while engines continue."""

    def __init__(self, *, overlap: bool) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="sortedrl-learner") if overlap else None
        self._update: Future[UpdateResult] | None = None

    def start(self, update: Callable[[], UpdateResult]) -> Future[UpdateResult]:
        """Start the update and return its future, which is done already without `overlap`."""
        self.assert_idle()
        self._update = finished_update(update()) if self._worker is None else self._worker.submit(update)
        return self._update

    def assert_idle(self) -> None:
        assert self._update is None or self._update.done(), "an update is under way: wait for its result first"

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()


def finished_update(result: UpdateResult) -> Future[UpdateResult]:
    update: Future[UpdateResult] = Future()
    update.set_result(result)
    return update
