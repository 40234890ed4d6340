"""`sortedrl dashboard`: run directories in a browser, following along while runs write.

The command line calls `serve`. The server reads run directories and nothing else; a browser asks for the list of runs,
for one sample, and keeps one connection open on which the parts of the page that have changed are sent (server-sent
events). What it keeps true: nothing is ever written, only runs under the given folders are read, every answer forbids
the page to load from or send to elsewhere, names other than loopback's are refused on loopback, and beyond loopback
nothing is answered without the token. Memory is bounded: views are, and only a few are kept.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio.to_thread
import uvicorn
from plotly.offline import get_plotlyjs
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sortedrl.errors import ConfigError, RunDirError, SortedRLError
from sortedrl.telemetry.dashboard.auth import Gate
from sortedrl.telemetry.dashboard.run_list import check_places, find_runs, run_line
from sortedrl.telemetry.dashboard.sample_page import Decode, tell_sample
from sortedrl.telemetry.report.page import Parts, asset, page_parts
from sortedrl.telemetry.run_reader import RunReader

MIN_TOKEN = 16  # characters
_MAX_VIEWS = 8  # runs held folded
_MAX_SHOWN = 6  # runs on one page
_LOOK_S = 1.0  # between two looks at the files, and how long one look reads
_QUIET_S = 15.0  # a sign of life where nothing changes
_ASSETS = {"page.css": "text/css", "page.js": "text/javascript", "dashboard.css": "text/css"}
_ASSETS["dashboard.js"] = "text/javascript"


@dataclass(slots=True, kw_only=True, frozen=True)
class Look:
    """Some runs at one moment: how far they are read and, once that is to the end, what their page says."""

    stamp: tuple[object, ...]
    progress: float = 1.0
    parts: Parts | None = None
    problem: str = ""


@dataclass(slots=True, kw_only=True)
class RunViews:
    """The runs that somebody looks at, folded as far as their files go; the least recently seen are forgotten."""

    readers: OrderedDict[Path, RunReader] = field(default_factory=OrderedDict)
    looks: OrderedDict[tuple[Path, ...], Look] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def look(self, paths: Sequence[Path]) -> Look:
        """Read on, for a moment at most, and say how things stand."""
        with self.lock:  # one page at a time: readers and places belong to it
            try:
                return self._look(tuple(paths))
            except SortedRLError as error:
                for path in paths:
                    self.readers.pop(path, None)  # it may be mended, or be another run tomorrow
                return Look(stamp=("problem", str(error)), problem=str(error))

    def _look(self, paths: tuple[Path, ...]) -> Look:
        readers = [self._reader(path) for path in paths]
        until = time.monotonic() + _LOOK_S
        for reader in readers:
            while reader.read_more():
                if time.monotonic() > until:
                    done = sum(reader.file.offset for reader in readers)
                    return Look(stamp=("reading", done), progress=done / max(sum(r.file.size for r in readers), 1))
            if reader.view.run is None:
                raise RunDirError(f"{reader.file.path} tells of no run yet: it lacks RunStarted")
            reader.read_summary()
        stamp = tuple((r.view.num_events, r.file.offset, r.is_live, r.view.recorded is not None) for r in readers)
        last = self.looks.get(paths)
        if last is None or last.stamp != stamp:
            self.looks[paths] = last = Look(stamp=stamp, parts=page_parts(readers))
        self.looks.move_to_end(paths)
        while len(self.looks) > 2:
            self.looks.popitem(last=False)
        return last

    def _reader(self, path: Path) -> RunReader:
        reader = self.readers.setdefault(path, RunReader(path))
        self.readers.move_to_end(path)
        while len(self.readers) > _MAX_VIEWS:
            self.readers.popitem(last=False)
        return reader


class Dashboard:
    """The routes. `decoder` gives a run's way to spell tokens, or None."""

    def __init__(self, places: Sequence[Path], *, decoder: Callable[[Path], Decode | None] | None = None) -> None:
        check_places(places)
        self.places = list(places)
        self.views = RunViews()
        self._decoder = decoder
        self._decoders: dict[Path, Decode | None] = {}
        self._decoder_lock = threading.Lock()
        self.plotly = get_plotlyjs()

    def app(self, *, hosts: Sequence[str], token: str | None) -> Starlette:
        routes = [
            Route("/", self.page),
            Route("/assets/{name}", self.file),
            Route("/api/runs", self.runs),
            Route("/api/follow", self.follow),
            Route("/api/sample", self.sample),
        ]
        middleware = [Middleware(Gate, token=token), Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))]
        return Starlette(routes=routes, middleware=middleware)

    async def page(self, request: Request) -> Response:
        return Response(asset("dashboard.html"), media_type="text/html")

    async def file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name == "plotly.js":
            return Response(self.plotly, media_type="text/javascript", headers={"cache-control": "max-age=3600"})
        if name not in _ASSETS:
            return Response("no such file", status_code=404)
        return Response(asset(name), media_type=_ASSETS[name])

    async def runs(self, request: Request) -> Response:
        found = await anyio.to_thread.run_sync(find_runs, self.places)
        lines = [await anyio.to_thread.run_sync(run_line, key, path) for key, path in found.items()]
        lines.sort(key=lambda line: -line.changed)
        return JSONResponse({"runs": [asdict(line) for line in lines], "places": [str(place) for place in self.places]})

    async def sample(self, request: Request) -> Response:
        key, number = request.query_params.get("run", ""), request.query_params.get("sample", "")
        path = (await anyio.to_thread.run_sync(find_runs, self.places)).get(key)
        if path is None:
            return JSONResponse({"problem": f"there is no run {key!r}"}, status_code=404)
        if not number.isdecimal() or len(number) > 12:
            return JSONResponse({"problem": f"{number!r} is no number of a sample"})
        try:
            return JSONResponse(await anyio.to_thread.run_sync(self._tell, path, int(number)))
        except SortedRLError as error:  # a run without a ledger, a sample that is not in it: an answer too
            return JSONResponse({"problem": str(error)})

    def _tell(self, path: Path, sample: int) -> dict[str, Any]:
        with self._decoder_lock:
            return tell_sample(path, sample, lambda: self._decode_of(path))

    def _decode_of(self, path: Path) -> Decode | None:
        if self._decoders.get(path) is None:
            self._decoders[path] = self._decoder(path) if self._decoder is not None else None
            while len(self._decoders) > _MAX_VIEWS:
                self._decoders.pop(next(iter(self._decoders)))
        return self._decoders[path]

    async def follow(self, request: Request) -> Response:
        keys = request.query_params.getlist("run")
        found = await anyio.to_thread.run_sync(find_runs, self.places)
        unknown = [key for key in keys if key not in found]
        if unknown or not keys or len(keys) > _MAX_SHOWN:
            problem = f"there is no run {unknown[0]!r}" if unknown else f"choose 1 to {_MAX_SHOWN} runs"
            return JSONResponse({"problem": problem}, status_code=404)
        stream = self._changes([found[key] for key in dict.fromkeys(keys)])
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _changes(self, paths: Sequence[Path]) -> AsyncIterator[str]:
        """What has changed since the last message, whenever something has."""
        sent: dict[str, str] = {}
        stamp: tuple[object, ...] | None = None
        quiet_since = time.monotonic()
        while True:
            began = time.monotonic()
            look = await anyio.to_thread.run_sync(self.views.look, paths)
            if look.stamp != stamp:
                stamp, quiet_since = look.stamp, time.monotonic()
                yield f"data: {await anyio.to_thread.run_sync(_message, look, sent)}\n\n"
            elif time.monotonic() - quiet_since > _QUIET_S:
                quiet_since = time.monotonic()
                yield ": nothing has changed\n\n"
            # A page that is dear to make is made less often.
            await asyncio.sleep(0.0 if look.progress < 1.0 else max(_LOOK_S, 2 * (time.monotonic() - began)))


