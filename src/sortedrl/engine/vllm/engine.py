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
- Weights travel by file (`weights.py`, `adapter.py`): `publish` writes, then the worker is told to read.
- The abort flag (`abort_flag.py`) is one byte of shared memory, which the event loop writes and the worker reads.

Guarantees, beyond the protocol:
- vLLM's core executes an interrupt: no token is lost, and nothing is decoded after it;
- KV that was computed under other weights is never read: prefixes are cached under the version's name;
- when vLLM dies, or does not answer for `limit_s`, its samples come back as interrupted with every token that had
  arrived, and the next `submit` starts another vLLM with the current weights. `MAX_LOSSES` losses in a row without a
  finished answer end the run instead.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
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
from sortedrl.engine.vllm.process import StepCounts, VllmLost, VllmProcess, VllmSettings
from sortedrl.engine.vllm.request import VllmRequest
from sortedrl.engine.vllm.request_loop import RequestLoop
from sortedrl.engine.vllm.runner_choice import CPU_PLAN, RunnerWishes, find_backend_fault, plan_runner, read_platform
from sortedrl.engine.vllm.server import ServerProcess
from sortedrl.engine.vllm.weights import WeightFolder
from sortedrl.engine.vllm.worker_report import WorkerReport
from sortedrl.errors import EngineError
from sortedrl.records import Mode
from sortedrl.weights import base_copy, is_adapted

log = logging.getLogger(__name__)

MAX_LOSSES = 3
FILTER_ORDER = "vLLM's V2 runner applies min-p before top-p, other engines after it: set one of the two filters"
_BLOCK = 32  # tokens per KV block: the smallest that CPU kernels accept, so that short prefixes are shared too


class VllmEngine:
    """Samples from a transformers causal language model, which vLLM loads from a copy of its weights.

    `dtype`: of weights and KV in vLLM; None means the model's. `kv_bytes`: memory for the KV cache; None means enough
    for all slots at full length. `limit_s`: how long vLLM may be silent. `decode`: turns tokens into text, which is
    searched for stop strings. `address`: the vLLM server to use. `port`: where to start one. Without either, AsyncLLM
    runs in this process; only there are the adapters of a peft model published unmerged. `wishes`: graphs, scheduling
    and batch invariance, where the platform's best is not wanted (`runner_choice.py`). `sleeps`: allocate memory so
    that it can be freed during updates; not for servers.
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
        self._address, self._port = address, port
        self._request_loop = HttpRequestLoop(clock) if self._is_server else RequestLoop(clock)
        self._counts = StepCounts()
        self._num_losses = self._num_losses_in_row = 0
        self._is_closed = False
        self._evidence: ReplayEvidence | None = None
        self._sleep_state = SleepState()
        plan = CPU_PLAN if address else plan_runner(read_platform(), wishes or RunnerWishes())
        self._weights = WeightFolder(model, self._dtype)
        self._adapter = self._make_adapter_folder(adapted)
        self._settings = VllmSettings(
            folder=self._weights.path,
            slots=slots,
            max_length=max_length,
            dtype=str(self._dtype).removeprefix("torch."),
            kv_bytes=kv_bytes or needed_kv_bytes(geometry, slots, max_length, self._dtype),
            block_size=_BLOCK,
            adapter=None if self._adapter is None else self._adapter.settings,
            plan=plan,
            sleeps=sleeps and not self._is_server,
        )
        self._process: VllmProcess | None = None
        try:
            self._process = self._start()
        except BaseException:
            self._weights.close()
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
                self._process = self._start()
            self._request_loop.add(prepared)
            self._call(self._request_loop.start(prepared))  # if vLLM is lost here, the next poll reports it

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
        if self._adapter is None:
            self._weights.write(source.module)
        else:
            self._adapter.write(source.adapter)
        if self._sleep_state.begin_publication():
            self._call(self._request_loop.wake("weights"))
        self._call(self._request_loop.swap_weights(version, str(self._weights.weights), in_flight))
        self._refresh_counts()
        if self._request_loop.loss is not None:
            self._return_lost_requests()  # before `version` changes: older weights wrote these tokens
        self._request_loop.version = version
        return CompletedHandle()

    def sleep(self) -> None:
        """vLLM frees the memory of its weights and its KV cache. On a CPU it only changes its state."""
        self._sleep_state.begin_sleep(self.num_running)
        self._call(self._request_loop.sleep())

    def wake(self) -> None:
        self._sleep_state.begin_wake()
        self._call(self._request_loop.wake("kv_cache"))
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
        assert not self._is_server, "a server gets merged weights"
        try:
            folder = AdapterFolder(self._weights.path / "adapter", model)
        except BaseException:
            self._weights.close()
            raise
        self._request_loop.adapter = folder.path
        return folder

    def _start(self) -> VllmProcess:
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

    def _call(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in the event loop of the current vLLM process; do nothing without one."""
        if self._process is None:
            coroutine.close()
            return
        try:
            self._process.call(coroutine)
        except VllmLost as error:
            self._request_loop.loss = str(error)

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
        for request in lost:
            request_loop.deliver(request)
            request_loop.emit(Partial, request.attempt.request)
        self._num_losses += 1
        self._num_losses_in_row = 1 if request_loop.num_finished else self._num_losses_in_row + 1
        request_loop.num_finished = 0
        if self._num_losses_in_row >= MAX_LOSSES:
            raise EngineError(
                f"{loss}, {MAX_LOSSES} times in a row without a finished answer: see its messages above and the "
                "system's (out of memory?), then resume the run"
            )
        log.warning("%s with %d samples running; they continue in a new vLLM process", loss, len(lost))


def needed_kv_bytes(geometry: Geometry, slots: int, max_length: int, dtype: torch.dtype) -> int:
    """Memory for the KV of all slots at full length, in whole blocks, plus one block that vLLM reserves."""
    per_token = 2 * geometry.num_layers * geometry.kv_heads * geometry.head_dim * dtype.itemsize
    blocks = slots * math.ceil(max_length / _BLOCK) + 1
    return blocks * _BLOCK * per_token
