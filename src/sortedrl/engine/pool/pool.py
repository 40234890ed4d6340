"""Many engines as one: the controller sees one engine with the slots of all.

Members stand in processes of their own, here or elsewhere (`ray_members.py`); a pool knows them by `Member`, whose
calls return futures. One `take` is always under way at every member, so that news arrives by itself; an interrupt goes
to all members at once, takes one round trip, and lets them stand still until the next `poll`. One that names nobody
is a halt for an update: all stays where it is, unless the load is uneven; then some is interrupted, to go on elsewhere.

    submit --route--> member 0..n --take--> poll        a member dies: its samples come back as interrupted,
                        ^                                with what was last taken of them, and run elsewhere
    publish --put once--+                                while it is started again

What it keeps true: a request is at one member, or waits for room at one; an attempt ends exactly once, whatever becomes
of its member; every member decodes with the weights that were published last, one that was started again included.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from sortedrl.engine.base import (
    Capabilities,
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    InFlight,
    Partial,
    Request,
)
from sortedrl.engine.pool.actor_loop import Report
from sortedrl.engine.pool.member import MAX_DEATHS, Members, Seat
from sortedrl.engine.pool.router import Router
from sortedrl.errors import EngineError

TAKE_S = 0.5  # how long a member may keep tokens to itself: what a dead one takes with it
ENDS = (Finished, Partial, Failed)
EVEN_OUT_AT = 1.5  # times its share of what runs: a member with more, be it slow or unlucky, gives some back
BACK_OFF_S = (0.0, 1.0, 2.0, 5.0, 10.0)
BACK = "engine %d of the pool is back after %.2f s"  # in the log; benchmarks/pool_faults.py reads it there

logger = logging.getLogger(__name__)


class Pool:
    """`health_s`: a member that does not answer for so long is dead; `start_s`: how long one may take to start."""

    def __init__(
        self,
        members: Members,
        *,
        size: int,
        slots: int,
        exact_replay: bool,
        keep_kv: bool,
        waits: bool = False,
        health_s: float = 60.0,
        start_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._slots = slots
        self._capabilities = Capabilities(slots=size * slots, exact_replay=exact_replay, keep_kv=keep_kv, waits=waits)
        self._turn = 0  # counts interrupts
        self._health_s = health_s
        self._start_s = start_s
        self._clock = clock
        self._backlog: list[Request] = []
        self._unheard: list[EngineEvent] = []  # arrived during another call: the next poll or interrupt returns them
        self._published: tuple[int, Any] | None = None
        self._is_stored = True  # False: what was published last could not be stored
        self._num_restarts = 0
        self._seats = [Seat(index=index) for index in range(size)]
        self._router = Router(self._seats, slots)
        for seat in self._seats:
            self._launch(seat)
        self._await_start()

    # ---- the engine's protocol --------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def num_running(self) -> int:
        """Attempts whose end nobody has been told of."""
        untold = sum(isinstance(event, ENDS) for event in self._unheard)
        return len(self._backlog) + sum(len(seat.running) for seat in self._seats) + untold

    def submit(self, requests: Iterable[Request]) -> None:
        """Start requests, or keep those back for which no living member has room."""
        requests = list(requests)
        free = self._capabilities.slots - self.num_running
        if len(requests) > free:
            raise EngineError(f"{len(requests)} requests for {free} free slots: submit no more than are free")
        self._backlog.extend(requests)
        self._tend()

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        deadline = None if timeout is None else self._clock() + timeout
        for seat in self._seats:
            if seat.member is not None and seat.taking is None:
                self._ask(seat)  # after an interrupt
        while True:
            self._tend()
            heard = self._collect()
            if heard or not self.num_running:
                return heard
            left = TAKE_S if deadline is None else min(TAKE_S, deadline - self._clock())
            if left <= 0:
                return []
            self._wait_for_news(left)

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        wanted = None if samples is None else set(samples)
        kept_back = [r for r in self._backlog if wanted is None or r.sample in wanted]
        self._backlog = [r for r in self._backlog if not (wanted is None or r.sample in wanted)]
        heard: list[EngineEvent] = [self._partial(request) for request in kept_back]
        if wanted is not None and not wanted:
            wanted = self._surplus()
        asked: list[tuple[Seat, Future[Report]]] = []
        self._turn += 1
        for seat in self._seats:
            if seat.member is not None:
                there = None if wanted is None else list(wanted.intersection(seat.running))
                asked.append((seat, seat.member.interrupt(there, self._turn)))
        for seat, future in asked:
            heard.extend(self._settle(seat, future))
        heard = self._with_unheard(heard)
        if wanted is not None:
            self._unheard = [event for event in heard if event.sample not in wanted]
            heard = [event for event in heard if event.sample in wanted]
        return heard

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> _Publication:
        if in_flight is InFlight.ABORT:
            assert not self.num_running, "weights published with abort while samples run: interrupt them first"
        # The last are given up before the next come: what stores them once need not have room for them twice.
        self._published, self._is_stored = None, False
        weights = self._members.put(source)
        self._published, self._is_stored = (version, weights), True
        told = [
            (seat, seat.member.publish(version, weights, in_flight)) for seat in self._seats if seat.member is not None
        ]
        return _Publication(pool=self, told=told)

    def stats(self) -> EngineStats:
        """Sums over members. Asks the living; what the dead counted is kept as last heard."""
        asked = [(seat, seat.member.stats()) for seat in self._seats if seat.member is not None]
        for seat, future in asked:
            answer = self._answer(seat, future)
            if answer is not None:
                seat.stats = answer
        total = EngineStats()
        for seat in self._seats:
            total = total.plus(seat.stats).plus(seat.buried)
        total.running = self.num_running
        total.extra = {
            "members": [seat.stats.extra for seat in self._seats],
            "running_by_member": [len(seat.running) for seat in self._seats],
            "kept_back": len(self._backlog),
            "restarts": self._num_restarts,
        }
        return total

    def close(self) -> None:
        for seat in self._seats:
            for member in (seat.member, seat.start_member):
                if member is not None:
                    member.kill()
            seat.member = seat.start_member = None
        self._members.close()

    def _surplus(self) -> set[int]:
        """What should go on elsewhere, where slots are free: of an uneven load, the samples that were sent last."""
        living = [seat for seat in self._seats if seat.member is not None]
        share = math.ceil(sum(len(seat.running) for seat in living) / max(len(living), 1))
        uneven = (seat for seat in living if len(seat.running) > EVEN_OUT_AT * share)
        return {sample for seat in uneven for sample in list(seat.running)[share:]}

    def _dispatch(self) -> None:
        """Hand out what waits, as far as there is room."""
        if not self._backlog:
            return
        chosen, self._backlog = self._router.route(self._backlog)
        for index, requests in chosen.items():
            seat = self._seats[index]
            assert seat.member is not None, "routed to a dead member"
            seat.submitting.append((seat.member.submit(requests), requests))

    # ---- news -------------------------------------------------------------------------------------------------------

    def _wait_for_news(self, seconds: float) -> None:
        pending = [f for seat in self._seats for f in (seat.taking, seat.starting) if f is not None]
        if pending:
            wait(pending, timeout=seconds, return_when=FIRST_COMPLETED)
        else:
            time.sleep(min(seconds, 0.05))

    def _collect(self) -> list[EngineEvent]:
        """What has arrived; members that have been silent for too long are dead."""
        heard: list[EngineEvent] = []
        for seat in self._seats:
            if seat.taking is None:
                continue
            if seat.taking.done():
                heard.extend(self._settle(seat, None))
                heard.extend(self._refused(seat))
            elif self._clock() - seat.asked_at > self._health_s:
                self._bury(seat, f"it has not answered for {self._health_s:g} s")
        return self._with_unheard(heard)

    def _with_unheard(self, heard: list[EngineEvent]) -> list[EngineEvent]:
        """All that came since the last time; what ended with its member stands behind the tokens that it had sent."""
        ends = [event for event in self._unheard if isinstance(event, Partial)]
        others = [event for event in self._unheard if not isinstance(event, Partial)]
        self._unheard = []
        return [*others, *heard, *ends]

    def _settle(self, seat: Seat, reply: Future[Report] | None) -> list[EngineEvent]:
        """Take in the report that is under way, or that and the answer to an interrupt, in their order.

        The next is asked for at once, but after an interrupt only when somebody polls.
        """
        futures = [future for future in (seat.taking, reply) if future is not None]
        seat.taking = None
        reports = [report for future in futures if (report := self._answer(seat, future)) is not None]
        heard: list[EngineEvent] = []
        for report in sorted(reports, key=lambda report: report.number):
            heard += [event for event in report.events if self._is_current(seat, event)]
        if seat.member is not None and reply is None:
            self._ask(seat)
        return heard

    def _is_current(self, seat: Seat, event: EngineEvent) -> bool:
        """Whether an event is of an attempt at this member; one that ends it frees its slot."""
        request = seat.running.get(event.sample)
        if request is None or request.attempt != event.attempt:
            return False
        if isinstance(event, ENDS):
            seat.unseat(event.sample)
            if isinstance(event, Finished):
                seat.num_deaths = 0
        return True

    def _refused(self, seat: Seat) -> list[EngineEvent]:
        """Requests that a member did not take, although it lives."""
        refused: list[EngineEvent] = []
        under_way = []
        for future, requests in seat.submitting:
            if not future.done():
                under_way.append((future, requests))
            elif (error := future.exception()) is not None:
                for request in requests:
                    if seat.running.get(request.sample) is request:
                        seat.unseat(request.sample)
                        refused.append(
                            Failed(
                                sample=request.sample,
                                attempt=request.attempt,
                                clock=self._clock(),
                                error=_first_line(error),
                            )
                        )
        seat.submitting = under_way
        return refused

    def _ask(self, seat: Seat) -> None:
        assert seat.member is not None, "a dead member is asked"
        seat.taking = seat.member.take(TAKE_S, self._turn)
        seat.asked_at = self._clock()

    def _answer(self, seat: Seat, future: Future[Any]) -> Any:
        """The result of a call, or None when the member turns out to be dead."""
        try:
            return future.result(timeout=self._health_s)
        except TimeoutError:
            self._bury(seat, f"it has not answered for {self._health_s:g} s")
        except Exception as error:  # the engine's own, or of what carries the call when the process is gone
            self._bury(seat, _first_line(error))
        return None

    # ---- life and death ---------------------------------------------------------------------------------------------

    def _tend(self) -> None:
        """Start dead members again when it is time, welcome those that are up, hand out what waits."""
        for seat in self._seats:
            if seat.starting is not None and seat.starting.done():
                self._welcome(seat)
            elif seat.starting is not None and self._clock() - seat.asked_at > self._start_s:
                self._bury(seat, f"it did not come up within {self._start_s:g} s")
            elif seat.is_vacant and self._clock() >= seat.restart_at:
                self._num_restarts += 1
                self._launch(seat)
        if all(seat.is_given_up for seat in self._seats):
            raise EngineError(
                f"all {len(self._seats)} engines of the pool died {MAX_DEATHS} times without finishing an answer: see "
                "their logs, then resume the run"
            )
        self._dispatch()

    def _launch(self, seat: Seat) -> None:
        seat.start_member = self._members.launch(seat.index)
        seat.starting = seat.start_member.slots()
        seat.start_version, seat.asked_at = None, self._clock()

    def _welcome(self, seat: Seat) -> None:
        """A call to a member that starts has returned: it gets the weights in force, and then its first requests."""
        member, future = seat.start_member, seat.starting
        assert member is not None, "nobody was started"
        assert future is not None, "nobody was started"
        try:
            slots = future.result()
        except Exception as error:
            self._bury(seat, _first_line(error))
            return
        if not self._is_stored:
            return  # there is nothing to give it before the next publication
        assert slots in (None, self._slots), f"member {seat.index} has {slots} slots instead of {self._slots}"
        if self._published is not None and seat.start_version != self._published[0]:
            seat.start_version, weights = self._published  # others go on meanwhile, and may get yet another version
            seat.starting = member.publish(seat.start_version, weights, InFlight.ABORT)
            return
        seat.starting = seat.start_member = None
        seat.member, seat.free = member, self._slots
        if seat.num_deaths:
            logger.info(BACK, seat.index, self._clock() - seat.died_at)
        self._ask(seat)
        self._members.stock_up()

    def _await_start(self) -> None:
        """The first time all members must come up: what stops one would stop it again."""
        starting = [seat.starting for seat in self._seats if seat.starting is not None]
        done, late = wait(starting, timeout=self._start_s)
        failed = next((future.exception() for future in done if future.exception() is not None), None)
        if late or failed is not None:
            self.close()
            why = "did not come up" if failed is None else f"failed: {_first_line(failed)}"
            raise EngineError(
                f"an engine of the pool {why} within {self._start_s:g} s: see whether the cluster has the processors, "
                "memory and packages that engine.replicas asks for"
            )
        for seat in self._seats:
            self._welcome(seat)

    def _bury(self, seat: Seat, why: str) -> None:
        """End a member: what it ran comes back as interrupted, and its place is filled again after a while."""
        dead = seat.member or seat.start_member
        if dead is None:
            return  # two calls can find the same death
        dead.kill()
        left = seat.vacate()
        self._unheard.extend(self._partial(request) for request in left)
        logger.warning("engine %d of the pool is gone (%s): %d samples go back to wait", seat.index, why, len(left))
        seat.died_at = self._clock()
        seat.restart_at = seat.died_at + BACK_OFF_S[min(seat.num_deaths, len(BACK_OFF_S) - 1)]
        seat.num_deaths += 1

    def _partial(self, request: Request) -> Partial:
        return Partial(sample=request.sample, attempt=request.attempt, clock=self._clock())


@dataclass(slots=True, kw_only=True)
class _Publication:
    pool: Pool
    told: Sequence[tuple[Seat, Future[None]]]

    def wait(self) -> None:
        """Until every living member has the weights; one that fails is buried and gets them when it is up again."""
        for seat, future in self.told:
            self.pool._answer(seat, future)


def _first_line(error: BaseException) -> str:
    error = getattr(error, "cause", None) or error  # Ray's errors carry the one that was raised far away
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
