"""How fast tokens are drawn from logits, and as a ratio to another checkout of this package.

    python -m benchmarks.engine.draw_speed [--against FOLDER] [--rounds 5] [--json]

It times the three samplers of `engine/sampling/draw.py` at the vocabularies of the embedded model, SmolLM2 and Qwen:
`choose` draws the next token of 16 sequences, `verify` compares 64 cached tokens. `--against` names the root of another
checkout. Both are then measured in processes that take turns, so that a busy machine slows both alike; a ratio above 1
means that this checkout is faster. All times are of one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from time import process_time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import ROOT, make_parser, save

VOCABULARIES = (44, 49_152, 151_936)
SLOTS, CACHED = 16, 64
_SECONDS = 0.4  # processor time for each figure


def measure() -> dict[str, float]:
    """Microseconds of processor time for each row of logits, by sampler, vocabulary and call."""
    import torch

    from sortedrl.engine.base import Sampling
    from sortedrl.engine.sampling.draw import CandidateSampler, DenseSampler, Draw, KernelSampler, TokenSampler
    from sortedrl.native.kernel import load_kernel

    torch.set_num_threads(1)
    kernel, found = load_kernel(), {}
    for vocab in VOCABULARIES:
        logits_rv = 2 * torch.randn(CACHED, vocab, generator=torch.Generator().manual_seed(0))
        draws = [Draw(1000 + row, row, Sampling()) for row in range(CACHED)]
        samplers: dict[str, TokenSampler] = {"dense": DenseSampler(SLOTS, vocab, torch.device("cpu"))}
        if vocab > VOCABULARIES[0]:  # small vocabularies are never searched
            samplers["candidates"] = CandidateSampler(vocab)
        if kernel is not None:
            samplers["kernel"] = KernelSampler(kernel, SLOTS, vocab)
        for name, sampler in samplers.items():
            sampler.start(0, draws[:SLOTS])

            def choose(sampler: Any = sampler, logits_rv: Any = logits_rv, draws: Any = draws) -> None:
                sampler.choose(logits_rv[:SLOTS], lambda: draws[:SLOTS])

            def verify(sampler: Any = sampler, logits_rv: Any = logits_rv, draws: Any = draws) -> None:
                sampler.verify(logits_rv, draws, [0] * CACHED, [0.0] * CACHED)

            found[f"{name} {vocab} choose"] = _time(choose) / SLOTS * 1e6
            found[f"{name} {vocab} verify"] = _time(verify) / CACHED * 1e6
    return found


def _time(call: Any) -> float:
    """The median processor seconds of one call."""
    call()
    seconds: list[float] = []
    while sum(seconds) < _SECONDS or len(seconds) < 3:
        began = process_time()
        call()
        seconds.append(process_time() - began)
    return statistics.median(seconds)


def _measure_checkout(root: Path) -> dict[str, float]:
    """`measure` on the package of a checkout, in a new process."""
    program = f"import sys; sys.path.insert(0, {str(root / 'src')!r}); import runpy; " + (
        f"print(__import__('json').dumps(runpy.run_path({__file__!r})['measure']()))"
    )
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(rounds: int, against: Path | None) -> dict[str, Any]:
    checkouts = {"this": ROOT} | ({} if against is None else {"other": against})
    times: dict[str, dict[str, list[float]]] = {name: {} for name in checkouts}
    for _ in range(rounds):
        for name, root in checkouts.items():
            for key, value in _measure_checkout(root).items():
                times[name].setdefault(key, []).append(value)
    record: dict[str, Any] = {"microseconds_per_row": {key: min(values) for key, values in times["this"].items()}}
    if against is not None:
        record["ratio"] = {key: min(times["other"][key]) / min(values) for key, values in times["this"].items()}
    return record


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--against", type=Path, help="root of another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    arguments: argparse.Namespace = parser.parse_args()
    record = run(arguments.rounds, arguments.against)
    save("draw_speed", record)
    if arguments.json:
        print(json.dumps(record, indent=1))
        return
    table = Table("sampler, vocabulary, call", "microseconds per row", "times as fast as the other")
    for key, value in record["microseconds_per_row"].items():
        table.add_row(key, f"{value:.1f}", f"{record['ratio'][key]:.2f}" if "ratio" in record else "")
    Console().print(table)


if __name__ == "__main__":
    main()
