# pyright: reportMissingImports=false
"""Which engine keeps which promise: the conformance suite on every engine, as the table of docs/engines.md.

    python benchmarks/engines_table.py [--engines sim,local,vllm,vllm-server] [--json]

Without `--engines`, those that can run here; vLLM needs the environment of `make vllm`. What an engine does not claim
by its capabilities is no promise of it and shows as a dash.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from record import save
from rich.console import Console

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "conformance")]

from cases import MAX_LENGTH, SLOTS, letters, local_case, model_case, sim_case  # noqa: E402

from sortedrl.engine.vllm_core import vllm_version  # noqa: E402
from sortedrl.testing import CHECKS, EngineCase, run_checks  # noqa: E402
from tiny_models import tiny_model  # noqa: E402

SERVER_PORT = 8719
MARKS = {"passed": "yes", "not applicable": "-"}


def vllm_case(port: int = 0) -> EngineCase:
    from sortedrl.engine.vllm import VllmEngine

    model = tiny_model(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    engine = VllmEngine(model, slots=SLOTS, max_length=MAX_LENGTH, decode=letters, port=port)
    return model_case(engine, model, kill=lambda: os.kill(engine.pids[0], signal.SIGKILL))


MAKERS: dict[str, Callable[[], EngineCase]] = {
    "sim": sim_case,
    "local": lambda: local_case("auto"),
    "vllm": vllm_case,
    "vllm-server": lambda: vllm_case(SERVER_PORT),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = [name for name in MAKERS if not name.startswith("vllm") or vllm_version() is not None]
    parser.add_argument("--engines", default=",".join(here))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, str]] = {}
    for name in options.engines.split(","):
        with Console(stderr=True).status(f"checking {name}"):
            case = MAKERS[name]()
            try:
                found[name] = run_checks(case)
            finally:
                case.engine.close()
    save("engines", {"vllm": vllm_version(), "result": found})
    if options.json:
        print(json.dumps(found))
        return
    print("| promise | " + " | ".join(found) + " | guards against |")
    print("| --- |" + " --- |" * (len(found) + 1))
    for check in CHECKS:
        marks = " | ".join(MARKS.get(found[name][check.name], "NO") for name in found)
        print(f"| {check.promise} | {marks} | {check.issue} |")


if __name__ == "__main__":
    main()
