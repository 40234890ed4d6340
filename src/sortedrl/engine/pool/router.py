"""Which member of a pool gets which request: siblings go to one, everything else to the one with most room.

The pool asks; nothing here talks to members. What it keeps true: a request is given to a living member with a free
slot, or to none; a decision costs the same whether the pool has two members or hundreds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from sortedrl.engine.base import Request
from sortedrl.engine.pool.member import Seat, sibling_key

_FORGET_AT = 4  # homes kept, in units of the pool's slots: most of them are of prompts that are answered


class Router:
    def __init__(self, seats: Sequence[Seat], slots: int) -> None:
        self._seats = seats
        self._max_homes = _FORGET_AT * len(seats) * slots
        self._homes: dict[int, Seat] = {}  # where siblings went last; checked before it is believed

    def route(self, requests: Sequence[Request]) -> tuple[dict[int, list[Request]], list[Request]]:
        """Take a slot for each request as long as there are any: requests by seat, and those that have to wait."""
        rooms = [(-seat.free, seat.index) for seat in self._seats if seat.free > 0]  # one that is dead has none
        heapq.heapify(rooms)
        chosen: dict[int, list[Request]] = {}
        waiting: list[Request] = []
        for request in requests:
            key = sibling_key(request)
            seat = self._homes.get(key)
            if seat is None or seat.free <= 0 or key not in seat.prompts:
                seat = self._roomiest(rooms)
            if seat is None:
                waiting.append(request)
                continue
            self._homes[key] = seat
            seat.seat(request, key)
            chosen.setdefault(seat.index, []).append(request)
        if len(self._homes) > self._max_homes:
            self._homes = {key: seat for key, seat in self._homes.items() if key in seat.prompts}
        return chosen, waiting

    def _roomiest(self, rooms: list[tuple[int, int]]) -> Seat | None:
        """The seat with most free slots; what the heap says of it may be out of date, and is put right on the way."""
        while rooms:
            noted, index = rooms[0]
            seat = self._seats[index]
            if seat.free == -noted:
                return seat
            if seat.free > 0:
                heapq.heapreplace(rooms, (-seat.free, index))
            else:
                heapq.heappop(rooms)
        return None
