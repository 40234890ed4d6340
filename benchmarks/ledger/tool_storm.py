"""Kill a run with tools again and again with SIGKILL, and check what is called again afterwards.

    python -m benchmarks.ledger.tool_storm [--kills 50] [--kind snapshot|repeatable|none] [--json]

Every call of the tool leaves a line in a file: the row's key, and how many calls its object had before. Before a
process resumes the run, the calls of the turns that its checkpoint keeps are counted: all of a trained sample, and
those of the turns that a waiting sample still holds. A line for one of them afterwards is a call that is made again.

- `snapshot`: there is none.
- `repeatable`: there are some, and the ledger counts all of them. It counts a call before it is made, so it may count
  more than were made: those of turns that a kill found between the two.
- `none`: a trajectory whose object died with its process starts over, so none of its turns is kept. `restarted` counts
  the trajectories that did.

For every kind, the calls that a checkpoint keeps must be those of one state (`wrong_states` is 0): when a process kept
the n-th call of a trajectory, its object had n - 1 before. Calls whose results were in no checkpoint are made again by
every kind: `made_again_unkept` counts them. At the end every loaded trajectory must be trained once, and the ledger is
verified from its file.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.ledger.forked import fork
from benchmarks.record import make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.ledger.reader import Ledger
from sortedrl.ledger.store import Store
from sortedrl.ledger.verify import verify
from sortedrl.run.atomic_folder import parse_temporary
from sortedrl.run.builders.parts import build_parts
from sortedrl.run.checkpoint_folder import Checkpoints
from sortedrl.trainer import SortedTrainer

NAMES = ("Ann", "Bob", "Cid", "Dan", "Eve", "Fay")
# Calls since the sample last started over, with those that a replay may have lost.
KEPT = """
SELECT sample, prompt, turn, calls.idx, arguments, error FROM calls JOIN samples ON id = sample
WHERE repeated = 0 AND error != 'ignored' AND calls.seq > (
    SELECT coalesce(max(seq), 0) FROM steps WHERE steps.sample = calls.sample AND step = 'requeue' AND value = 'fresh'
) ORDER BY calls.seq
"""
LONGEST_S = 0.5  # a process lives at most so long after its first checkpoint
PATIENCE_S = 300.0  # a process that writes no checkpoint within this time hangs
LAST_S = 3600.0  # the same of the last process, which is not killed


class Ring:
    """A tool with a counted side effect and with state: how often it was called."""

    environment_kind = "none"

    def reset(self, key: str, log: str, **row: object) -> None:
        self.key, self.log, self.turn = key, log, 0

    def lookup(self, who: str) -> str:
        """
        Looks up whom a person points to.

        Args:
            who: Name of the person.
        """
        time.sleep(0.005)
        with open(self.log, "a") as file:
            file.write(f"{self.key} {self.turn}\n")
        self.turn += 1
        return NAMES[(NAMES.index(who) + 1) % len(NAMES)]


class SnapshotRing(Ring):
    environment_kind = "snapshot"

    def _snapshot(self) -> int:
        return self.turn

    def _restore(self, state: int) -> None:
        self.turn = state


class RepeatableRing(Ring):
    environment_kind = "repeatable"


KINDS: dict[str, type[Ring]] = {"none": Ring, "snapshot": SnapshotRing, "repeatable": RepeatableRing}


def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(completion.split()) % 2) for completion in completions]


def make_trainer(folder: Path, kind: str, samples: int) -> SortedTrainer:
    rows = [{"prompt": f"{NAMES[n % 6]} six ?", "key": str(n), "log": str(folder / "calls")} for n in range(samples)]
    config = SortedConfig(
        run={"name": "storm", "dir": str(folder), "samples": samples, "report": False},
        model={"path": "tools-tiny"},
        schedule={"strategy": "sorted-partial", "update_batch": 8, "lookahead": 1},
        engine={"slots": 8, "max_new_tokens": 110},
        learner={"algorithm": "reinforce++", "group_size": 1, "lr": 1e-4},
        environment={"run_in": "thread", "workers": 4, "max_turns": 6},
        eval={"prompts": 0},
        checkpoint={"every_updates": 1},
    )
    return SortedTrainer(None, reward, config, rows, environment_factory=KINDS[kind], quiet=True)


def start_child(folder: Path, kind: str, samples: int, *, resume: bool) -> int:
    return fork(lambda: make_trainer(folder, kind, samples).train(resume=resume))


def kept_calls(folder: Path) -> dict[str, int]:
    """By key of a row: how many calls of kept turns the newest checkpoint has."""
    checkpoint = Checkpoints(folder / "storm" / "checkpoints").latest()
    return {} if checkpoint is None else calls_in(checkpoint / "ledger.sqlite", folder / "copy.sqlite")


def calls_in(ledger_file: Path, copy: Path) -> dict[str, int]:
    """The same of a ledger, of which a copy is opened."""
    shutil.copy(ledger_file, copy)
    store = Store.open(copy)
    waiting = {sample.id: sample.num_turns for sample in store.restore().samples.values()}
    store.close()
    made: dict[tuple[str, int, int], bool] = {}  # of a turn that was written twice, the last row counts
    with Ledger(copy) as ledger:
        for sample, prompt, turn, index, arguments, error in ledger.rows(KEPT):
            if turn < waiting.get(sample, turn + 1):
                has_reached = error in ("", "exception") and set(json.loads(arguments)) == {"who"}
                made[str(prompt).rpartition("/")[2], turn, index] = has_reached  # the tool itself, which left a line
    return Counter(key for (key, _, _), has_reached in made.items() if has_reached)


def newest(folder: Path) -> tuple[int, bool]:
    """Version of the newest checkpoint folder, and whether it is complete; -1 if there is none."""
    found = [(-1, False)]
    for path in (folder / "storm" / "checkpoints").glob("*"):
        temporary = parse_temporary(path)
        name = path.name if temporary is None else temporary[0]
        if name.isdecimal() and path.is_dir():
            found.append((int(name), temporary is None))
    return max(found)


def kill_or_wait(child: int, folder: Path, rng: random.Random, *, is_last: bool) -> bool:
    """Kill the child a little after a checkpoint; returns whether it ended by itself. The last one is not killed.

    A child that fails or hangs is no kill: it raises SystemExit.
    """
    before, kill_at, patience_s = newest(folder), math.inf, LAST_S if is_last else PATIENCE_S
    hangs_at = time.monotonic() + patience_s
    while not (found := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() >= min(kill_at, hangs_at):
            os.kill(child, signal.SIGKILL)
            found = os.waitpid(child, 0)
            if kill_at > hangs_at:
                raise SystemExit(f"a training process hangs: it got no further within {patience_s:g} s")
            break
        if not is_last and newest(folder) > before:  # the run has got on: kill it a little later
            before, kill_at = newest(folder), min(kill_at, time.monotonic() + rng.uniform(0, LONGEST_S))
        time.sleep(0.005)
    if os.WIFSIGNALED(found[1]) and kill_at < math.inf:
        return False
    if code := os.waitstatus_to_exitcode(found[1]):
        raise SystemExit(f"a training process failed with exit code {code}")
    return True


def calls_since(folder: Path, start: int) -> tuple[list[tuple[str, int]], int]:
    path = folder / "calls"
    data = path.read_bytes()[start:] if path.exists() else b""
    lines = [line.split() for line in data.decode().splitlines()]
    return [(line[0], int(line[1])) for line in lines if len(line) == 2], start + len(data)


def storm(folder: Path, kills: int, kind: str, samples: int, seed: int) -> dict[str, Any]:
    rng, totals, place = random.Random(seed), Counter[str](), 0
    warm = make_trainer(folder, kind, samples).config.replaced(task={"name": "tools"}, environment={"factory": "none"})
    build_parts(warm).close()  # imports everything that a child needs
    kept: dict[str, int] = {}
    seen: set[tuple[str, int]] = set()  # calls of earlier processes
    resume = False
    while True:
        child = start_child(folder, kind, samples, resume=resume)
        resume = True
        has_ended = kill_or_wait(child, folder, rng, is_last=totals["kills"] >= kills)
        totals["kills"] += not has_ended
        calls, place = calls_since(folder, place)
        totals["calls"] += len(calls)
        again = [call for call in calls if call[1] < kept.get(call[0], 0)]
        totals["restarted" if kind == "none" else "called_again"] += count_again(again, kind)
        totals["made_again_unkept"] += sum(call in seen and call[1] >= kept.get(call[0], 0) for call in calls)
        seen.update(calls)
        before_kept = kept
        kept = calls_in(folder / "storm" / "ledger.sqlite", folder / "copy.sqlite") if has_ended else kept_calls(folder)
        totals["wrong_states"] += count_wrong_states(before_kept, kept, calls)
        if has_ended:
            break
        totals["kept_calls"] += sum(kept.values())
        resume = (folder / "storm" / "config.toml").is_file()
    with Ledger(folder / "storm") as ledger:
        verdict = verify(ledger)
        restarts = ledger.one("SELECT count(*) FROM steps WHERE step = 'requeue' AND value = 'fresh'")
    return {
        "kind": kind,
        **totals,
        "ended_early": totals["kills"] < kills,
        "loaded": verdict.counts["samples"],
        "trained": verdict.counts["trained"],
        "violations": verdict.num_violations,
        "counted_again_in_ledger": verdict.counts["repeated_calls"] + verdict.counts["forgotten_repeats"],
        "restarts_in_ledger": restarts,
        "forgotten_calls_in_ledger": verdict.counts["forgotten_calls"],
    }


def count_again(again: list[tuple[str, int]], kind: str) -> int:
    """Calls of kept turns that were made again; with kind `none` the trajectories that made them start over."""
    return len({key for key, _ in again}) if kind == "none" else len(again)


def count_wrong_states(before: dict[str, int], after: dict[str, int], calls: list[tuple[str, int]]) -> int:
    """Trajectories whose number of kept calls changed, but whose last kept call was made in another state."""
    made = set(calls)
    return sum(number != before.get(key, 0) and (key, number - 1) not in made for key, number in after.items())


def is_sound(result: dict[str, Any]) -> bool:
    """Whether the storm made all its kills, and found what the kind of environment promises."""
    if result["ended_early"] or result["trained"] != result["loaded"] or result["violations"] or result["wrong_states"]:
        return False
    if result["kind"] == "none":
        return result["restarted"] > 0 and result["restarts_in_ledger"] > 0 and not result["counted_again_in_ledger"]
    if result["kind"] == "snapshot":
        return not result["called_again"] and not result["counted_again_in_ledger"]
    return 0 < result["called_again"] <= result["counted_again_in_ledger"]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kind", choices=list(KINDS), default="snapshot")
    parser.add_argument("--samples", type=int, default=2048)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = storm(Path(folder), options.kills, options.kind, options.samples, options.seed)
    if not options.json:
        save(f"tool_storm_{options.kind}", result)
    print(json.dumps(result))
    raise SystemExit(0 if is_sound(result) else 1)


if __name__ == "__main__":
    main()
