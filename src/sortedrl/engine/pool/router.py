"""Decides which member of a pool gets a request: siblings go to one member, other requests where most slots are free.

The pool calls it; nothing here talks to engines. Guarantees: a request goes to a living member with a free slot, or to
none; a decision costs the same for two members and for hundreds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from sortedrl.engine.base import Request
from sortedrl.engine.pool.member import PoolMember, sibling_key

_HOMES_PER_SLOT = 4  # with more entries per slot, `_homes` drops prompts that no longer run


class Router:
    def __init__(self, members: Sequence[PoolMember], slots: int) -> None:
        self._members = members
        self._max_homes = _HOMES_PER_SLOT * len(members) * slots
        self._homes: dict[int, PoolMember] = {}  # where siblings went last; the entry may be out of date

    def route(self, requests: Sequence[Request]) -> tuple[dict[int, list[Request]], list[Request]]:
        """Take a slot for each request while there are any. Returns requests by member, and those that must wait."""
        by_room = [(-member.free, member.index) for member in self._members if member.free > 0]  # a dead one has none
        heapq.heapify(by_room)
        chosen: dict[int, list[Request]] = {}
        waiting: list[Request] = []
        for request in requests:
            key = sibling_key(request)
            member = self._homes.get(key)
            if member is None or member.free <= 0 or key not in member.num_siblings:
                member = self._with_most_room(by_room)
            if member is None:
                waiting.append(request)
                continue
            self._homes[key] = member
            member.assign(request, key)
            chosen.setdefault(member.index, []).append(request)
        if len(self._homes) > self._max_homes:
            self._homes = {key: member for key, member in self._homes.items() if key in member.num_siblings}
        return chosen, waiting

    def _with_most_room(self, by_room: list[tuple[int, int]]) -> PoolMember | None:
        """The member with most free slots. Entries of the heap may be out of date; they are corrected on the way."""
        while by_room:
            noted, index = by_room[0]
            member = self._members[index]
            if member.free == -noted:
                return member
            if member.free > 0:
                heapq.heapreplace(by_room, (-member.free, index))
            else:
                heapq.heappop(by_room)
        return None
