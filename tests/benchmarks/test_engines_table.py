"""benchmarks/engine/engines_table.py joins the results of several runs in one table and leaves the rest of the page."""

from __future__ import annotations

from typing import Any

from benchmarks.engine.engines_table import put_into, table
from sortedrl.testing import CHECKS

PAGE = """# Engines

| engine | what |
| --- | --- |
| sim | a clock |

| promise | old |
| --- | --- |
| something | yes |

Behind it.
"""


def column(day: str, **changed: str) -> dict[str, Any]:
    found = {check.name: "passed" for check in CHECKS} | {
        name.replace("_", "-"): text for name, text in changed.items()
    }
    return {"day": day, "stamp": {"commit": "abc123"}, "result": found}


def test_each_engine_is_a_column_with_its_day() -> None:
    old = column("2026-01-02", stop_tokens_stop="not applicable", slots_are_a_limit="failed: 5 were taken")
    del old["result"]["budgets-are-kept"]  # a check that did not exist when this engine was last run
    lines = table({"sim": old, "vllm": column("2026-02-03")})
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[3:5]] for line in lines if "|" in line
    }
    assert rows["promise"] == ["sim", "vllm"]
    assert rows["an answer uses its budget and no more, and says why it ended"] == ["not run", "yes"]
    assert rows["a stop token ends an answer and is part of it"] == ["-", "yes"]
    assert rows["more requests than free slots are refused"] == ["NO", "yes"]
    assert len(rows) == len(CHECKS) + 2
    told = " ".join(lines[lines.index("") :])
    assert "`sim` 2026-01-02 at abc123, `vllm` 2026-02-03 at abc123." in told
    assert "Not run: `local`, `pool`, `vllm-server`, `pool-vllm`." in told


def test_the_page_keeps_what_is_around_the_table() -> None:
    lines = ["| promise | new |", "| --- | --- |", "| other | - |", "", "Run: `new` yesterday,", "and before."]
    once = put_into(PAGE, lines)
    assert once == PAGE.replace("| promise | old |", "| promise | new |").replace(
        "| something | yes |", "| other | - |\n\nRun: `new` yesterday,\nand before."
    )
    assert put_into(once, lines) == once
