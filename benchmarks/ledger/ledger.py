"""What the ledger costs: throughput of the durable buffer, and the time until a long run can be read back.

    python -m benchmarks.ledger.ledger [--samples 100000] [--tokens 2000] [--deliveries 2] [--folder DIR] [--json]

Every sample is loaded, started, written in two deliveries (as if interrupted once), finished, scored and trained, in
cohorts of 4,096 and batches of 1,024. The last cohort stays half written, as after a kill. `buffer_s` is the time of
the same work with a buffer in memory. `cpu_s` and the load average show how busy the machine was with other work.
Reading back as a resume does (open, compare with a checkpoint's copy, truncate, restore, begin a lineage) is timed
twice: with both files dropped from the page cache if the system allows it (`cold`), and again with them cached
(`warm`). `cold_open_s` is the time until the file is open.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import make_parser, save
from sortedrl.buffer import Buffer
from sortedrl.ledger.store import Store
from sortedrl.records import FinishReason, Prompt, Sample, Segment, sample_seed

COHORT, BATCH, SIBLINGS = 4096, 1024, 8
GOAL_MB_S, GOAL_REOPEN_S = 50.0, 3.0
BYTES_PER_TOKEN = 8  # an int32 and a float32


def prompt_of(number: int) -> Prompt:
    text = f"Question {number}: " + "what follows from all that was said before? " * 8
    return Prompt(id=f"task/{number}", tokens=tuple(range(100)), content=text, columns={"answer": str(number)})


def cohort_of(number: int, first: int, count: int, budget: int) -> list[Sample]:
    samples: list[Sample] = []
    for sample_id in range(first, first + count):
        group, index = divmod(sample_id, SIBLINGS)
        prompt = prompt_of(group) if index == 0 else samples[-1].prompt
        samples.append(
            Sample(
                id=sample_id,
                prompt=prompt,
                index=index,
                epoch=0,
                cohort=number,
                seed=sample_seed(0, 0, prompt.id, index),
                budget=budget,
            )
        )
    return samples


def run(buffer: Buffer, num_samples: int, num_tokens: int, num_deliveries: int) -> float:
    """Drive a buffer through a whole run; returns the seconds spent in it."""
    tokens = [(7919 * i) % 150_000 for i in range(num_tokens)]
    logprobs = [-(i % 97) / 64 for i in range(num_tokens)]
    share = num_tokens // num_deliveries
    seconds = 0.0
    for number, first in enumerate(range(0, num_samples, COHORT)):
        samples = cohort_of(number, first, min(COHORT, num_samples - first), num_tokens)
        is_last = first + COHORT >= num_samples
        began = time.perf_counter()
        buffer.load(samples)
        for position, sample in enumerate(samples):
            buffer.start(sample)
            for start in range(0, share * num_deliveries, share):
                delivery = slice(start, start + share)
                segment = Segment(buffer.version, tokens[delivery], logprobs[delivery], 0.02 * share)
                buffer.append(sample, segment, start=start)
            if is_last and 2 * position > len(samples):
                continue
            buffer.finish(sample, FinishReason.STOP)
            buffer.score(sample.id, sample.attempt, float(sample.id % 2))
        if not is_last:
            train(buffer, samples)
        seconds += time.perf_counter() - began
    return seconds


def train(buffer: Buffer, samples: Sequence[Sample]) -> None:
    for first in range(0, len(samples), BATCH):
        buffer.take(samples[first : first + BATCH])
        buffer.publish(buffer.version + 1)


def drop_pages(path: Path) -> bool:
    """Drop a file from the page cache; returns whether the system can do that."""
    if not hasattr(os, "posix_fadvise"):
        return False
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)
    return True


def open_file(path: Path) -> float:
    """Open the file and close it; returns the seconds until it is open."""
    began = time.perf_counter()
    store = Store.open(path)
    seconds = time.perf_counter() - began
    store.close()
    return seconds


def reopen(path: Path, copy: Path, seq: int) -> tuple[float, Buffer]:
    """Open the file as a resumed run does; returns the seconds until the run could go on, and the buffer."""
    began = time.perf_counter()
    store, buffer = Store.reopen(path, seq, copy=copy)
    seconds = time.perf_counter() - began
    store.close()
    return seconds, buffer


def measure(folder: Path, num_samples: int, num_tokens: int, num_deliveries: int) -> dict[str, Any]:
    path, copy = folder / "ledger.sqlite", folder / "copy.sqlite"
    in_memory_s = run(Buffer(), num_samples, num_tokens, num_deliveries)
    store = Store.create(path, grouped=False, knobs={})
    buffer = store.restore()
    cpu_began = time.process_time()
    seconds = run(buffer, num_samples, num_tokens, num_deliveries)
    began = time.perf_counter()
    store.commit(durable=True)
    durable_s = time.perf_counter() - began
    cpu_s = time.process_time() - cpu_began
    seconds += durable_s
    store_s = store.seconds
    began = time.perf_counter()
    store.snapshot(copy)
    snapshot_s = time.perf_counter() - began
    seq = store.seq
    began = time.perf_counter()
    store.close()
    close_s = time.perf_counter() - began
    is_cold = drop_pages(path)
    cold_open_s = open_file(path)
    is_cold = is_cold and drop_pages(path) and drop_pages(copy)
    cold_s, _ = reopen(path, copy, seq)
    warm_s, restored = reopen(path, copy, seq)
    assert list(restored.samples) == list(buffer.samples), "the restored buffer has other samples"
    payload = num_samples * (num_tokens // num_deliveries) * num_deliveries * BYTES_PER_TOKEN
    return {
        "samples": num_samples,
        "tokens": num_tokens,
        "deliveries": num_deliveries,
        "live": len(restored.samples),
        "payload_mb": payload / 1e6,
        "seconds": seconds,
        "cpu_s": cpu_s,
        "load_average": os.getloadavg()[0],
        "buffer_s": in_memory_s,
        "store_s": store_s,
        "payload_mb_per_s": payload / 1e6 / seconds,
        "file_mb": path.stat().st_size / 1e6,
        "durable_commit_s": durable_s,
        "close_s": close_s,
        "snapshot_s": snapshot_s,
        "snapshot_mb": copy.stat().st_size / 1e6,
        "cold_open_s": cold_open_s if is_cold else None,
        "cold_restore_s": cold_s if is_cold else None,
        "warm_restore_s": warm_s,
        "within_goal": payload / 1e6 / seconds >= GOAL_MB_S and max(cold_s, warm_s) < GOAL_REOPEN_S,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--deliveries", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to write the ledger; needs twice its size")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        record = measure(Path(folder), options.samples, options.tokens, options.deliveries)
    save("ledger", record)
    if options.json:
        print(json.dumps(record))
        return
    table = Table("figure", "value", box=None)
    for name, value in record.items():
        table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