def _message(look: Look, sent: dict[str, str]) -> str:
    """One line of JSON; of the figures only those that differ from what this browser has."""
    parts = look.parts
    if parts is None:
        return json.dumps({"progress": look.progress, "problem": look.problem})
    if sent.get("frame") != parts.frame:
        sent.clear()
        sent["frame"] = parts.frame
    figures: dict[str, Any] = {}
    for name, figure in parts.figures.items():
        text = json.dumps(figure, separators=(",", ":"))
        if sent.get(f"figure {name}") != text:
            sent[f"figure {name}"] = text
            figures[name] = figure
    message = {"title": parts.title, "head": parts.head, "frame": parts.frame, "captions": parts.captions}
    return json.dumps({**message, "figures": figures}, separators=(",", ":"))


# ---- the server -----------------------------------------------------------------------------------------------------


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(host: str, token: str | None) -> None:
    """Beyond this machine a token is needed, one that cannot be guessed."""
    if is_loopback(host):
        return
    if token is None:
        raise ConfigError(
            f"--host {host} can be reached from other machines, so a token is needed: set SORTEDRL_DASHBOARD_TOKEN, "
            f"for example to {secrets.token_urlsafe(24)}"
        )
    if len(token) < MIN_TOKEN:
        raise ConfigError(f"the token has {len(token)} characters, which can be guessed: use {MIN_TOKEN} or more")


def open_port(host: str, port: int) -> socket.socket:
    """Bound and listening before anything is promised, so that a port in use is one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot serve at {host}:{port}: {error.strerror or error}; choose another with --port, 0 takes a free one"
        ) from None
    return listener


def serve(dashboard: Dashboard, *, host: str, port: int, token: str | None, announce: Callable[[str], None]) -> None:
    """Serve until the process is asked to end. `announce` gets the address once it is bound."""
    check_address(host, token)
    listener = open_port(host, port)
    bound = listener.getsockname()[1]
    named = f"[{host}]" if ":" in host else host
    hosts = ["localhost", "127.0.0.1", "::1", "[::1]", named] if is_loopback(host) else ["*"]
    settings = uvicorn.Config(
        dashboard.app(hosts=hosts, token=token),
        log_level="warning",
        access_log=False,  # it would write the token down
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    announce(f"http://{named}:{bound}/")
    try:
        uvicorn.Server(settings).run(sockets=[listener])
    finally:
        listener.close()
