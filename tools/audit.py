"""Looks up known vulnerabilities of the installed packages; `make check` runs it last.

It runs pip-audit on the environment of this interpreter and passes its own options on, such as `--ignore-vuln ID`. A
known vulnerability fails the check. Without a reachable advisory service the check says so and passes, so that work can
continue offline. pip-audit alone cannot distinguish the two cases: with a mirror that has no advisories it skips every
package and reports no vulnerability.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from typing import Any

PROBE = "https://pypi.org/pypi/pip/23.2.1/json"  # a release with known advisories
PROBE_S = 3.0
AUDIT_S = 120.0
UNREACHABLE = "pip-audit: no advisory service reachable, skipped"
BUNDLED = ("pip", "setuptools")  # installed by `python -m venv`: reported, but they do not fail the check
# Names of connection errors in the output of pip-audit and its libraries.
LOST_CONNECTION = ("ConnectionError", "ConnectTimeout", "ReadTimeout", "Could not connect", "ServiceError")


def has_advisories(url: str = PROBE, limit_s: float = PROBE_S) -> bool:
    """Whether the service answers in time and has advisories, which not every mirror has."""
    found: list[bool] = []

    def ask() -> None:
        try:
            with urllib.request.urlopen(url, timeout=limit_s) as reply:  # noqa: S310 - a constant address
                found.append("vulnerabilities" in json.load(reply))
        except (OSError, ValueError):
            found.append(False)

    # In a thread, since the DNS look-up has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit_s + 1)
    return bool(found) and found[0]


def judge(report: dict[str, Any]) -> tuple[int, list[str]]:
    """The exit code and the lines to print for a report of pip-audit."""
    packages = report["dependencies"]
    audited = [package for package in packages if "skip_reason" not in package]
    if not audited:
        return 0, [UNREACHABLE]
    unknown = ", ".join(package["name"] for package in packages if "skip_reason" in package)
    ours: list[str] = []
    theirs: list[str] = []
    for package in audited:
        for found in package["vulns"]:
            fixed = f"fixed in {', '.join(found['fix_versions'])}" if found["fix_versions"] else "no fixed version"
            line = f"{package['name']} {package['version']}: {found['id']}, {fixed}"
            (theirs if package["name"] in BUNDLED else ours).append(line)
    if theirs:
        theirs.append(f"pip-audit: these come with the environment, update them: pip install -U {' '.join(BUNDLED)}")
    checked = f"pip-audit: {len(audited)} packages checked{f' (unknown to the service: {unknown})' if unknown else ''}"
    if ours:
        return 1, [
            *theirs,
            *ours,
            f"{checked}, {len(ours)} known vulnerabilities: raise versions in constraints.txt",
        ]
    return 0, [*theirs, f"{checked}, no known vulnerability"]


def audit(options: list[str]) -> tuple[int, list[str]]:
    command = [sys.executable, "-m", "pip_audit", "--format", "json", "--progress-spinner", "off", "--skip-editable"]
    try:
        done = subprocess.run(
            [*command, "--timeout", "5", *options], capture_output=True, text=True, timeout=AUDIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 0, [UNREACHABLE]
    try:
        report = json.loads(done.stdout)
    except ValueError:
        if any(words in done.stderr for words in LOST_CONNECTION):
            return 0, [UNREACHABLE]
        return 1, ["pip-audit failed:", *done.stderr.strip().splitlines()[-5:]]
    return judge(report)


def main(options: list[str]) -> int:
    if "--osv-url" not in options and not has_advisories():
        print(UNREACHABLE)
        return 0
    code, lines = audit(options)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
