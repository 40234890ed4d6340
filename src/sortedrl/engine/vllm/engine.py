# pyright: reportMissingImports=false
"""The vLLM engine: real vLLM behind the protocol of `engine/base.py`, with shared noise and replay.

`run/builders/engine.py` makes it, and the controller drives it like any other engine. Processes and threads:

    this process                                          vLLM's processes
    controller's thread: VllmEngine                       EngineCore: vLLM's scheduler
      submit, interrupt, publish --call--+                  |  one step after another
      poll: waits on loop.changed        |                Worker: model, KV cache; worker.py in it
                ^ events                 v                  (our noise, verification, weights)
    event loop's thread: RequestLoop ("sortedrl-vllm")      ^
      one task per VllmRequest reads its outputs            |
      AsyncLLM ---------------- ZeroMQ ---------------------+
      or HttpFrontend -- HTTP -- API server process --------+

- The controller's thread never touches a running request. It hands a coroutine to the event loop (`VllmProcess.call`)
  and waits for its result, or until vLLM has died or was silent for `limit_s`.
- `poll` waits until an attempt ends, its timeout passes, or vLLM is lost. The event loop's thread never waits for it.
- `VllmProcess` (`process.py`) is one running vLLM: `CoreProcess` (`core.py`) or `ServerProcess` (`server.py`). The
  engine replaces it when it dies. The `RequestLoop` (`request_loop.py`, for a server `http.py`) outlives it.
- Weights travel from the learner's processes straight to vLLM's workers, by vLLM's own transfer (`transfer/`). Adapters
  travel by file (`adapter.py`), and so do weights for a server that was started without a transfer (`weights.py`).
- The abort flag (`abort_flag.py`) is one byte of shared memory, which the event loop writes and the worker reads.

Guarantees, beyond the protocol:
- vLLM's core executes an interrupt: no token is lost, and nothing is decoded after it;
- KV that was computed under other weights is never read: prefixes are cached under the version's name;
- when vLLM dies, does not answer for `limit_s`, does not take weights within `publish_s`, or cannot sleep or wake, its
  samples come back as interrupted with every token that had arrived, and the next `submit` starts another vLLM with the
  current weights. A vLLM that has started before and does not start again is lost too. `MAX_LOSSES` losses in a row
  without a finished answer end the run instead. In a pool, which alone has the weights for another start, the loss is
  raised to the pool.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sortedrl.engine.attempt import Attempt
from sortedrl.engine.base import (
    OWN_NOISE,
    Capabilities,
    CompletedHandle,
    EngineEvent,
    EngineStats,
    Failed,
    Finished,
    InFlight,
    Partial,
    Request,
    Verified,
)
from sortedrl.engine.local.module_decoder import Geometry
from sortedrl.engine.replay_probe import ReplayEvidence
from sortedrl.engine.request_checks import check_limits, check_submit, find_fault
from sortedrl.engine.sampling.noise import SCHEME
from sortedrl.engine.sleep_state import SleepState
from sortedrl.engine.vllm.adapter import AdapterFolder
from sortedrl.engine.vllm.core import CoreProcess, check_installed
from sortedrl.engine.vllm.http import HttpRequestLoop
from sortedrl.engine.vllm.memory import BLOCK, choose_memory, needed_kv_bytes
from sortedrl.engine.vllm.process import StepCounts, VllmLost, VllmProcess, VllmSettings
from sortedrl.engine.vllm.request import VllmRequest
from sortedrl.engine.vllm.request_loop import Load, RequestLoop
from sortedrl.engine.vllm.runner_choice import CPU_PLAN, RunnerWishes, find_backend_fault, plan_runner, read_platform
from sortedrl.engine.vllm.server import ServerProcess
from sortedrl.engine.vllm.shared_memory import check_room
from sortedrl.engine.vllm.transfer.client import LocalClient
from sortedrl.engine.vllm.transfer.link import Ticket, WeightLink, choose_transfer, is_meta, receive
from sortedrl.engine.vllm.weights import WeightFolder
from sortedrl.engine.vllm.worker_report import WorkerReport
from sortedrl.errors import EngineError, SortedRLError, WeightsNotReceived, first_line
from sortedrl.records import Mode
from sortedrl.weights import ModuleWeights, base_copy, is_adapted

log = logging.getLogger(__name__)

MAX_LOSSES = 3
FILTER_ORDER = "vLLM's V2 runner applies min-p before top-p, other engines after it: set one of the two filters"


class VllmEngine:
    """Samples from a transformers causal language model, whose weights vLLM receives.

    `dtype`: of weights and KV in vLLM; None means the model's. `kv_bytes`: memory for the KV cache of each device; None
    means what `memory_share` of the device leaves, on a CPU enough for all slots at full length. `limit_s`: how long
    vLLM may be silent; `start_s` and `publish_s`: how long a start and a publication may take; `rank_timeout_s`: how
    long the learner's ranks wait for each other. `decode`: turns tokens into text, which is searched for stop strings.
    `address`: the vLLM server to use. `port`: where to start one. Without either, AsyncLLM runs in this process. A
    named server gets the adapters of a peft model merged.
    `transfer`: how weights arrive: `gloo`, `nccl` or `ipc` (vLLM's weight transfer), `file`, or `auto`.
    `keeps_copy`: the published weights may change later, so keep a copy for a restart. `stream_s`: how often tokens of
    running requests are delivered; 0: only at their end. A model without memory (on `meta`) gets its weights with the
    first publication. `wishes`: graphs, scheduling and batch invariance, where the platform's best is not wanted
    (`runner_choice.py`). `sleeps`: allocate memory so that it can be freed during updates; not for servers.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: int,
        max_length: int,
        dtype: torch.dtype | None = None,
        kv_bytes: int | None = None,
        limit_s: float = 300.0,
        decode: Callable[[list[int]], str] | None = None,
        address: str = "",
        port: int = 0,
        tensor_parallel: int = 1,
        is_spread: bool = False,
        memory_share: float | None = None,
        start_s: float = 900.0,
        publish_s: float = 600.0,
        rank_timeout_s: float = math.inf,
        transfer: str = "auto",
        keeps_copy: bool = False,
        stream_s: float = 0.0,
        wishes: RunnerWishes | None = None,
        sleeps: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not address:
            check_installed()
        adapted, model = model, base_copy(model) if is_adapted(model) else model
        geometry = Geometry.of(model)
        check_limits(slots=slots, max_length=max_length, model_length=geometry.max_length)
        self._slots, self._max_length, self._vocab = slots, max_length, geometry.vocab
        self._dtype = dtype or next(model.parameters()).dtype
        self._limit_s, self._clock, self._decode = limit_s, clock, decode
        self._publish_s, self._rank_timeout_s = publish_s, rank_timeout_s
        self._stream_s, self._streamed_at = stream_s, clock()
        self._address, self._port = address, port
        backend = "file"
        if not address and not is_adapted(adapted):
            backend = choose_transfer(transfer, model, is_server=bool(port), tensor_parallel=tensor_parallel)
        self._keeps_copy = keeps_copy and backend != "file"
        self._link = None if backend == "file" else self._make_link(backend, tensor_parallel)
        is_empty = self._link is not None and not self._keeps_copy
        self._source = ModuleWeights(model) if is_empty and not is_meta(model) else None  # the weights in force
        self._joined: str | None = None  # session of the transfer that vLLM's workers have joined
        self._num_starts = 0
        check_room(tensor_parallel)
        self._request_loop = HttpRequestLoop(clock) if self._is_server else RequestLoop(clock)
        self._counts = StepCounts()
        self._num_losses = self._num_losses_in_row = 0
        self._is_closed = False
        self._evidence: ReplayEvidence | None = None
        self._sleep_state = SleepState()
        plan = CPU_PLAN if address else plan_runner(read_platform(), wishes or RunnerWishes())
        self._weights = WeightFolder(model, self._dtype, has_weights=not is_empty)
        self._adapter = self._make_adapter_folder(adapted)
        del model, adapted  # a copy of the base, which is in the folder now, must not stay while vLLM starts
        self._settings = VllmSettings(
            folder=self._weights.path,
            slots=slots,
            max_length=max_length,
            dtype=str(self._dtype).removeprefix("torch."),
            block_size=BLOCK,
            tensor_parallel=tensor_parallel,
            is_spread=is_spread,
            transfer="" if self._link is None else backend,
            starts_empty=is_empty,
            start_s=start_s,
            **choose_memory(
                kv_bytes, memory_share, needed_kv_bytes(geometry, slots, max_length, self._dtype, tensor_parallel)
            ),
            adapter=None if self._adapter is None else self._adapter.settings,
            plan=plan,
            sleeps=sleeps and not self._is_server,
        )
        self._process: VllmProcess | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    # ---- the protocol -----------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            slots=self._slots,
            exact_replay=self._is_exact,
            keep_kv=not self._is_server,
            waits=False,
            noise=SCHEME if self._has_noise else OWN_NOISE,
            replay_probe="" if self._evidence is None else str(self._evidence),
            sleeps=self._settings.sleeps,
        )

    @property
    def workers(self) -> list[WorkerReport]:
        """What vLLM's workers run; empty for a server without our worker extension."""
        return self._workers

    @property
    def is_stock(self) -> bool:
        """Whether vLLM's own sampler draws."""
        return self._request_loop.is_stock

    @property
    def needs_probe(self) -> bool:
        """Whether replay may be exact and nothing has shown it: on CPUs, tests of float32 have."""
        return self._may_be_exact and self._evidence is None and not self._is_on_cpu

    def take_evidence(self, evidence: ReplayEvidence) -> None:
        """From now on promise exact replay only if the evidence shows it."""
        self._evidence = evidence

    @property
    def _is_exact(self) -> bool:
        is_shown = self._is_on_cpu if self._evidence is None else self._evidence.is_exact
        return self._may_be_exact and is_shown

    @property
    def _may_be_exact(self) -> bool:
        """Decode and prefill can agree in float32, or where vLLM computes independently of the batch."""
        is_invariant = bool(self._workers) and all(
            worker.is_batch_invariant and find_backend_fault(worker.attention_backends) is None
            for worker in self._workers
        )
        return self._has_noise and (self._dtype == torch.float32 or is_invariant)

    @property
    def _is_on_cpu(self) -> bool:
        return all(worker.device.startswith("cpu") for worker in self._workers)

    @property
    def _is_server(self) -> bool:
        return bool(self._address or self._port)

    @property
    def num_running(self) -> int:
        return len(self._request_loop.running)

    def submit(self, requests: Iterable[Request]) -> None:
        requests = list(requests)
        check_submit(len(requests), running=self.num_running, slots=self._slots, is_closed=self._is_closed)
        self._sleep_state.check_awake()
        prepared = [vllm_request for request in requests if (vllm_request := self._prepare(request)) is not None]
        if prepared:
            if self._process is None:
                self._restart()
            self._request_loop.add(prepared)
            if self._request_loop.loss is None:  # if vLLM is or gets lost here, the next poll gives them back
                self._call(self._request_loop.start(prepared))

    def poll(self, timeout: float | None = None) -> list[EngineEvent]:
        request_loop, deadline = self._request_loop, math.inf if timeout is None else self._clock() + timeout
        with request_loop.changed:
            while request_loop.running and not request_loop.num_ends and request_loop.loss is None:
                now = self._clock()
                if now - request_loop.last_output_at > self._limit_s:
                    request_loop.loss = f"vLLM did not answer for {self._limit_s:g} s"
                elif now >= deadline:
                    break
                else:
                    request_loop.changed.wait(min(deadline - now, self._limit_s))
        if request_loop.loss is not None:
            self._return_lost_requests()
        elif request_loop.num_ends and self._process is not None:
            self._process.drain_loop()  # so that attempts that ended in the same step are returned together
        request_loop.num_ends = 0
        if self._stream_s and self._clock() - self._streamed_at >= self._stream_s:
            self._streamed_at = self._clock()
            self._call(request_loop.deliver_all())
        return request_loop.take_events()

    def interrupt(self, samples: Iterable[int] | None = None) -> list[EngineEvent]:
        request_loop, chosen = self._request_loop, None if samples is None else set(samples)
        stopped = [r for sample, r in list(request_loop.running.items()) if chosen is None or sample in chosen]
        if stopped:
            self._call(request_loop.stop(stopped, is_all=len(stopped) == self.num_running))
            self._refresh_counts()
        if request_loop.loss is not None:
            self._return_lost_requests()
        return request_loop.take_events(chosen)

    def publish(self, version: int, source: Any, in_flight: InFlight = InFlight.ABORT) -> CompletedHandle:
        if in_flight is InFlight.ABORT:
            assert not self.num_running, "weights published with abort while samples run: interrupt them first"
        if self._sleep_state.begin_publication():
            self._call_or_lose(self._request_loop.wake("weights"), "get memory for its weights")
        if isinstance(source, Ticket):
            self._redeem(version, source, in_flight)
        elif self._adapter is not None:
            self._adapter.write(source.adapter)
            self._swap(version, self._request_loop.load_adapter, in_flight)
        elif self._link is None:
            self._weights.write(source.module)
            self._swap(version, self._load_file, in_flight)
        else:
            if self._keeps_copy:
                self._weights.write(source.module)
            else:
                self._source = source
            self._send(version, source, in_flight)
        self._refresh_counts()
        if self._request_loop.loss is not None:
            self._return_lost_requests()  # before `version` changes: older weights wrote these tokens
        self._request_loop.version = version
        return CompletedHandle()

    def sleep(self) -> None:
        """vLLM frees the memory of its weights and its KV cache. On a CPU it only changes its state."""
        self._sleep_state.begin_sleep(self.num_running)
        self._call_or_lose(self._request_loop.sleep(), "free its memory")
        if self._request_loop.loss is not None:
            self._return_lost_requests()  # now: the update needs the memory

    def wake(self) -> None:
        self._sleep_state.begin_wake()
        self._call_or_lose(self._request_loop.wake("kv_cache"), "get memory for its KV cache")
        if self._request_loop.loss is not None:
            self._return_lost_requests()

    def stats(self) -> EngineStats:
        request_loop, counts = self._request_loop, self._counts
        with request_loop.changed:
            request_loop.count_busy()
            return replace(
                request_loop.stats,
                running=self.num_running,
                decode_steps=counts.steps,
                slot_steps=counts.steps * self.capabilities.slots,
                busy_slot_steps=min(request_loop.stats.decoded_tokens, counts.steps * self.capabilities.slots),
                extra={
                    "preemptions": counts.preemptions,
                    "kv_usage": counts.kv_usage,
                    "kv_usage_peak": counts.kv_usage_peak,
                    "kv_bytes": self._settings.kv_bytes,
                    "losses": self._num_losses,
                },
            )

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        process, self._process = self._process, None
        try:
            if process is not None:
                process.close()
        finally:
            self._request_loop.clear()
            self._request_loop.frontend = None
            self._weights.close()
            if self._link is not None:
                self._link.close()

    @property
    def pids(self) -> list[int]:
        """The pids of vLLM's processes, the core first. Tests and benchmarks kill them."""
        return [] if self._process is None else self._process.pids

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _prepare(self, request: Request) -> VllmRequest | None:
        """The request in the form for vLLM; None if it fails or is complete without vLLM."""
        request_loop = self._request_loop
        assert request.sample not in request_loop.running, f"sample {request.sample} is running already"
        error = find_fault(request, max_length=self._max_length, vocab=self._vocab, has_decode=self._decode is not None)
        if error is None and self.is_stock and request.sampling.top_p < 1 and request.sampling.min_p > 0:
            error = FILTER_ORDER
        if error is not None:
            request_loop.emit(Failed, request, is_end=True, error=error)
            return None
        vllm_request = VllmRequest.begin(Attempt.begin(request, self._decode))
        if request.mode is Mode.REPLAY and not vllm_request.is_verifying:
            request_loop.emit(Verified, request, cached=0, accepted=0)
        if vllm_request.is_complete:
            request_loop.deliver(vllm_request)
            request_loop.emit(Finished, request, is_end=True, reason=vllm_request.attempt.ending)
            return None
        return vllm_request

    def _make_adapter_folder(self, model: Any) -> AdapterFolder | None:
        """Write the model's adapters, if it has some, into the folder that requests will name."""
        if not is_adapted(model):
            return None
        assert not self._address, "a named server gets merged weights"
        try:
            folder = AdapterFolder(self._weights.path / "adapter", model)
        except BaseException:
            self._weights.close()
            raise
        self._request_loop.adapter = folder.path
        return folder

    def _start(self) -> None:
        """Start vLLM, and give it the weights in force if it has started without."""
        self._process = self._start_process()
        self._num_starts += 1
        self._joined = None
        if self._source is None:
            return
        self._send(self._request_loop.version, self._source, InFlight.ABORT)
        if self._request_loop.loss is not None and self._num_starts == 1:  # a later loss is dealt with by `poll`
            loss, self._request_loop.loss = self._request_loop.loss, None
            process, self._process = self._process, None
            process.close(is_lost=True)
            raise EngineError(f"vLLM failed right after its start ({loss}): see vLLM's messages above")

    def _restart(self) -> None:
        """Start vLLM again. It has started with these settings before, so a failure counts as another loss."""
        try:
            self._start()
        except EngineError as error:
            if self._address:  # only its user can start a named server
                raise
            self._request_loop.loss = str(error)

    def _start_process(self) -> VllmProcess:
        if not self._address:
            log.info("starting vLLM, which takes ten seconds to minutes")
        process: VllmProcess
        if self._is_server:
            process = ServerProcess(
                self._settings, self._counts, limit_s=self._limit_s, address=self._address, port=self._port
            )
        else:
            process = CoreProcess(self._settings, self._counts, limit_s=self._limit_s)
        self._request_loop.frontend, self._request_loop.flag = process.frontend, process.flag
        self._request_loop.is_stock = any(worker.is_v2 for worker in process.workers)
        self._has_noise, self._workers = process.has_noise, process.workers
        try:
            if self._request_loop.adapter is not None:
                process.call(self._request_loop.load_adapter())
            process.call(process.frontend.update_weight_version(str(self._request_loop.version)))
        except VllmLost as error:
            process.close(is_lost=True)
            raise EngineError(f"vLLM failed right after its start ({error}): see vLLM's messages above") from error
        except Exception as error:
            process.close()
            if self._adapter is None:
                raise
            raise EngineError(f"vLLM cannot load the adapters ({error}): set lora.merge = true") from error
        return process

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _make_link(self, backend: str, num_workers: int) -> WeightLink:
        return WeightLink(
            backend=backend,
            dtype=self._dtype,
            num_workers=num_workers,
            limit_s=self._publish_s,
            rank_timeout_s=self._rank_timeout_s,
            is_local=True,
        )

    def _send(self, version: int, source: Any, in_flight: InFlight) -> None:
        """Transfer the weights of `source` to vLLM; after two failures vLLM counts as lost."""
        assert self._link is not None, "weights are sent by transfer"
        why: str | None = None
        for _ in range(2):
            if self._process is None or self._request_loop.loss is not None:
                break
            if self._link.backend == "ipc":
                client = LocalClient(self._process, limit_s=self._publish_s)
                load: Load = partial(self._send_by, source, client)
            else:
                (ticket,) = self._link.begin(source, [self._num_starts])
                load = partial(self._receive, ticket)
            why = None
            try:
                self._swap(version, load, in_flight)
            except SortedRLError:
                raise
            except Exception as error:  # raised by vLLM's workers
                why, self._joined = first_line(error), None
            if self._request_loop.loss is not None:
                self._link.abandon()
                return
            why = self._link.finish() or why
            if why is None:
                return
            log.warning("vLLM did not get the weights of version %d (%s)", version, why)
        if why is not None:
            self._request_loop.loss = f"vLLM did not get the weights of version {version} ({why})"

    def _redeem(self, version: int, ticket: Ticket, in_flight: InFlight) -> None:
        """In a pool: receive weights that the driver has the learner send to all engines."""
        try:
            self._swap(version, partial(self._receive, ticket), in_flight)
        except Exception as error:
            self._joined = None
            raise WeightsNotReceived(f"version {version} did not arrive ({first_line(error)})") from error

    async def _send_by(self, source: Any, client: LocalClient) -> None:
        assert self._link is not None, "weights are sent by transfer"
        await asyncio.to_thread(self._link.send_by, source, client, self._num_starts)

    async def _receive(self, ticket: Ticket) -> None:
        frontend: Any = self._request_loop.frontend
        await receive(frontend, ticket, self._joined)
        self._joined = ticket.session
        await frontend.collective_rpc("sorted_tie_head")

    async def _load_file(self) -> None:
        await self._request_loop.load_file(str(self._weights.weights))

    def _swap(self, version: int, load: Load, in_flight: InFlight) -> None:
        self._call(self._request_loop.swap_weights(version, load, in_flight), limit_s=self._publish_s)

    def _call(self, coroutine: Coroutine[Any, Any, None], limit_s: float | None = None) -> None:
        """Run a coroutine in the event loop of the current vLLM process; do nothing without one, or if it is lost."""
        if self._process is None or self._request_loop.loss is not None:
            coroutine.close()
            return
        try:
            self._process.call(coroutine, limit_s)
        except VllmLost as error:
            self._request_loop.loss = str(error)

    def _call_or_lose(self, coroutine: Coroutine[Any, Any, None], what: str) -> None:
        """The same for a call after whose failure vLLM is of no use: it counts as lost, and another one is started."""
        try:
            self._call(coroutine)
        except (SortedRLError, AssertionError):
            raise
        except Exception as error:  # raised by vLLM's workers
            self._request_loop.loss = f"vLLM could not {what} ({first_line(error)})"

    def _refresh_counts(self) -> None:
        if self._process is not None and self._request_loop.loss is None:
            self._call(self._process.refresh_counts())

    def _return_lost_requests(self) -> None:
        """End a lost vLLM, and make its samples come back as interrupted with the tokens that had arrived."""
        request_loop, process = self._request_loop, self._process
        loss, request_loop.loss, self._process, request_loop.frontend = request_loop.loss, None, None, None
        if process is not None:
            process.close(is_lost=True)
            request_loop.loss = None  # each reading task has set it again
        if request_loop.broken_invariant is not None:
            raise request_loop.broken_invariant
        lost = request_loop.clear()
        if self._link is not None and self._source is None and not self._keeps_copy:
            raise EngineError(f"{loss}; its pool replaces it")
        for request in lost:
            request_loop.deliver(request)
            request_loop.emit(Partial, request.attempt.request)
        self._num_losses += 1
        self._num_losses_in_row = 1 if request_loop.num_finished else self._num_losses_in_row + 1
        request_loop.num_finished = 0
        if self._num_losses_in_row >= MAX_LOSSES:
            raise EngineError(
                f"vLLM was lost {MAX_LOSSES} times in a row without a finished answer: see its messages above and the "
                f"system's (out of memory?), then resume the run; the last time: {loss}"
            )
        log.warning("vLLM was lost with %d samples running, which continue in a new one: %s", len(lost), loss)
