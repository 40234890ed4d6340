"""vLLM over HTTP: the calls to a server, and the request loop that reads its streams.

`server.py` makes the `HttpFrontend` of a server, and `engine.py` an `HttpRequestLoop` on top of it. The order of
messages is only defined within one HTTP connection. So, unlike AsyncLLM, a server cannot be paused with all outputs
read. Instead the loop lets the server end all streams, each after its last token, and then sends those requests
again that shall continue. The guarantees are those of `RequestLoop`. Requests that continue find their KV in the
prefix cache, or, under new weights, compute it again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

from sortedrl.engine.base import InFlight
from sortedrl.engine.vllm.request import VllmRequest
from sortedrl.engine.vllm.request_loop import Load, RequestLoop
from sortedrl.errors import EngineError

log = logging.getLogger(__name__)

_ABORT_AGAIN_S = 0.05  # requests can reach the server after its pause: abort again until all streams have ended
_CONNECT_S = 10.0
_NOT_A_NUMBER = -9999.0  # stands for NaN and -inf, which JSON cannot express
_GENERATE = "/inference/v1/generate"


@dataclass(slots=True, frozen=True)
class TokenScore:
    logprob: float


@dataclass(slots=True, kw_only=True, frozen=True)
class VersionSpan:
    version: str


@dataclass(slots=True, kw_only=True, frozen=True)
class StreamedTokens:
    """The tokens of one chunk, with the attributes of AsyncLLM's CompletionOutput."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, TokenScore]] = field(default_factory=list)
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] = field(default_factory=list)

    @classmethod
    def read(cls, choice: dict[str, Any]) -> StreamedTokens:
        entries = (choice.get("logprobs") or {}).get("content") or []
        return cls(
            token_ids=choice.get("token_ids") or [],
            logprobs=[{entry["token_id"]: TokenScore(_number(entry["logprob"]))} for entry in entries],
            finish_reason=choice.get("finish_reason"),
            weight_versions=[VersionSpan(version=span["version"]) for span in choice.get("weight_versions") or []],
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class HttpOutput:
    """One output of a request, with the attributes of AsyncLLM's RequestOutput."""

    outputs: list[StreamedTokens]
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, TokenScore] | None] | None = None
    num_cached_tokens: int = 0  # a server does not report it


