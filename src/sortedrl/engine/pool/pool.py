"""A pool: many engines that look like one engine with the slots of all. It balances load and survives dead engines.

`run/builders/engine.py` makes it, and the controller drives it like any other engine. Processes and threads:

    this process, controller's thread                each engine's process (a Ray actor)
    Pool -- RemoteEngine: calls that return futures -->  ActorLoop: Ray's threads queue the calls as commands
      submit    -- Router picks a member -->               its one thread runs commands and decodes, and
      poll      <-- take: waits for events --              fills an outbox of events
      interrupt -- to all members at once -->              then it decodes nothing until the next poll's `take`
      publish   -- weights stored once -->                 loads the weights from Ray's object store,
                   or sent by a route                      or receives them from the learner's processes

- The pool has no thread. It does its work inside the controller's calls: `_maintain` restarts dead engines and sends
  waiting requests, in every `submit` and `poll`.
- One `take` is always open at every living engine, except during a pause, so events arrive without being asked for.
  `poll` waits for the first `take` that returns, at most `TAKE_S` at a time.
- An interrupt costs one round trip. With an empty list it pauses decoding for an update: all samples keep their slots,
  unless the load is uneven. Then the pool interrupts some samples, so that they continue on another engine.
- When an engine dies (a call fails, or does not return within `health_s`; a publication within `publish_s`), its
  samples come back as interrupted with the tokens last taken, and run elsewhere while the engine restarts.
- `sleep` puts all engines to sleep. One that is starting is waited for first, because it would take memory during the
  update. An engine that dies asleep is found out by the publication or by `wake`, and restarts after `wake`.
- With a `route`, all engines receive weights at the same time. If one dies meanwhile, the others are sent them again.
  An engine that restarts is sent the weights in force if these cannot change (`is_stable`), otherwise the next ones.

Guarantees: a request is at one engine, or waits in the pool for a free slot; an attempt ends exactly once, even if its
engine dies; every engine decodes with the weights published last, restarted ones included.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from sortedrl.engine.base import (
    OWN_NOISE,
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
from sortedrl.engine.pool.member import MAX_DEATHS, EngineLauncher, PoolMember, WeightRoute
from sortedrl.engine.pool.router import Router
from sortedrl.engine.replay_probe import ReplayEvidence
from sortedrl.engine.sleep_state import SleepState
from sortedrl.errors import EngineError, WeightsNotReceived

TAKE_S = 0.5  # an engine reports at least this often: a dead engine loses the tokens since its last report
ENDS = (Finished, Partial, Failed)
REBALANCE_AT = 1.5  # a member that runs more than this many times its share gives some samples up
BACK_OFF_S = (0.0, 1.0, 2.0, 5.0, 10.0)  # before a restart, by the number of deaths in a row
BACK = "engine %d of the pool is back after %.2f s"  # benchmarks/pool/pool_faults.py searches the log for it

logger = logging.getLogger(__name__)


class Pool:
    """`health_s`: an engine that does not answer for so long is dead. `start_s`: how long a start may take.

    `publish_s`: how long a publication may take. `route`: sends weights past this process; without it they are stored
    by the launcher. `is_stable`: the learner changes weights only right before a publication.
    """

    def __init__(
        self,
        launcher: EngineLauncher,
        *,
        size: int,
        slots: int,
        exact_replay: bool,
        keep_kv: bool,
        waits: bool = False,
        sleeps: bool = False,
        noise: str = OWN_NOISE,
        health_s: float = 60.0,
        start_s: float = 900.0,
        publish_s: float = 600.0,
        route: WeightRoute | None = None,
        is_stable: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._launcher = launcher
        self._route = route
        self._is_stable = is_stable
        self._publish_s = publish_s
        self._slots = slots
        self._capabilities = Capabilities(
            slots=size * slots, exact_replay=exact_replay, keep_kv=keep_kv, waits=waits, noise=noise, sleeps=sleeps
        )
        self._sleep_state = SleepState()
        self._pause_id = 0  # number of interrupts
        self._health_s = health_s
        self._start_s = start_s
        self._clock = clock
        self._backlog: list[Request] = []
        self._undelivered: list[EngineEvent] = []  # arrived during another call; the next one returns them
        self._published: tuple[int, Any] | None = None
        self._is_stored = True  # False: the last publication could not be stored
        self._num_restarts = 0
        self._members = [PoolMember(index=index) for index in range(size)]
        self._router = Router(self._members, slots)
        for member in self._members:
            self._launch(member)
        self._wait_for_start()

    # ---- the engine's protocol --------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def take_evidence(self, evidence: ReplayEvidence) -> None:
        """From now on promise exact replay only if the evidence shows it."""
        is_exact = self._capabilities.exact_replay and evidence.is_exact
        self._capabilities = replace(self._capabilities, exact_replay=is_exact, replay_probe=str(evidence))

    @property
    def num_running(self) -> int:
        """Attempts whose last event the caller has not received."""
        undelivered = sum(isinstance(event, ENDS) for event in self._undelivered)
        return len(self._backlog) + sum(len(member.running) for member in self._members) + undelivered

    def submit(self, requests: Iterable[Request]) -> None:
        """Start requests. Those for which no living member has a free slot wait in the pool."""
        self._sleep_state.check_awake()
        requests = list(requests)
        free = self._capabilities.slots - self.num_running
        if len(requests) > free:
            raise EngineError(f"{len(requests)} requests for {free} free slots: submit no more than are free")
        self._backlog.extend(requests)
        self._maintain()

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        deadline = None if timeout is None else self._clock() + timeout
        for member in self._members:
            if member.engine is not None and member.taking is None:
                self._request_events(member)  # ends the pause of an interrupt
        while True:
            self._maintain()
            events = self._collect()
            if events or not self.num_running:
                return events
            left = TAKE_S if deadline is None else min(TAKE_S, deadline - self._clock())
            if left <= 0:
                return []
            self._wait_for_reports(left)

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        wanted = None if samples is None else set(samples)
        waiting = [r for r in self._backlog if wanted is None or r.sample in wanted]
        self._backlog = [r for r in self._backlog if not (wanted is None or r.sample in wanted)]
        events: list[EngineEvent] = [self._partial(request) for request in waiting]
        if wanted is not None and not wanted:
            wanted = self._surplus()
        asked: list[tuple[PoolMember, Future[Report]]] = []
        self._pause_id += 1
        for member in self._members:
            if member.engine is not None:
                there = None if wanted is None else list(wanted.intersection(member.running))
                asked.append((member, member.engine.interrupt(there, self._pause_id)))
        for member, future in asked:
            events.extend(self._read_reports(member, future))
        events = self._with_undelivered(events)
        if wanted is not None:
            self._undelivered = [event for event in events if event.sample not in wanted]
            events = [event for event in events if event.sample in wanted]
        return events

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> _Publication:
        if in_flight is InFlight.ABORT:
            assert not self.num_running, "weights published with abort while samples run: interrupt them first"
        self._sleep_state.begin_publication()
        # Release the old weights before the new ones are stored, so that the store needs room for one copy only.
        self._published, self._is_stored = None, False
        weights = self._launcher.put(source) if self._route is None else source
        self._published, self._is_stored = (version, weights), True
        joining = [] if self._route is None or self._is_stable else [m for m in self._members if m.has_started]
        members = [member for member in self._members if member.engine is not None] + joining
        return _Publication(
            pool=self, members=members, joining=joining, in_flight=in_flight, offers=self._offer(members, in_flight)
        )

    def sleep(self) -> None:
        self._sleep_state.begin_sleep(self.num_running)
        self._wait_for_restarts()
        self._on_all([(member, member.engine.sleep()) for member in self._members if member.engine is not None])

    def wake(self) -> None:
        self._sleep_state.begin_wake()
        self._on_all([(member, member.engine.wake()) for member in self._members if member.engine is not None])

    def _on_all(self, calls: Sequence[tuple[PoolMember, Future[None]]]) -> None:
        """Wait for these calls. A member whose call fails is retired."""
        for member, future in calls:
            self._result(member, future)

    def stats(self) -> EngineStats:
        """The sum over all engines. Dead ones count with their last report."""
        asked = [(member, member.engine.stats()) for member in self._members if member.engine is not None]
        for member, future in asked:
            stats = self._result(member, future)
            if stats is not None:
                member.stats = stats
        total = EngineStats()
        for member in self._members:
            total = total.plus(member.stats).plus(member.stats_of_dead)
        total.running = self.num_running
        total.extra = {
            "members": [member.stats.extra for member in self._members],
            "running_by_member": [len(member.running) for member in self._members],
            "kept_back": len(self._backlog),
            "restarts": self._num_restarts,
        }
        return total

    def close(self) -> None:
        for member in self._members:
            for engine in (member.engine, member.starting_engine):
                if engine is not None:
                    engine.kill()
            member.engine = member.starting_engine = None
        try:
            if self._route is not None:
                self._route.close()
        finally:
            self._launcher.close()

    def _surplus(self) -> set[int]:
        """The samples to move to other members when the load is uneven: those that were sent last."""
        living = [member for member in self._members if member.engine is not None]
        share = math.ceil(sum(len(member.running) for member in living) / max(len(living), 1))
        uneven = (member for member in living if len(member.running) > REBALANCE_AT * share)
        return {sample for member in uneven for sample in list(member.running)[share:]}

    def _dispatch(self) -> None:
        """Send waiting requests to members with free slots."""
        if not self._backlog:
            return
        chosen, self._backlog = self._router.route(self._backlog)
        for index, requests in chosen.items():
            member = self._members[index]
            assert member.engine is not None, "a request was routed to a dead member"
            member.submitting.append((member.engine.submit(requests), requests))

    # ---- events -----------------------------------------------------------------------------------------------------

    def _wait_for_reports(self, seconds: float) -> None:
        pending = [f for member in self._members for f in (member.taking, member.starting) if f is not None]
        if pending:
            self._launcher.wait_any(pending, seconds)
        else:
            time.sleep(min(seconds, 0.05))

    def _collect(self) -> list[EngineEvent]:
        """The events that have arrived. Members that were silent for too long are retired."""
        events: list[EngineEvent] = []
        for member in self._members:
            if member.taking is None:
                continue
            if member.taking.done():
                events.extend(self._read_reports(member, None))
                events.extend(self._refused_requests(member))
            elif self._clock() - member.asked_at > self._health_s:
                self._retire(member, f"it has not answered for {self._health_s:g} s")
        return self._with_undelivered(events)

    def _with_undelivered(self, events: list[EngineEvent]) -> list[EngineEvent]:
        """These events and the undelivered ones. A Partial of a dead member comes after the tokens that it had sent."""
        ends = [event for event in self._undelivered if isinstance(event, Partial)]
        others = [event for event in self._undelivered if not isinstance(event, Partial)]
        self._undelivered = []
        return [*others, *events, *ends]

    def _read_reports(self, member: PoolMember, reply: Future[Report] | None) -> list[EngineEvent]:
        """The events of the open `take`, and of `reply`, the answer to an interrupt, in their order.

        Without an interrupt the next `take` is opened at once; after one, the next `poll` does that.
        """
        futures = [future for future in (member.taking, reply) if future is not None]
        member.taking = None
        reports = [report for future in futures if (report := self._result(member, future)) is not None]
        events: list[EngineEvent] = []
        for report in sorted(reports, key=lambda report: report.number):
            events += [event for event in report.events if self._is_current(member, event)]
        if member.engine is not None and reply is None:
            self._request_events(member)
        return events

    def _is_current(self, member: PoolMember, event: EngineEvent) -> bool:
        """Whether an event belongs to an attempt at this member. The end of an attempt frees its slot."""
        request = member.running.get(event.sample)
        if request is None or request.attempt != event.attempt:
            return False
        if isinstance(event, ENDS):
            member.release(event.sample)
            if isinstance(event, Finished):
                member.num_deaths = 0
        return True

    def _refused_requests(self, member: PoolMember) -> list[EngineEvent]:
        """Failures for requests that a living member refused."""
        failures: list[EngineEvent] = []
        done = [(future, requests) for future, requests in member.submitting if future.done()]
        member.submitting = [entry for entry in member.submitting if entry not in done]
        for future, requests in done:
            error = future.exception()
            if error is None:
                continue
            for request in requests:
                if member.running.get(request.sample) is request:
                    member.release(request.sample)
                    failures.append(Failed(request.sample, request.attempt, self._clock(), _first_line(error)))
        return failures

    def _request_events(self, member: PoolMember) -> None:
        assert member.engine is not None, "a dead member cannot be asked for events"
        member.taking = member.engine.take(TAKE_S, self._pause_id)
        member.asked_at = self._clock()

    def _result(self, member: PoolMember, future: Future[Any]) -> Any:
        """The result of a call; None if it shows that the member's engine is dead, which is then retired."""
        try:
            return future.result(timeout=self._health_s)
        except TimeoutError:
            self._retire(member, f"it has not answered for {self._health_s:g} s")
        except Exception as error:  # raised by the engine, or by Ray if its process is gone
            self._retire(member, _first_line(error))
        return None

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _offer(self, members: Sequence[PoolMember], in_flight: InFlight) -> list[Future[None]]:
        """Let the engines of these members load the published weights, all at the same time."""
        assert self._published is not None, "weights were published"
        version, weights = self._published
        engines = [engine for member in members if (engine := member.engine or member.starting_engine) is not None]
        assert len(engines) == len(members), "weights are offered to members that have an engine"
        if not engines:
            return []
        offered = [weights] * len(engines) if self._route is None else self._route.begin(weights, engines)
        return [engine.publish(version, item, in_flight) for engine, item in zip(engines, offered, strict=True)]

    def _complete(self, members: Sequence[PoolMember], offers: Sequence[Future[None]], in_flight: InFlight) -> None:
        """Wait until these members have the weights. What was cut off is sent again; a member that fails is retired."""
        behind = self._wait_for_weights(members, offers)
        why = None if self._route is None or not offers else self._route.finish()
        if not behind:
            return
        logger.warning("a transfer of weights broke off (%s): %d engines get them again", why, len(behind))
        still_behind = self._wait_for_weights(behind, self._offer(behind, in_flight))
        why = None if self._route is None else self._route.finish()
        for member in still_behind:
            self._retire(member, f"it did not get the weights, twice ({why})")

    def _wait_for_weights(self, members: Sequence[PoolMember], offers: Sequence[Future[None]]) -> list[PoolMember]:
        """Wait for these publications. Returns the members that are alive and were cut off; dead ones are retired."""
        deadline = self._clock() + self._publish_s
        behind: list[PoolMember] = []
        for member, future in zip(members, offers, strict=True):
            try:
                future.result(timeout=max(0.0, deadline - self._clock()))
            except TimeoutError:
                self._retire(member, f"it did not load weights within {self._publish_s:g} s")
            except WeightsNotReceived:
                behind.append(member)
            except Exception as error:  # raised by the engine, or by Ray if its process is gone
                self._retire(member, _first_line(error))
        return behind

    # ---- starts and deaths ------------------------------------------------------------------------------------------

    def _maintain(self) -> None:
        """Restart dead engines when it is time, activate those that have started, send waiting requests."""
        if not self._sleep_state.is_awake:
            return  # the learner has the memory that a new engine would take
        for member in self._members:
            if member.starting is not None and member.starting.done():
                self._activate(member)
            elif member.starting is not None and self._clock() - member.asked_at > self._start_s:
                self._retire(member, f"it did not start within {self._start_s:g} s")
            elif member.needs_restart and self._clock() >= member.restart_at:
                self._num_restarts += 1
                self._launch(member)
        if all(member.is_given_up for member in self._members):
            raise EngineError(
                f"all {len(self._members)} engines of the pool died {MAX_DEATHS} times without finishing an answer: "
                "see their logs, then resume the run"
            )
        self._dispatch()

    def _launch(self, member: PoolMember) -> None:
        member.starting_engine = self._launcher.launch(member.index)
        member.starting = member.starting_engine.slots()
        member.start_version, member.asked_at = None, self._clock()

    def _activate(self, member: PoolMember) -> None:
        """A starting engine has answered: give it the current weights; if it has them, let the member use it."""
        engine, future = member.starting_engine, member.starting
        assert engine is not None, "no engine is starting"
        assert future is not None, "no engine is starting"
        try:
            slots = future.result()
        except Exception as error:
            self._retire(member, _first_line(error))
            return
        is_fed = self._route is not None and self._published is not None
        if not self._is_stored or (is_fed and not self._is_stable):
            return  # the next publication brings its weights
        assert slots in (None, self._slots), f"member {member.index} has {slots} slots instead of {self._slots}"
        if is_fed:  # in this call: the weights may change after it
            self._complete([member], self._offer([member], InFlight.ABORT), InFlight.ABORT)
            if member.starting_engine is None:
                return
        elif self._published is not None and member.start_version != self._published[0]:
            member.start_version = self._published[0]  # a newer version may come meanwhile
            (member.starting,) = self._offer([member], InFlight.ABORT)
            return
        self._use(member)

    def _use(self, member: PoolMember) -> None:
        """A member's new engine has the weights in force: send requests to it."""
        engine = member.starting_engine
        member.starting = member.starting_engine = None
        member.engine, member.free = engine, self._slots
        if member.num_deaths:
            logger.info(BACK, member.index, self._clock() - member.died_at)
        self._request_events(member)
        self._launcher.prepare_spare()

    def _wait_for_restarts(self) -> None:
        """Wait until engines that are starting are up. They may lack weights, which the next publication brings."""
        for member in self._members:
            if member.starting is None:
                continue
            try:
                member.starting.result(timeout=max(0.0, member.asked_at + self._start_s - self._clock()))
            except TimeoutError:
                self._retire(member, f"it did not start within {self._start_s:g} s")
            except Exception as error:  # raised by the engine, or by Ray if its process is gone
                self._retire(member, _first_line(error))
            else:
                self._use(member)

    def _wait_for_start(self) -> None:
        """Wait for all engines of a new pool. An error here ends the pool: a retry would fail in the same way."""
        deadline = self._clock() + self._start_s
        late = [member.starting for member in self._members if member.starting is not None]
        failed: BaseException | None = None
        while late and failed is None and (left := deadline - self._clock()) > 0:
            self._launcher.wait_any(late, left)
            failed = next((future.exception() for future in late if future.done() and future.exception()), None)
            late = [future for future in late if not future.done()]
        if late or failed is not None:
            self.close()
            why = "did not start" if failed is None else f"failed: {_first_line(failed)}"
            raise EngineError(
                f"an engine of the pool {why} within {self._start_s:g} s: see whether the cluster has the processors, "
                "memory and packages that engine.replicas asks for"
            )
        for member in self._members:
            self._activate(member)

    def _retire(self, member: PoolMember, why: str) -> None:
        """Kill a member's engine: its samples come back as interrupted, and a new engine starts after a while."""
        dead = member.engine or member.starting_engine
        if dead is None:
            return  # another call has found the same death
        dead.kill()
        lost = member.remove_engine()
        self._undelivered.extend(self._partial(request) for request in lost)
        logger.warning(
            "engine %d of the pool is gone (%s): %d samples will run on another engine", member.index, why, len(lost)
        )
        member.died_at = self._clock()
        member.restart_at = member.died_at + BACK_OFF_S[min(member.num_deaths, len(BACK_OFF_S) - 1)]
        member.num_deaths += 1

    def _partial(self, request: Request) -> Partial:
        return Partial(sample=request.sample, attempt=request.attempt, clock=self._clock())


@dataclass(slots=True, kw_only=True)
class _Publication:
    pool: Pool
    members: Sequence[PoolMember]
    joining: Sequence[PoolMember]  # those of them that have just started and get their first weights
    in_flight: InFlight
    offers: Sequence[Future[None]]

    def wait(self) -> None:
        """Wait until every living engine has the weights. One that fails is retired and gets them when it restarts."""
        self.pool._complete(self.members, self.offers, self.in_flight)
        for member in self.joining:
            if member.starting_engine is not None:
                self.pool._use(member)


def _first_line(error: BaseException) -> str:
    error = getattr(error, "cause", None) or error  # errors of Ray carry the one raised in the actor
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
