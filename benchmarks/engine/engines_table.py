# pyright: reportMissingImports=false
"""Which engine keeps which promise: runs the conformance suite and writes the table of docs/reference/engines.md.

    .venv/bin/python -m benchmarks.engine.engines_table --engines sim,local,pool --write
    python -m benchmarks.engine.engines_table --engines vllm --write         # after `make vllm`
    python -m benchmarks.engine.engines_table --engines vllm-server --write
    python -m benchmarks.engine.engines_table --engines pool-vllm --write

Each run replaces the entries of its engines in results/engines.json, with commit and day. The table has one column for
every engine in that file. `--engines ""` writes the table again without running anything. A dash means that the
engine's capabilities do not include this promise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from benchmarks.engine.with_vllm import go_on_with_vllm
from benchmarks.record import RESULTS, ROOT, make_parser, save, stamp
from sortedrl.engine.vllm.core import vllm_version
from sortedrl.testing import CHECKS, EngineCase, run_checks
from tests.conformance.cases import local_case, sim_case
from tests.conformance.process_cases import local_pool_case, vllm_case, vllm_pool_case

PAGE = ROOT / "docs" / "reference" / "engines.md"
MARKS = {"passed": "yes", "not applicable": "-", "not run": "not run"}


@contextmanager
def plain(make: Callable[[], EngineCase]) -> Iterator[EngineCase]:
    case = make()
    try:
        yield case
    finally:
        case.engine.close()


MAKERS: dict[str, Callable[[], AbstractContextManager[EngineCase]]] = {
    "sim": lambda: plain(sim_case),
    "local": lambda: plain(lambda: local_case("auto")),
    "pool": local_pool_case,
    "vllm": vllm_case,
    "vllm-server": lambda: vllm_case(is_server=True),
    "pool-vllm": vllm_pool_case,
}


def run(name: str) -> dict[str, Any]:
    """Run the suite on one engine; returns its column of the table."""
    console = Console(stderr=True)
    with console.status(f"checking {name}"), MAKERS[name]() as case:
        found = run_checks(case)
    for check, result in found.items():
        if result.startswith("failed"):
            console.print(f"{name}: {check} {result}", markup=False)
    day = datetime.now(UTC).date().isoformat()
    return {"stamp": stamp(), "day": day, "vllm": vllm_version() if "vllm" in name else None, "result": found}


def table(engines: dict[str, dict[str, Any]]) -> list[str]:
    """Lines of the table (a row per promise, a column per engine) and of the note on when each engine was run."""
    head = ["promise", "by name", *engines, "guards against"]
    lines = [f"| {' | '.join(head)} |", "| --- |" + " --- |" * (len(head) - 1)]
    for check in CHECKS:
        results = [engine["result"].get(check.name) for engine in engines.values()]
        marks = ["not run" if result is None else MARKS.get(result.partition(":")[0], "NO") for result in results]
        lines.append(f"| {check.promise} | {check.guarantee} | {' | '.join(marks)} | {check.issue} |")
    runs = [f"`{name}` {engine['day']} at {engine['stamp']['commit']}" for name, engine in engines.items()]
    missing = [f"`{name}`" for name in MAKERS if name not in engines]
    rest = f" Not run: {', '.join(missing)}." if missing else ""
    return [*lines, "", *wrapped(f"Run: {', '.join(runs)}.{rest}")]


def wrapped(text: str, width: int = 120) -> list[str]:
    lines = [""]
    for word in text.split():
        lines = [*lines, word] if len(lines[-1]) + len(word) >= width else [*lines[:-1], f"{lines[-1]} {word}".strip()]
    return lines


def put_into(page: str, lines: list[str]) -> str:
    """Replace the table of the page, and the note on the runs below it."""
    rows = page.splitlines()
    start = next(number for number, row in enumerate(rows) if row.startswith("| promise |"))
    end = next(number for number in range(start, len(rows)) if not rows[number])
    if rows[end + 1].startswith("Run: "):
        end = next(number for number in range(end + 1, len(rows)) if not rows[number])
    return "\n".join([*rows[:start], *lines, *rows[end:]]) + "\n"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--engines", default="sim,local,pool", help=f"comma-separated, from {', '.join(MAKERS)}")
    parser.add_argument("--write", action="store_true", help="write the table into docs/reference/engines.md")
    options = parser.parse_args()
    chosen = [name for name in options.engines.split(",") if name]
    unknown = [name for name in chosen if name not in MAKERS]
    if unknown:
        parser.error(f"unknown engine {unknown[0]}: choose from {', '.join(MAKERS)}")
    if any("vllm" in name for name in chosen):
        go_on_with_vllm()
    path = RESULTS / "engines.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["engines"] if path.exists() else {}
    for name in chosen:
        kept[name] = run(name)
        save("engines", {"engines": kept})
    engines = {name: kept[name] for name in MAKERS if name in kept}
    lines = table(engines)
    if options.write:
        PAGE.write_text(put_into(PAGE.read_text(encoding="utf-8"), lines), encoding="utf-8")
    print(json.dumps(engines) if options.json else "\n".join(lines))


if __name__ == "__main__":
    main()
