"""A model hub on the loopback address: what huggingface_hub and datasets ask of one, and nothing more.

Repositories live in memory. Every change of a branch gets a commit of its own, as in git. Uploads arrive as regular
files in the body of the commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

Files = dict[str, bytes]


@dataclass(slots=True, kw_only=True)
class Repo:
    branches: dict[str, str] = field(default_factory=dict)  # branch -> commit
    commits: dict[str, Files] = field(default_factory=dict)
    is_gated: bool = False

    def files(self, revision: str) -> tuple[str, Files] | None:
        commit = self.branches.get(revision, revision)
        return (commit, self.commits[commit]) if commit in self.commits else None

    def commit(self, files: Mapping[str, bytes], branch: str) -> str:
        seed = f"{len(self.commits)} {sorted((name, _oid(data)) for name, data in files.items())}"
        sha = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}  # "models/owner/name" or "datasets/owner/name"
        self.requests: list[str] = []  # method and path
        self.tokens: set[str] = set()  # what clients sent as authorization

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(
        self,
        name: str,
        files: Mapping[str, bytes] | Path,
        *,
        kind: str = "models",
        branch: str = "main",
        gated: bool = False,
    ) -> str:
        """Commit files, or those of a folder, to a branch of a repository; returns the commit."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir() if path.is_file()}
        repo = self.repos.setdefault(f"{kind}/{name}", Repo())
        repo.is_gated = gated
        return repo.commit(files, branch)


@contextmanager
def running_hub() -> Iterator[HubServer]:
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def connect(monkeypatch: pytest.MonkeyPatch, server: HubServer, home: Path) -> None:
    """Let huggingface_hub, which reads the environment when it is imported, use this hub and a cache in `home`."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", "hf_for_tests")


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer
    routes = (
        ("GET", r"/api/(models|datasets)/([\w.-]+/[\w.-]+|[\w.-]+)", "info"),
        ("GET", r"/api/(models|datasets)/([\w.-]+/[\w.-]+|[\w.-]+)/revision/([^/]+)", "info"),
        ("GET", r"/api/(models|datasets)/([\w.-]+/[\w.-]+)/tree/([^/]+)(?:/(.*))?", "tree"),
        ("POST", r"/api/(models|datasets)/([\w.-]+/[\w.-]+)/paths-info/([^/]+)", "paths"),
        ("POST", r"/api/(models)/([\w.-]+/[\w.-]+)/preupload/([^/]+)", "preupload"),
        ("POST", r"/api/(models)/([\w.-]+/[\w.-]+)/commit/([^/]+)", "commit"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate"),
        ("FILE", r"/(?:(datasets)/)?([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", "file"),
    )

    def do_GET(self) -> None:
        self._serve("GET")

    def do_HEAD(self) -> None:
        self._serve("HEAD")

    def do_POST(self) -> None:
        self._serve("POST")

    def log_message(self, *arguments: Any) -> None: ...

    def _serve(self, method: str) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{method} {path}")
        if token := self.headers.get("authorization"):
            self.server.tokens.add(token)
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        for wanted, pattern, name in self.routes:
            match = re.fullmatch(pattern, path)
            if match and wanted in (method, "FILE"):
                getattr(self, f"_{name}")(*match.groups())
                return
        self._refuse(404, "EntryNotFound")

    # ---- answers -----------------------------------------------------------------------------------------------------

    def _info(self, kind: str, name: str, revision: str = "main") -> None:
        if (found := self._find(kind, name, revision)) is None:
            return
        commit, files = found
        siblings = [{"rfilename": path} for path in files]
        self._json({"id": name, "sha": commit, "siblings": siblings, "private": False, "tags": [], "downloads": 0})

    def _tree(self, kind: str, name: str, revision: str, folder: str | None) -> None:
        if (found := self._find(kind, name, revision)) is not None:
            inside = [_entry(path, data) for path, data in found[1].items() if path.startswith(folder or "")]
            self._json(inside)

    def _paths(self, kind: str, name: str, revision: str) -> None:
        if (found := self._find(kind, name, revision)) is not None:
            asked = json.loads(self.body)["paths"]
            self._json([_entry(path, found[1][path]) for path in asked if path in found[1]])

    def _file(self, kind: str | None, name: str, revision: str, path: str) -> None:
        if (found := self._find(kind or "models", name, revision)) is None:
            return
        commit, files = found
        if self.server.repos[f"{kind or 'models'}/{name}"].is_gated:
            self._refuse(403, "GatedRepo")
        elif path not in files:
            self._refuse(404, "EntryNotFound", commit)
        else:
            headers = {"ETag": f'"{_oid(files[path])}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            self._send(200, files[path], headers)

    def _create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked['organization']}/{asked['name']}"
        self.server.repos.setdefault(f"models/{name}", Repo()).commit({}, "main")
        self._json({"url": f"{self.server.url}/{name}", "name": name, "id": name})

    def _validate(self) -> None:
        self._json({"errors": [], "warnings": []})

    def _preupload(self, kind: str, name: str, revision: str) -> None:
        asked = json.loads(self.body)["files"]
        self._json(
            {"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in asked]}
        )

    def _commit(self, kind: str, name: str, revision: str) -> None:
        repo = self.server.repos[f"{kind}/{name}"]
        found = repo.files(revision)
        files = dict(found[1]) if found else {}
        for line in self.body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        sha = repo.commit(files, revision)
        self._json({"commitOid": sha, "commitUrl": f"{self.server.url}/{name}/commit/{sha}", "hookOutput": ""})

    # ---- what they are made of ---------------------------------------------------------------------------------------

    def _find(self, kind: str, name: str, revision: str) -> tuple[str, Files] | None:
        repo = self.server.repos.get(f"{kind}/{name}")
        found = None if repo is None else repo.files(revision)
        if repo is None:
            self._refuse(401 if "private" in name else 404, "RepoNotFound")
        elif found is None:
            self._refuse(404, "RevisionNotFound")
        return found

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, commit: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code, **({"X-Repo-Commit": commit} if commit else {})}
        self._send(status, json.dumps({"error": code}).encode(), headers)

    def _send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _entry(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(data), "oid": _oid(data)}
