"""The command line of the fuzzer: random scenarios for some minutes, one scenario again, planted defects, or the disk.

    python -m fuzz --minutes 10 --seed 1 [--jobs 2] [--keep-figures]
    python -m fuzz --minutes 10 --kinds ranks    # or vllm, or several: train,tools,data,trl (the default)
    python -m fuzz --scenario '{...}'        # as a failure prints it
    python -m fuzz --planted [NAMES]         # every defect of fuzz/planted.py, or some: each must be found
    python -m fuzz --disk [--torn 200]       # a power loss at every flush and at random writes

The exit code is 1 if anything was found (with --planted: if a defect was not) or a job failed, and 2 if what is asked
for cannot be tried.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from fuzz import child, disk, figures
from fuzz.control import environment, open_control
from fuzz.draw import EVERYDAY, draw
from fuzz.finding import Finding, FindingKind
from fuzz.judge import Player, Result
from fuzz.planted import EXPECTED, ONLY_A_HOST_SHOWS, ONLY_A_POWER_LOSS_SHOWS, PLANTED, NotPlantedError
from fuzz.scenario import Kind, Scenario
from fuzz.shrink import shrink

NEEDS = {Kind.TRL: "trl", Kind.DATA: "pyarrow", Kind.RANKS: "ray", Kind.VLLM: "vllm"}  # packages
SEEDS_PER_JOB = 1_000_000
PLANTED_MINUTES = 4.0  # within which a planted defect must be found
SHRINK_S = 60.0  # for making one failure smaller, and never more than what is left of --minutes


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to try random scenarios")
    parser.add_argument("--seed", type=int, default=0, help="another seed tries other scenarios")
    parser.add_argument("--jobs", type=int, default=2, help="processes that try scenarios side by side")
    parser.add_argument(
        "--keep-figures",
        action="store_true",
        help=f"add the counts to benchmarks/results/{figures.NAME}.json, unless something was found",
    )
    parser.add_argument("--kinds", type=_kinds, default=_everyday(), help="kinds of programs, separated by commas")
    parser.add_argument("--scenario", help="play this one only")
    parser.add_argument("--planted", nargs="?", const="all", help="plant each defect, or these, and look for it")
    parser.add_argument("--disk", action="store_true", help="replay a run's writes as a power loss would leave them")
    parser.add_argument("--torn", type=int, default=200, help="with --disk: random moments besides the flushes")
    parser.add_argument("--plant", default="", help=argparse.SUPPRESS)
    parser.add_argument("--job", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def _kinds(text: str) -> list[Kind]:
    return [Kind(name) for name in text.split(",")]


def _everyday() -> list[Kind]:
    """Without those whose package is not installed."""
    return [kind for kind in EVERYDAY if not _missing([kind])]


def _missing(kinds: Sequence[Kind]) -> list[str]:
    """Packages that these kinds of programs need and that are not installed."""
    needed = {NEEDS[kind] for kind in kinds if kind in NEEDS}
    return sorted(name for name in needed if importlib.util.find_spec(name) is None)


def check(options: argparse.Namespace) -> None:
    """Refuse what cannot be tried, in one line."""
    try:
        kinds = [Scenario.from_json(options.scenario).kind] if options.scenario else options.kinds
    except (ValueError, KeyError, TypeError) as error:
        _refuse(f"--scenario is no scenario ({error!r}): copy the one that a finding prints")
    names = _names(options.planted) if options.planted else [options.plant] if options.plant else []
    if any(name in ONLY_A_HOST_SHOWS for name in names):
        kinds = [*kinds, Kind.TRL]
    if missing := _missing(kinds):
        _refuse(f"{', '.join(kinds)} needs {', '.join(missing)}, which is not installed: choose others with --kinds")
    if unknown := [name for name in names if name not in PLANTED]:
        _refuse(f"there is no planted defect {', '.join(unknown)}: choose from {', '.join(PLANTED)}")


def _refuse(text: str) -> NoReturn:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def _names(planted: str) -> list[str]:
    return list(PLANTED) if planted == "all" else planted.split(",")


def main() -> None:
    options = parse()
    check(options)
    if options.job is not None:
        work(options)
    elif options.planted:
        names = _names(options.planted)
        missed = [name for name in names if not look_for(name, options)]
        print(f"{len(names) - len(missed)} of {len(names)} planted defects found")
        for name in missed:
            print(f"not found: {name}")
        sys.exit(bool(missed))
    else:
        done = fuzz(options, plant=options.plant)
        summarize(done, keep_figures=options.keep_figures)
        sys.exit(bool(done.counts["findings"] or done.failures))


@dataclass(slots=True)
class Done:
    """What the jobs did, and why some of them failed."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def has_found(self, kinds: Collection[FindingKind]) -> bool:
        return any(self.counts[f"found {kind}"] for kind in kinds)


