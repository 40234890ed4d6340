"""tools/audit.py: a known vulnerability is a failure, an unreachable service is not, and no result is not success."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "audit.py"
# In the form in which pip-audit 2.10.1 prints them.
UNKNOWN = {"name": "torch", "skip_reason": "Dependency not found on PyPI and could not be audited: torch (2.13.0+cpu)"}
HARMLESS = {"name": "boolean-py", "version": "5.0", "vulns": []}
FAULTY = """{"name": "requests", "version": "2.19.0", "vulns": [{"id": "PYSEC-2018-28", "fix_versions": ["2.20.0"],
"aliases": ["CVE-2018-18074", "GHSA-x84v-xcm2-53pg"], "description": "Credentials go along with a redirect."}]}"""
BUNDLED = """{"name": "pip", "version": "23.2.1", "vulns": [{"id": "PYSEC-2023-228", "fix_versions": ["23.3"],
"aliases": ["CVE-2023-5752"], "description": "Mercurial configuration injection"}]}"""


@pytest.fixture(scope="module")
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def serving(answer: Any) -> Iterator[str]:
    """Run a local server that answers every request body with `answer(body)`; yields its address."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        poll_s = 0.01  # how often it checks for shutdown
        threading.Thread(target=server.serve_forever, args=(poll_s,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize(
    ("packages", "code", "lines"),
    [
        ([HARMLESS], 0, ["pip-audit: 1 packages checked, no known vulnerability"]),
        (
            [HARMLESS, json.loads(FAULTY), UNKNOWN],
            1,
            [
                "requests 2.19.0: PYSEC-2018-28, fixed in 2.20.0",
                "pip-audit: 2 packages checked (unknown to the service: torch), 1 known vulnerabilities: raise "
                "versions in constraints.txt",
            ],
        ),
        (
            [json.loads(BUNDLED)],
            0,
            [
                "pip 23.2.1: PYSEC-2023-228, fixed in 23.3",
                "pip-audit: these come with the environment, update them: pip install -U pip setuptools",
                "pip-audit: 1 packages checked, no known vulnerability",
            ],
        ),
        ([UNKNOWN], 0, ["pip-audit: no advisory service reachable, skipped"]),
    ],
)
def test_reports_are_judged(audit: ModuleType, packages: list[Any], code: int, lines: list[str]) -> None:
    assert audit.judge({"dependencies": packages, "fixes": []}) == (code, lines)


def test_a_service_must_have_advisories(audit: ModuleType) -> None:
    with serving(lambda _: {"vulnerabilities": []}) as address:
        assert audit.has_advisories(address)
    with serving(lambda _: {"info": {}}) as address:
        assert not audit.has_advisories(address)
    assert not audit.has_advisories(address)  # the server has stopped


def test_offline_is_one_line_and_no_failure(
    audit: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # no server listens there
    assert audit.main([]) == 0
    assert capsys.readouterr().out == "pip-audit: no advisory service reachable, skipped\n"


@pytest.mark.parametrize("has_fault", [True, False])
def test_pip_audit_itself_against_a_service(
    audit: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_fault: bool
) -> None:
    """Run pip-audit itself, on one invented package and a local advisory service."""
    pytest.importorskip("pip_audit")
    package = {"name": "brittle", "ecosystem": "PyPI"}
    advisory = {
        "id": "PYSEC-0000-1",
        "affected": [{"package": package, "ranges": [{"type": "ECOSYSTEM", "events": [{"fixed": "1.1"}]}]}],
    }
    (tmp_path / "brittle-1.0.dist-info").mkdir()
    (tmp_path / "brittle-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: brittle\nVersion: 1.0\n")
    where = ["--path", str(tmp_path), "--cache-dir", str(tmp_path / "cache")]
    with serving(lambda _: {"vulns": [advisory]} if has_fault else {}) as address:
        code = audit.main([*where, "-s", "osv", "--osv-url", address])
    out = capsys.readouterr().out
    assert code == (1 if has_fault else 0), out
    assert ("brittle 1.0: PYSEC-0000-1, fixed in 1.1" in out) is has_fault
    assert "1 packages checked" in out
