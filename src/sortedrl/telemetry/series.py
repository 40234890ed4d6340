"""Series of bounded size for runs of any length: they merge neighbours, or keep both ends.

`view.py` collects a run in them. Guarantees: memory stays within the given limit, sums and counts are exact, and each
series reports how much it has merged or left out, so that captions can say it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Generic, TypeVar

Point = TypeVar("Point")


class Thinned(Generic[Point]):
    """Points in order. Whenever the limit is reached, neighbours are merged in pairs.

    Each point stands for `stride` original points; the last may stand for fewer.
    """

    def __init__(self, limit: int, merge: Callable[[Point, Point], Point]) -> None:
        assert limit % 2 == 0, f"points are merged in pairs, so the limit must be even, not {limit}"
        self.points: list[Point] = []
        self.stride = 1
        self._limit = limit
        self._merge = merge
        self._num_in_last = 0

    def append(self, point: Point) -> None:
        if self.points and self._num_in_last < self.stride:
            self.points[-1] = self._merge(self.points[-1], point)
            self._num_in_last += 1
            return
        if len(self.points) == self._limit:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [self._merge(first, second) for first, second in pairs]
            self.stride *= 2
        self.points.append(point)
        self._num_in_last = 1

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)


class Ends(Generic[Point]):
    """The first `limit` items and the last `limit`; `num_seen` counts all items."""

    def __init__(self, limit: int) -> None:
        self.first: list[Point] = []
        self.last: deque[Point] = deque(maxlen=limit)
        self.num_seen = 0
        self._limit = limit

    def append(self, item: Point) -> None:
        self.num_seen += 1
        if len(self.first) < self._limit:
            self.first.append(item)
        else:
            self.last.append(item)

    def __iter__(self) -> Iterator[Point]:
        yield from self.first
        yield from self.last

    def __len__(self) -> int:
        return len(self.first) + len(self.last)

    @property
    def is_whole(self) -> bool:
        return len(self) == self.num_seen


class TimeBins:
    """Slot-seconds by row over time, in at most `limit` bins of equal width, which doubles as time goes on."""

    def __init__(self, num_rows: int, *, limit: int = 480, width: float = 1 / 64) -> None:
        assert limit % 2 == 0, f"bins are merged in pairs, so the limit must be even, not {limit}"
        self.width = width
        self.rows: list[list[float]] = [[0.0] * limit for _ in range(num_rows)]
        self._limit = limit

    def add(self, row: int, start: float, end: float, height: float = 1.0) -> None:
        """Add `height` slots from `start` to `end`."""
        while end > self.width * self._limit:
            self._double()
        bins, width = self.rows[row], self.width
        first, last = int(start / width), min(int(end / width), self._limit - 1)
        if first >= last:
            bins[last] += (end - start) * height
            return
        bins[first] += ((first + 1) * width - start) * height
        for position in range(first + 1, last):
            bins[position] += width * height
        bins[last] += (end - last * width) * height

    def heights(self, seconds: float) -> tuple[list[float], list[list[float]]]:
        """Return the edges of the bins up to `seconds`, and for each row the mean height in each bin."""
        count = max(min(-int(-seconds // self.width), self._limit), 1)
        edges = [position * self.width for position in range(count)] + [max(seconds, 1e-9)]
        widths = [max(end - start, 1e-12) for start, end in pairwise(edges)]
        means = [[total / width for total, width in zip(row, widths, strict=False)] for row in self.rows]
        return edges, means

    def _double(self) -> None:
        half = self._limit // 2
        for position, bins in enumerate(self.rows):
            self.rows[position] = [bins[i] + bins[i + 1] for i in range(0, self._limit, 2)] + [0.0] * half
        self.width *= 2