def summarize(done: Done, *, keep_figures: bool) -> None:
    """Print what was done and found, and what failed; keep the figures of an invocation without any of these."""
    always = ("runs", "faults", "findings", "unfinished")
    shown = [name for name in figures.COUNTED if done.counts[name] or name in always]
    print(", ".join(f"{done.counts[name]:,} {name}" for name in shown), flush=True)
    for failure in done.failures:
        print(f"error: {failure}", file=sys.stderr)
    if keep_figures and (done.counts["findings"] or done.failures):
        why = "found something" if done.counts["findings"] else "failed"
        print(f"the figures are not kept: an invocation that {why} is left out as a whole")
    elif keep_figures:
        figures.add(done.counts)


def fuzz(options: argparse.Namespace, *, plant: str = "", until: Collection[FindingKind] = ()) -> Done:
    """Start the jobs, print what they find, and add up what they did. `until`: findings that end the search."""
    num_jobs = 1 if options.scenario or options.disk else options.jobs
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        commands = [
            [sys.executable, "-m", "fuzz", *_passed_on(options, plant), "--job", str(job)] for job in range(num_jobs)
        ]
        envs = [environment(Path(folder)) for _ in commands]  # each makes a page of its own
        return Jobs(commands, envs, quiet=bool(plant), until=until).run()


