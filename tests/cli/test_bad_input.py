"""Bad input to every command, as `make bad-input` tries it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bad_input.py"


def try_cases(*arguments: str) -> tuple[int, list[dict[str, object]]]:
    command = [sys.executable, str(TOOL), "--json", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.returncode, json.loads(found.stdout)["cases"]


@pytest.mark.slow
def test_no_bad_input_gives_a_traceback_a_hang_or_success() -> None:
    code, cases = try_cases()
    assert [case for case in cases if case["faults"]] == []
    assert code == 0
    assert len(cases) >= 80
    assert {case["code"] for case in cases} == {1, 2, 3}
