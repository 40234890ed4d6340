"""`sortedrl dashboard`: shows run directories in a browser and follows them while runs write.

The command line calls `serve`. A browser requests the list of runs and single samples, and keeps one connection open on
which the server sends the changed parts of the page (server-sent events).

Guarantees: the server writes nothing, and reads only runs under the given folders. Every response forbids the page to
load from, or send to, other servers. On loopback, requests to other host names are refused; beyond loopback, every
request needs the token. Memory is bounded: only a few views are kept, and each is bounded.
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
from sortedrl.reward.worker import printable
from sortedrl.telemetry.dashboard.auth import TokenMiddleware
from sortedrl.telemetry.dashboard.run_list import check_folders, find_runs, run_line
from sortedrl.telemetry.report.completions import list_completions
from sortedrl.telemetry.report.page import SCRIPTS, PageParts, asset, page_parts
from sortedrl.telemetry.report.sample_page import Decode, describe_sample
from sortedrl.telemetry.run_reader import RunReader

_MIN_TOKEN = 16  # characters
_MAX_VIEWS = 8  # runs in memory
_MAX_SHOWN = 6  # runs on one page
_POLL_S = 1.0  # time between two polls of the files
_READ_S = 0.4  # longest time that one poll reads, so that it answers within a second even if it also builds the page
_KEEP_ALIVE_S = 15.0  # a comment is sent after this time without changes
_ASSETS = dict.fromkeys(("page.css", "dashboard.css"), "text/css")
_ASSETS |= dict.fromkeys(("theme.js", *SCRIPTS, "dashboard.js"), "text/javascript")


@dataclass(slots=True, kw_only=True, frozen=True)
class PageState:
    """Some runs at one moment: how far they are read and, once they are read to the end, their page."""

    stamp: tuple[object, ...]
    progress: float = 1.0
    parts: PageParts | None = None
    problem: str = ""


@dataclass(slots=True, kw_only=True)
class RunViews:
    """The runs that browsers show, read as far as they are written; the least recently used ones are dropped."""

    readers: OrderedDict[Path, RunReader] = field(default_factory=OrderedDict)
    states: OrderedDict[tuple[Path, ...], PageState] = field(default_factory=OrderedDict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def poll(self, paths: Sequence[Path]) -> PageState:
        """Read what is new, for part of a second, and return the state of the page."""
        with self.lock:  # one page at a time, because it sets names and positions of its readers
            try:
                return self._poll(tuple(paths))
            except SortedRLError as error:
                for path in paths:
                    self.readers.pop(path, None)  # start anew next time: the file may be repaired or replaced
                return PageState(stamp=("problem", str(error)), problem=str(error))

    def _poll(self, paths: tuple[Path, ...]) -> PageState:
        readers = [self._reader(path) for path in paths]
        until = time.monotonic() + _READ_S
        for reader in readers:
            while reader.read_more():
                if time.monotonic() > until:
                    done = sum(reader.file.offset for reader in readers)
                    return PageState(stamp=("reading", done), progress=done / max(sum(r.file.size for r in readers), 1))
            reader.check_started()
            if reader.view.run is None:
                raise RunDirError(f"{reader.file.path} has no RunStarted yet; wait until the run has started")
            reader.read_summary()
        stamp = tuple((r.view.num_events, r.file.offset, r.is_live, r.view.recorded is not None) for r in readers)
        last = self.states.get(paths)
        if last is None or last.stamp != stamp:
            self.states[paths] = last = PageState(stamp=stamp, parts=page_parts(readers))
        self.states.move_to_end(paths)
        while len(self.states) > 2:
            self.states.popitem(last=False)
        return last

    def _reader(self, path: Path) -> RunReader:
        reader = self.readers.setdefault(path, RunReader(path))
        self.readers.move_to_end(path)
        while len(self.readers) > _MAX_VIEWS:
            self.readers.popitem(last=False)
        return reader


class Dashboard:
    """The routes. `decoder` returns a function that decodes the tokens of a run, or None if it has no tokenizer."""

    def __init__(self, folders: Sequence[Path], *, decoder: Callable[[Path], Decode | None] | None = None) -> None:
        check_folders(folders)
        self.folders = list(folders)
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
            Route("/api/completions", self.completions),
        ]
        middleware = [
            Middleware(TokenMiddleware, token=token),
            Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)),
        ]
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
        found = await anyio.to_thread.run_sync(find_runs, self.folders)
        lines = [await anyio.to_thread.run_sync(run_line, key, path) for key, path in found.items()]
        lines.sort(key=lambda line: -line.changed)
        return JSONResponse(
            {"runs": [asdict(line) for line in lines], "folders": [printable(str(folder)) for folder in self.folders]}
        )

    async def sample(self, request: Request) -> Response:
        key, number = request.query_params.get("run", ""), request.query_params.get("sample", "")
        path = (await anyio.to_thread.run_sync(find_runs, self.folders)).get(key)
        if path is None:
            return JSONResponse({"problem": f"there is no run {key!r}"}, status_code=404)
        if not number.isdecimal() or len(number) > 12:
            return JSONResponse({"problem": f"{number!r} is not a sample number; enter digits only"})
        try:
            return JSONResponse(await anyio.to_thread.run_sync(self._describe, path, int(number)))
        except SortedRLError as error:  # for example a run without a ledger, or an unknown sample
            return JSONResponse({"problem": str(error)})

    async def completions(self, request: Request) -> Response:
        key, before = request.query_params.get("run", ""), request.query_params.get("before", "")
        path = (await anyio.to_thread.run_sync(find_runs, self.folders)).get(key)
        if path is None:
            return JSONResponse({"problem": f"there is no run {key!r}"}, status_code=404)
        if not before.isdecimal() or len(before) > 12:
            return JSONResponse({"problem": f"{before!r} is not the number of an update; enter digits only"})
        try:
            return JSONResponse({"rows": await anyio.to_thread.run_sync(self._list, path, int(before))})
        except SortedRLError as error:
            return JSONResponse({"problem": str(error)})

    def _list(self, path: Path, before_update: int) -> list[dict[str, Any]]:
        with self._decoder_lock:
            return list_completions(path, before_update=before_update, decode=self._decode_of(path))

    def _describe(self, path: Path, sample: int) -> dict[str, Any]:
        with self._decoder_lock:
            return describe_sample(path, sample, lambda: self._decode_of(path))

    def _decode_of(self, path: Path) -> Decode | None:
        if self._decoders.get(path) is None:
            self._decoders[path] = self._decoder(path) if self._decoder is not None else None
            while len(self._decoders) > _MAX_VIEWS:
                self._decoders.pop(next(iter(self._decoders)))
        return self._decoders[path]

    async def follow(self, request: Request) -> Response:
        keys = request.query_params.getlist("run")
        found = await anyio.to_thread.run_sync(find_runs, self.folders)
        unknown = [key for key in keys if key not in found]
        if unknown or not keys or len(keys) > _MAX_SHOWN:
            problem = f"there is no run {unknown[0]!r}" if unknown else f"choose 1 to {_MAX_SHOWN} runs"
            return JSONResponse({"problem": problem}, status_code=404)
        stream = self._changes([found[key] for key in dict.fromkeys(keys)])
        return StreamingResponse(stream, media_type="text/event-stream")

    async def _changes(self, paths: Sequence[Path]) -> AsyncIterator[str]:
        """Yield a message with the changes since the last one, whenever something changed."""
        sent: dict[str, str] = {}
        stamp: tuple[object, ...] | None = None
        unchanged_since = time.monotonic()
        while True:
            began = time.monotonic()
            state = await anyio.to_thread.run_sync(self.views.poll, paths)
            if state.stamp != stamp:
                stamp, unchanged_since = state.stamp, time.monotonic()
                yield f"data: {await anyio.to_thread.run_sync(_message, state, sent)}\n\n"
            elif time.monotonic() - unchanged_since > _KEEP_ALIVE_S:
                unchanged_since = time.monotonic()
                yield ": nothing has changed\n\n"
            # A page that is expensive to build is built less often.
            await asyncio.sleep(0.0 if state.progress < 1.0 else max(_POLL_S, 2 * (time.monotonic() - began)))


def _message(state: PageState, sent: dict[str, str]) -> str:
    """Return one line of JSON, with only the figures that differ from what the browser has (`sent`)."""
    parts = state.parts
    if parts is None:
        return json.dumps({"progress": state.progress, "problem": state.problem})
    if sent.get("frame") != parts.frame:
        sent.clear()
        sent["frame"] = parts.frame
    figures: dict[str, Any] = {}
    for name, figure in parts.figures.items():
        text = json.dumps(figure, separators=(",", ":"))
        if sent.get(f"figure {name}") != text:
            sent[f"figure {name}"] = text
            figures[name] = figure
    message: dict[str, Any] = {
        "title": parts.title,
        "head": parts.head,
        "frame": parts.frame,
        "captions": parts.captions,
    }
    message |= {"facts": [asdict(facts) for facts in parts.facts], "smoothing": parts.smoothing}
    return json.dumps({**message, "figures": figures}, separators=(",", ":"))


# ---- the server -----------------------------------------------------------------------------------------------------


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_address(host: str, token: str | None) -> None:
    """Raise ConfigError if `host` is reachable from other machines and there is no token that is hard to guess."""
    if _is_loopback(host):
        return
    if token is None:
        raise ConfigError(
            f"--host {host} is reachable from other machines, so a token is needed: set SORTEDRL_DASHBOARD_TOKEN, "
            f"for example to {secrets.token_urlsafe(24)}"
        )
    if len(token) < _MIN_TOKEN:
        raise ConfigError(f"the token has {len(token)} characters, which can be guessed: use {_MIN_TOKEN} or more")


def open_port(host: str, port: int) -> socket.socket:
    """Return a listening socket; it is opened before the server starts, so that a port in use is a one-line error."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot serve at {host}:{port}: {error.strerror or error}; choose another with --port (0: any free port)"
        ) from None
    return listener


def serve(dashboard: Dashboard, *, host: str, port: int, token: str | None, announce: Callable[[str], None]) -> None:
    """Serve until the process is asked to stop. `announce` is called with the address once the port is open."""
    check_address(host, token)
    listener = open_port(host, port)
    bound = listener.getsockname()[1]
    named = f"[{host}]" if ":" in host else host
    hosts = ["localhost", "127.0.0.1", "::1", "[::1]", named] if _is_loopback(host) else ["*"]
    settings = uvicorn.Config(
        dashboard.app(hosts=hosts, token=token),
        log_level="warning",
        access_log=False,  # it would contain the token
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    announce(f"http://{named}:{bound}/")
    try:
        uvicorn.Server(settings).run(sockets=[listener])
    finally:
        listener.close()