class Jobs:
    """Processes that print a line of JSON for each scenario. Each is listened to by a thread, to its last line."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        envs: Sequence[Mapping[str, str]],
        *,
        quiet: bool = False,
        until: Collection[FindingKind] = (),
    ) -> None:
        self.done, self.quiet, self.until = Done(), quiet, until
        self._lock, self._are_asked = threading.Lock(), False
        self._jobs = [
            subprocess.Popen(command, env=dict(env), stdout=subprocess.PIPE, text=True, errors="replace")
            for command, env in zip(commands, envs, strict=True)
        ]

    def run(self) -> Done:
        threads = [threading.Thread(target=self._listen, args=(job,)) for job in self._jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, job in enumerate(self._jobs):
            code = job.wait()
            if code != 0 and not (code == -signal.SIGTERM and self._are_asked):
                self.done.failures.append(f"job {number} ended with {code}: see its message above")
        return self.done

    def _listen(self, job: subprocess.Popen[str]) -> None:
        assert job.stdout is not None, "its output is a pipe"
        for line in job.stdout:
            with self._lock:
                try:
                    self._take(json.loads(line))
                except Exception as error:  # a finding may be lost, so this must not pass for a success
                    self.done.failures.append(f"a job printed what is no record ({error!r}): {line[:200]!r}")

    def _take(self, record: dict[str, Any]) -> None:
        self.done.counts.update(record["counts"])
        _show(record, quiet=self.quiet)
        if not self._are_asked and self.done.has_found(self.until):
            self._are_asked = True
            for job in self._jobs:
                job.terminate()


def look_for(name: str, options: argparse.Namespace) -> bool:
    """Whether the fuzzer finds a planted defect, by a finding of a kind that it explains."""
    began = time.monotonic()
    changed = {
        "minutes": PLANTED_MINUTES,
        "disk": name in ONLY_A_POWER_LOSS_SHOWS,
        "kinds": [Kind.TRL if name in ONLY_A_HOST_SHOWS else Kind.TRAIN],
    }
    options = argparse.Namespace(**{**vars(options), **changed})
    done = fuzz(options, plant=name, until=EXPECTED[name])
    is_found = done.has_found(EXPECTED[name])
    kinds = ", ".join(kind for kind in FindingKind if done.counts[f"found {kind}"]) or "nothing"
    print(
        f"{name}: {'found' if is_found else 'NOT found'} after {done.counts['runs'] + done.counts['power losses']} "
        f"runs, {time.monotonic() - began:.0f} s: {kinds}",
        flush=True,
    )
    for failure in done.failures:
        print(f"  {failure}", flush=True)
    return is_found


def _passed_on(options: argparse.Namespace, plant: str) -> list[str]:
    given = ["--minutes", str(options.minutes), "--seed", str(options.seed), "--torn", str(options.torn)]
    given += ["--kinds", ",".join(options.kinds)]
    given += ["--scenario", options.scenario] if options.scenario else []
    given += ["--disk"] if options.disk else []
    return [*given, "--plant", plant] if plant else given


def _show(record: dict[str, Any], *, quiet: bool) -> None:
    for finding in () if quiet else record["findings"]:
        print(f"FINDING {finding}")
        if record["again"]:
            print(f"  again with: python -m fuzz --scenario '{record['again']}'", flush=True)
    if record["line"] and not quiet:
        print(record["line"], flush=True)


# ---- one job --------------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Play scenarios and print a line of JSON for each."""
    deadline = time.monotonic() + 60 * options.minutes
    child.warm_up()
    with tempfile.TemporaryDirectory(prefix="fuzz-runs-") as folder:
        page = open_control()
        if options.disk:
            for name, wrong in disk.check(
                page, Path(folder), num_torn=options.torn, seed=options.seed, plant=options.plant
            ):
                counts = Counter({"power losses": 1, "findings": len(wrong)})
                counts.update(f"found {finding.kind}" for finding in wrong)
                _print_record(counts, wrong, line=f"{name}: {len(wrong)} findings" if wrong else "")
                if wrong and options.plant:
                    break
            return
        player = Player(page, Path(folder), options.plant)
        if options.scenario:
            _report(player.play(Scenario.from_json(options.scenario)), shows_ends=True)
            return
        player.deadline.at = deadline
        stop_on_term(player)
        seed = SEEDS_PER_JOB * (1000 * options.seed + options.job)
        while not player.deadline.has_passed:
            scenario = draw(seed, options.kinds)
            try:
                result = player.play(scenario)
            except child.OutOfTimeError:
                line = f"{seed}: {scenario.kind} not finished when the time was over"
                _print_record({"unfinished": 1}, [], line=line)
                break
            if result.findings and not options.plant:
                result.scenario = smallest(player, result)
            _report(result)
            seed += 1


def stop_on_term(player: Player) -> None:
    """Let SIGTERM end the scenario that is played, and all that would follow."""
    signal.signal(signal.SIGTERM, lambda *_: setattr(player.deadline, "is_asked", True))


def smallest(player: Player, result: Result) -> Scenario:
    """The scenario made smaller while a finding of the same kind stays; as it is if there is no time for that."""
    kind, deadline = result.findings[0].kind, player.deadline.at
    player.deadline.at = min(deadline, time.monotonic() + SHRINK_S)
    smallest = shrink(result.scenario, lambda smaller: any(f.kind == kind for f in player.play(smaller).findings))
    player.deadline.at = deadline
    return smallest


def _report(result: Result, *, shows_ends: bool = False) -> None:
    """Print the record of a scenario. `shows_ends`: also say how each of its processes ended."""
    done = f"{result.num_processes} processes, {len(result.faults)} faults"
    line = f"{result.scenario.seed}: {result.scenario.kind} {result.outcome or 'failed'}, {done}"
    ends = [f"  process {number}: {end}" for number, end in enumerate(result.ends, start=1)] if shows_ends else []
    _print_record(result.counts, result.findings, line="\n".join([*ends, line]), again=result.scenario.to_json())


def _print_record(counts: Mapping[str, int], findings: Sequence[Finding], *, line: str, again: str = "") -> None:
    record = {"counts": counts, "findings": [str(finding) for finding in findings], "again": again, "line": line}
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):  # a user stopped it, or the process that reads its results has ended
        sys.exit(130)
    except NotPlantedError as missing:
        sys.exit(f"error: {missing}")