class HttpFrontend:
    """The calls to one server. `has_noise`: its worker runs our extension. `is_stock`: its own sampler draws (V2)."""

    def __init__(self, address: str, *, slots: int, has_noise: bool = True) -> None:
        self.has_noise = has_noise
        self.is_stock = False
        self.adapter_name = ""  # of the adapters that requests ask for
        self._num_adapters = 0
        limits = httpx.Limits(max_connections=slots + 8, max_keepalive_connections=slots + 8)
        # A stream may be silent while others are served: the engine checks whether vLLM answers at all.
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        self.client = httpx.AsyncClient(base_url=address, timeout=timeout, limits=limits, trust_env=False)

    async def post(self, path: str, body: dict[str, Any] | None = None, **query: str) -> Any:
        response = await self.client.post(path, json=body or {}, params=query)
        if response.status_code != httpx.codes.OK:
            if not await self.is_healthy():
                raise httpx.ConnectError("the vLLM server is gone")
            raise EngineError(f"the vLLM server refused {path} ({response.status_code}): {response.text[:300]}")
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json and response.content else None

    async def rpc(self, method: str, *args: Any, **named: Any) -> list[Any]:
        """Call a method of every worker; returns their results."""
        answer = await self.post("/collective_rpc", {"method": method, "args": list(args), "kwargs": named})
        return (answer or {}).get("results", [])

    async def pause(self) -> None:
        await self.post("/pause", mode="abort", clear_cache="false")

    async def resume(self) -> None:
        await self.post("/resume")

    async def abort_all(self) -> None:
        await self.post("/abort_requests")

    async def take_weights(self, path: str) -> None:
        if self.has_noise:
            await self.rpc("sorted_take_weights", path)
        else:
            await self.rpc("reload_weights", weights_path=path.rpartition("/")[0])

    async def load_adapter(self, path: str) -> None:
        """Load adapters under a new name: a server that loads them in place would do so again in every step."""
        before, self._num_adapters = self.adapter_name, self._num_adapters + 1
        self.adapter_name = f"sortedrl-{self._num_adapters}"
        if before:
            await self.post("/v1/unload_lora_adapter", {"lora_name": before})
        await self.post("/v1/load_lora_adapter", {"lora_name": self.adapter_name, "lora_path": path})

    # Weight transfer, with the names and arguments of AsyncLLM's methods.

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> None:
        await self.rpc(method, *args)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self.post("/init_weight_transfer_engine", {"init_info": request.init_info})

    async def start_weight_update(self) -> None:
        await self.post("/start_weight_update")

    async def update_weights(self, request: Any) -> None:
        await self.post("/update_weights", {"update_info": request.update_info})

    async def finish_weight_update(self) -> None:
        await self.post("/finish_weight_update")

    async def reset_prefix_cache(self) -> None:
        await self.post("/reset_prefix_cache")

    async def update_weight_version(self, version: str) -> None:
        await self.post("/update_weight_version", {"new_version": version})

    async def is_healthy(self) -> bool:
        try:
            response = await self.client.get("/health", timeout=_CONNECT_S)
        except httpx.TransportError:
            return False
        return response.status_code == httpx.codes.OK

    async def accepts_tokens(self) -> bool:
        """Whether the server accepts prompts as tokens. It is asked for one token to find out."""
        params = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
        response = await self.client.post(_GENERATE, json={"token_ids": [0], "sampling_params": params})
        return response.status_code not in (httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND)

    def body(self, vllm_request: VllmRequest, version: int) -> dict[str, Any]:
        """The JSON body of a request."""
        params = vllm_request.sampling_params(dict, None, is_stock=self.is_stock)
        del params["output_kind"]
        request = vllm_request.attempt.request
        if not self.has_noise:
            del params["extra_args"]
            sampling = request.sampling
            params |= {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
            params["seed"] = _segment_seed(request.seed, len(vllm_request.attempt.tokens))
        return {
            "request_id": f"{request.sample}-{request.attempt}",
            "token_ids": vllm_request.tokens(),
            "sampling_params": params,
            "cache_salt": f"version {version}",
            **({"model": self.adapter_name} if self.adapter_name else {}),
        }


class HttpStream:
    """The outputs of one request in order: the verification of its cached tokens, then the tokens after them.

    A stream cannot carry the verification, so a replay sends two requests; the second finds the KV of the first.
    """

    def __init__(self, frontend: HttpFrontend, request: VllmRequest, version: int) -> None:
        self._frontend, self._request, self._version = frontend, request, version
        self._tokens = request.tokens()
        self._response: httpx.Response | None = None
        self._lines: AsyncIterator[str] | None = None

    async def get(self) -> HttpOutput:
        if self._request.is_stopped and self._lines is None:
            return self._output(StreamedTokens(finish_reason="abort"))  # interrupted before its stream began
        if self._request.is_verifying:
            return await self._verify()
        if self._lines is None:
            body = self._frontend.body(self._request, self._version) | {"stream": True}
            post = self._frontend.client.build_request("POST", _GENERATE, json=body)
            self._response = await self._frontend.client.send(post, stream=True)
            if self._response.status_code != httpx.codes.OK:
                await self._response.aread()
                return await self._failed(self._response.text)
            self._lines = aiter(self._response.aiter_lines())
        async for line in self._lines:
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return await self._failed(line)
            if chunk["choices"]:
                streamed = StreamedTokens.read(chunk["choices"][0])
                if streamed.finish_reason is not None:
                    await self.close()
                return self._output(streamed)
        raise ConnectionError("a stream of the vLLM server ended before its answer was complete")

    async def close(self) -> None:
        """Close the connection; the server then aborts the request."""
        if self._response is not None:
            await self._response.aclose()

    async def _verify(self) -> HttpOutput:
        body = self._frontend.body(self._request, self._version)
        body["sampling_params"] |= {"max_tokens": 1}
        response = await self._frontend.client.post(_GENERATE, json=body)
        if response.status_code != httpx.codes.OK:
            return await self._failed(response.text)
        answer = response.json()
        positions = answer.get("prompt_logprobs")
        if not positions:
            return self._output(StreamedTokens(finish_reason="abort"))
        read = [
            entry and {int(token): TokenScore(found["logprob"]) for token, found in entry.items()}
            for entry in positions
        ]
        versions = StreamedTokens.read(answer["choices"][0]).weight_versions
        return self._output(StreamedTokens(weight_versions=versions), read)

    async def _failed(self, text: str) -> HttpOutput:
        """The output of a refused request. Raises `ConnectionError` if the server itself is gone."""
        log.warning("the vLLM server refused a request: %s", text[:300])
        await self.close()
        if not await self._frontend.is_healthy():
            raise ConnectionError("the vLLM server is gone")
        return self._output(StreamedTokens(finish_reason="error"))

    def _output(
        self, streamed: StreamedTokens, prompt_logprobs: list[dict[int, TokenScore] | None] | None = None
    ) -> HttpOutput:
        return HttpOutput(outputs=[streamed], prompt_token_ids=self._tokens, prompt_logprobs=prompt_logprobs)


class HttpRequestLoop(RequestLoop):
    """The request loop of a server."""

    frontend: HttpFrontend | None

    async def stop(self, requests: list[VllmRequest], *, is_all: bool) -> None:
        frontend = await self._pause_all(requests)
        await frontend.resume()
        await self._restart_parked()

    async def load_file(self, path: str) -> None:
        assert self.frontend is not None, "weights are published to a running server"
        await self.frontend.take_weights(path)

    async def load_adapter(self) -> None:
        assert self.frontend is not None, "adapters are published to a running server"
        await self.frontend.load_adapter(str(self.adapter))

    async def swap_weights(self, version: int, load: Load, in_flight: InFlight) -> None:
        is_running = bool(self.running)
        assert self.frontend is not None, "weights are published to a running server"
        if is_running:
            await self._pause_all([])
        await load()
        await self.frontend.reset_prefix_cache()
        await self.frontend.update_weight_version(str(version))
        self.version = version
        if is_running:
            await self.frontend.resume()
            await self._restart_parked()

    async def _pause_all(self, stopped: list[VllmRequest]) -> HttpFrontend:
        """End all streams after their last token: the `stopped` requests end, the others are parked."""
        assert self.frontend is not None, "requests run on a server"
        for request in self.running.values():
            request.is_stopped, request.is_parked = True, not any(request is other for other in stopped)
        tasks = {request.task for request in self.running.values() if request.task is not None}
        await self.frontend.pause()
        while tasks:
            _, tasks = await asyncio.wait(tasks, timeout=_ABORT_AGAIN_S)
            if tasks:
                await self.frontend.abort_all()
        for request in self.running.values():
            self.deliver(request)
        return self.frontend

    async def _restart_parked(self) -> None:
        parked = [request for request in self.running.values() if request.is_parked]
        for request in parked:
            request.is_parked = request.is_stopped = False
        await self.start(parked)

    async def _send(self, request: VllmRequest) -> None:
        assert self.frontend is not None, "requests are sent to a running server"
        request.collector = HttpStream(self.frontend, request, self.version)
        request.is_started, request.is_open = False, True

    async def _abort(self, requests: Iterable[VllmRequest]) -> None:
        for request in requests:
            await request.collector.close()


def _number(logprob: float) -> float:
    return logprob if logprob > _NOT_A_NUMBER else math.nan


def _segment_seed(seed: int, position: int) -> int:
    """The seed for tokens from `position` on, for a server that draws with its own noise."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=7).digest())
