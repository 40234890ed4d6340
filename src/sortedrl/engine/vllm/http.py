"""vLLM behind HTTP: what a tower says to a server, and what it hears in its streams.

`server.py` makes the `HttpFront` of a server that it has found or started, and `engine.py` a `ServerTower`
over it. An HTTP connection keeps its own order and no other, so that a server cannot be frozen with everything heard as
AsyncLLM can. The tower has one move instead: let the server end all streams, each behind its last token, and ask again
for those that go on. What it keeps true is then what `Tower` does; the KV of what goes on is found again in the prefix
cache, or, under other weights, computed again.
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
from sortedrl.engine.vllm.request import Flight
from sortedrl.engine.vllm.request_loop import Tower
from sortedrl.errors import EngineError

log = logging.getLogger(__name__)

_AGAIN_S = 0.05  # after a pause, until what reached the server behind it is ended as well
_CONNECT_S = 10.0
_NOT_A_NUMBER = -9999.0  # how a server writes a log-prob that JSON cannot
_GENERATE = "/inference/v1/generate"


@dataclass(slots=True, frozen=True)
class Score:
    logprob: float


@dataclass(slots=True, kw_only=True, frozen=True)
class VersionSpan:
    version: str


@dataclass(slots=True, kw_only=True, frozen=True)
class Written:
    """Tokens of one chunk, as AsyncLLM gives them."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Score]] = field(default_factory=list)
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] = field(default_factory=list)

    @classmethod
    def read(cls, choice: dict[str, Any]) -> Written:
        entries = (choice.get("logprobs") or {}).get("content") or []
        return cls(
            token_ids=choice.get("token_ids") or [],
            logprobs=[{entry["token_id"]: Score(_number(entry["logprob"]))} for entry in entries],
            finish_reason=choice.get("finish_reason"),
            weight_versions=[VersionSpan(version=span["version"]) for span in choice.get("weight_versions") or []],
        )


@dataclass(slots=True, kw_only=True, frozen=True)
class Heard:
    outputs: list[Written]
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Score] | None] | None = None
    num_cached_tokens: int = 0  # a server does not tell


class HttpFront:
    """Calls of one server. `has_noise`: its worker has our extension."""

    def __init__(self, address: str, *, slots: int, has_noise: bool = True) -> None:
        self.has_noise = has_noise
        limits = httpx.Limits(max_connections=slots + 8, max_keepalive_connections=slots + 8)
        # A stream may be silent while others are served; whether vLLM answers at all is watched by the engine.
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        self.client = httpx.AsyncClient(base_url=address, timeout=timeout, limits=limits, trust_env=False)

    async def post(self, path: str, body: dict[str, Any] | None = None, **query: str) -> Any:
        response = await self.client.post(path, json=body or {}, params=query)
        if response.status_code != httpx.codes.OK:
            if not await self.is_healthy():
                raise httpx.ConnectError("the vLLM server is gone")
            raise EngineError(f"the vLLM server refused {path} ({response.status_code}): {response.text[:300]}")
        return response.json() if response.content else None

    async def rpc(self, method: str, *args: Any, **named: Any) -> None:
        await self.post("/collective_rpc", {"method": method, "args": list(args), "kwargs": named})

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

    async def update_weight_version(self, version: str) -> None:
        await self.post("/update_weight_version", {"new_version": version})

    async def is_healthy(self) -> bool:
        try:
            response = await self.client.get("/health", timeout=_CONNECT_S)
        except httpx.TransportError:
            return False
        return response.status_code == httpx.codes.OK

    async def is_without_tokens(self) -> bool:
        """Whether the server refuses requests in tokens; a server that does not writes one."""
        params = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
        response = await self.client.post(_GENERATE, json={"token_ids": [0], "sampling_params": params})
        return response.status_code in (httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND)

    def body(self, flight: Flight, version: int) -> dict[str, Any]:
        """The request of a flight."""
        params = flight.params(dict, None)
        del params["output_kind"]
        request = flight.attempt.request
        if not self.has_noise:
            del params["extra_args"]
            sampling = request.sampling
            params |= {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
            params["seed"] = _segment_seed(request.seed, len(flight.attempt.tokens))
        return {
            "request_id": f"{request.sample}-{request.attempt}",
            "token_ids": flight.tokens(),
            "sampling_params": params,
            "cache_salt": f"version {version}",
        }


class HttpStream:
    """The outputs of one flight, in their order: the verdict on its cached tokens, then what is written behind them.

    A stream cannot carry the verdict, so a replay asks twice; the second time finds the KV of the first.
    """

    def __init__(self, front: HttpFront, flight: Flight, version: int) -> None:
        self._front, self._flight, self._version = front, flight, version
        self._tokens = flight.tokens()
        self._response: httpx.Response | None = None
        self._lines: AsyncIterator[str] | None = None

    async def get(self) -> Heard:
        if self._flight.is_stopped and self._lines is None:
            return self._heard(Written(finish_reason="abort"))  # it was not asked for yet, or was ended meanwhile
        if self._flight.is_checking:
            return await self._verdict()
        if self._lines is None:
            body = self._front.body(self._flight, self._version) | {"stream": True}
            request = self._front.client.build_request("POST", _GENERATE, json=body)
            self._response = await self._front.client.send(request, stream=True)
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
                written = Written.read(chunk["choices"][0])
                if written.finish_reason is not None:
                    await self.close()
                return self._heard(written)
        raise ConnectionError("a stream of the vLLM server ended before its answer")

    async def close(self) -> None:
        """A server aborts a request whose connection is closed."""
        if self._response is not None:
            await self._response.aclose()

    async def _verdict(self) -> Heard:
        body = self._front.body(self._flight, self._version)
        body["sampling_params"] |= {"max_tokens": 1}
        response = await self._front.client.post(_GENERATE, json=body)
        if response.status_code != httpx.codes.OK:
            return await self._failed(response.text)
        answer = response.json()
        positions = answer.get("prompt_logprobs")
        if not positions:
            return self._heard(Written(finish_reason="abort"))
        read = [
            entry and {int(token): Score(found["logprob"]) for token, found in entry.items()} for entry in positions
        ]
        versions = Written.read(answer["choices"][0]).weight_versions
        return self._heard(Written(weight_versions=versions), read)

    async def _failed(self, text: str) -> Heard:
        """A request that failed on a server that lives has failed alone."""
        log.warning("the vLLM server refused a request: %s", text[:300])
        await self.close()
        if not await self._front.is_healthy():
            raise ConnectionError("the vLLM server is gone")
        return self._heard(Written(finish_reason="error"))

    def _heard(self, written: Written, prompt_logprobs: list[dict[int, Score] | None] | None = None) -> Heard:
        return Heard(outputs=[written], prompt_token_ids=self._tokens, prompt_logprobs=prompt_logprobs)


class ServerTower(Tower):
    """The tower of a server."""

    front: HttpFront | None

    async def stop(self, flights: list[Flight], *, is_all: bool) -> None:
        front = await self._halt(flights)
        await front.resume()
        await self._go_on()

    async def swap(self, version: int, weights: str, in_flight: InFlight) -> None:
        is_running = bool(self.flights)
        assert self.front is not None, "weights are taken up by a server that is there"
        if is_running:
            await self._halt([])
        await self.front.take_weights(weights)
        await self.front.update_weight_version(str(version))
        self.version = version
        if is_running:
            await self.front.resume()
            await self._go_on()

    async def _halt(self, stopped: list[Flight]) -> HttpFront:
        """End all streams behind their last token: these flights land, and the others are parked."""
        assert self.front is not None, "flights are in the hands of a server"
        for flight in self.flights.values():
            flight.is_stopped, flight.is_parked = True, not any(flight is other for other in stopped)
        tasks = {flight.task for flight in self.flights.values() if flight.task is not None}
        await self.front.pause()
        while tasks:
            _, tasks = await asyncio.wait(tasks, timeout=_AGAIN_S)
            if tasks:
                await self.front.abort_all()
        for flight in self.flights.values():
            self.deliver(flight)
        return self.front

    async def _go_on(self) -> None:
        parked = [flight for flight in self.flights.values() if flight.is_parked]
        for flight in parked:
            flight.is_parked = flight.is_stopped = False
        await self.launch(parked)

    async def _ask(self, flight: Flight) -> None:
        assert self.front is not None, "a flight is asked of a server that is there"
        flight.collector = HttpStream(self.front, flight, self.version)
        flight.is_started, flight.is_open = False, True

    async def _abort(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            await flight.collector.close()


def _number(logprob: float) -> float:
    return logprob if logprob > _NOT_A_NUMBER else math.nan


def _segment_seed(seed: int, position: int) -> int:
    """For a server that draws by itself: a seed of its own for what is written from a position on."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=7).digest())
