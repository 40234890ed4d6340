"""A real model whose answers have a tail: trained tokens per second of each strategy against `sync` and `sync-large`.

    python -m benchmarks.study.real_tail [--strategies sync,sorted-replay] [--samples 240] [--slots 16] [--full]
        [--dtype bfloat16] [--threads 1] [--engine vllm] [--learn] [--json]

Trains the configuration tail-smollm2 once per strategy and seed, with the same prompts and sampling noise, each run a
process of the command `sortedrl train`. The first call makes the cold start with `sortedrl sft` and keeps it in the
folder of `--runs`. `rollout` is trained tokens / seconds of rollout. `whole` is trained tokens / seconds of rollout,
updates and publications together, without checkpoints and evaluations; updates of an `async` strategy overlap with
rollout.

`--learn` evaluates on held-out questions before and after training, and writes checkpoints. Its runs start from a model
with a bad habit: it is fine-tuned further on lists that an impatient teacher often ends too early, which training with
rewards can mend. The same command continues runs that were stopped and takes complete ones as they are, each with the
commits that made it. A run's folder is named after its settings and the weights that it starts from, so a run with
others is never taken. "2nd half" is the share of right answers in the second half of training. With two seeds and more,
it and held-out accuracy after training are compared seed by seed (docs/research/registration.md).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.record import ROOT, make_parser, save, stamp
from benchmarks.study.claims import interval
from benchmarks.study.intervals import student
from sortedrl.config import SortedConfig
from sortedrl.schedule import Strategy
from sortedrl.tasks.counting import Questions, draw
from sortedrl.tasks.knights import is_heldout
from sortedrl.telemetry.event_file import read_events
from sortedrl.telemetry.events import BatchTaken
from sortedrl.telemetry.summary import Summary, share

CONFIG = "tail-smollm2"
BASES = ("sync", "sync-large")
STRATEGIES = (*BASES, "sorted-replay", "async-on-policy")
SAMPLES = 240
LEARN_SAMPLES = 160
# As the recipe says. The seed is not the run's, so that the run gets prompts that the cold start has not seen.
SFT = ("task.options.median=6", "task.options.spread=0.9", "task.options.most=240", "--seed", "1")
# An engine in its own process and the learner take a core each. A process with two threads would disturb the other.
OVERLAP = ("engine.own_process=true", "run.threads=1")
# A higher rate than the recipe's, for few updates: later the model unlearns to stop (docs/research/log.md).
LEARN = ("learner.lr=2e-4",)
SPEED = ("eval.prompts=0", "checkpoint.save=false", "run.report=false")
FULL = ("lora.rank=0", "learner.lr=1e-5")
# The impatient teacher writes this share of the demonstrations and stops after each number with this probability.
IMPATIENT_SHARE, GIVE_UP = 0.75, 0.1
DEMONSTRATIONS = 640
IMPATIENT_SFT = ("sft.steps=40", "sft.lr=1e-4", "--seed", "2")
# The registered figures of `--learn`, and how many seeds a comparison needs to be decided.
SECOND_HALF = "share_right_second_half"
LEARN_FIGURES = ("accuracy_after", SECOND_HALF)
VERDICT_SEEDS = 5

_out = Console(stderr=True, highlight=False)


# ---- runs ------------------------------------------------------------------------------------------------------------


def command(python: str, *arguments: str) -> list[str]:
    return [python, "-m", "sortedrl", *arguments]


def start_folder(runs: Path, base: SortedConfig) -> Path:
    """The folder of the cold start; its name changes with the settings that the weights depend on."""
    settings = base.resolved()
    settings["task"]["options"] |= {"median": None, "spread": None, "most": None}  # the cold start has its own: see SFT
    text = json.dumps([SFT, *(settings[name] for name in ("model", "task", "sft"))], sort_keys=True)
    return runs / f"start-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def make_start(runs: Path) -> Path:
    """Return the fine-tuned model to start from, made with the recipe's own command if it is not there."""
    folder = start_folder(runs, SortedConfig.load(CONFIG))
    if not folder.is_dir():
        _out.print(f"cold start of {CONFIG}, once: about nine minutes")
        arguments = ("sft", CONFIG, *SFT, "--out", str(folder))
        subprocess.run(command(sys.executable, *arguments), cwd=ROOT, stdout=sys.stderr, check=True)
    return folder


def make_impatient_start(runs: Path, start: Path) -> Path:
    """Return the model to start from with `--learn`: `start`, fine-tuned on lists that often end too early."""
    settings = json.dumps([IMPATIENT_SHARE, GIVE_UP, DEMONSTRATIONS, IMPATIENT_SFT])
    folder = runs / f"{start.name}-impatient-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"
    if not folder.is_dir():
        _out.print("an impatient cold start, once: about two minutes")
        rows = folder.with_suffix(".jsonl")
        rows.write_text("".join(json.dumps(row) + "\n" for row in demonstrations(DEMONSTRATIONS)), encoding="utf-8")
        arguments = ("sft", CONFIG, f"model.path={start}", f"sft.path={rows}", *IMPATIENT_SFT, "--out", str(folder))
        subprocess.run(command(sys.executable, *arguments), cwd=ROOT, stdout=sys.stderr, check=True)
    return folder


def demonstrations(num: int) -> list[dict[str, str]]:
    """Lists by two teachers: one is right, the other often stops before the end."""
    options: dict[str, Any] = dict(SortedConfig.load(CONFIG).task.options)
    rng, questions = random.Random("real_tail/demonstrations"), Questions(**options)
    rows: list[dict[str, str]] = []
    while len(rows) < num:
        count = draw(rng, questions)
        if is_heldout(count.prompt):
            continue
        numbers, give_up = count.numbers, GIVE_UP if rng.random() < IMPATIENT_SHARE else 0.0
        end = next((place for place in range(1, len(numbers)) if rng.random() < give_up), len(numbers))
        rows.append({"prompt": count.prompt, "completion": " ".join(map(str, numbers[:end]))})
    return rows


def samples_of(options: argparse.Namespace) -> int:
    return options.samples or (LEARN_SAMPLES if options.learn else SAMPLES)


def overrides(strategy: str, seed: int, start: Path, folder: Path, options: argparse.Namespace) -> list[str]:
    given = [
        f"schedule.strategy={strategy}",
        f"run.seed={seed}",
        f"run.dir={folder.parent}",
        f"run.name={folder.name}",
        f"run.samples={samples_of(options)}",
        f"model.path={start}",
        f"engine.slots={options.slots}",
        f"schedule.update_batch={options.slots}",
        f"engine.kind={options.engine}",
    ]
    given += [f"engine.dtype={options.dtype}"] if options.dtype else []
    given += FULL if options.full else ()
    given += [f"run.threads={options.threads}"] if options.threads else []
    given += OVERLAP if strategy.startswith("async") else ()
    given += LEARN if options.learn else SPEED
    return given


def run_folder(strategy: str, seed: int, start: Path, options: argparse.Namespace) -> Path:
    """The folder of a run; its name changes with the resolved settings and with the weights to start from."""
    group = options.runs / group_name(options)
    settings = SortedConfig.load(CONFIG, overrides(strategy, seed, start, group / "run", options)).resolved()
    del settings["run"]["dir"], settings["run"]["name"]
    settings["model"]["path"] = weights_of(start)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return group / f"{strategy}-{seed}-{digest}"


def weights_of(start: Path) -> dict[str, str]:
    """The hashes of a saved model's files, from its manifest; the state of the learner is none of the model."""
    files = json.loads((start / "manifest.json").read_text(encoding="utf-8"))["files"]
    return {name: facts["sha256"] for name, facts in sorted(files.items()) if name != "learner_state.json"}


def commits_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.commits.json")


def commits_of(folder: Path) -> list[str]:
    """The commits that made a run: of its start, and of each time that it went on."""
    path = commits_file(folder)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def train(folder: Path, settings: Sequence[str], options: argparse.Namespace) -> None:
    """Run `sortedrl train`, or continue the run in `folder`. A speed run starts anew."""
    summary = folder / "summary.json"
    if options.learn and summary.exists() and Summary.read(summary).status == "complete":
        return
    commit = stamp()["commit"]  # now, since a commit may come in while the run trains
    if options.learn and (folder / "config.toml").exists():
        arguments = ["train", "--resume", str(folder), "--json"]
        commits = list(dict.fromkeys([*commits_of(folder), commit]))
    else:
        shutil.rmtree(folder, ignore_errors=True)
        arguments, commits = ["train", CONFIG, *settings, "--json"], [commit]
    folder.parent.mkdir(parents=True, exist_ok=True)
    commits_file(folder).write_text(json.dumps(commits), encoding="utf-8")
    done = subprocess.run(command(options.python, *arguments), cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"the run {folder} ended with exit code {done.returncode}: see the message above")


def batches_of(folder: Path) -> Iterator[BatchTaken]:
    """The batches of a run, in the order in which they were trained."""
    return (event for event in read_events(folder / "events.jsonl") if isinstance(event, BatchTaken))


def read_lengths(folder: Path) -> list[int]:
    """The lengths of all trained answers, in tokens."""
    return [length for batch in batches_of(folder) for length in batch.lengths]


def facts_of(folder: Path, *, learn: bool) -> dict[str, Any]:
    """What a run's summary does not tell: the commits that made it and, with `learn`, the second registered figure."""
    facts: dict[str, Any] = {"commits": commits_of(folder)}
    if learn:
        facts[SECOND_HALF] = share_right_second_half(list(batches_of(folder)))
    return facts


# ---- figures ---------------------------------------------------------------------------------------------------------


def speeds(runs: Sequence[Summary]) -> dict[str, float]:
    """Trained tokens per second of the runs of one strategy, over rollout and over the whole loop."""
    tokens = sum(run.trained_tokens for run in runs)
    return {"rollout": tokens / sum(run.rollout_s or 0.0 for run in runs), "whole": tokens / sum(map(whole_s, runs))}


def whole_s(run: Summary) -> float:
    """Seconds of rollout, updates and publications."""
    return (run.wall_s or 0.0) - (run.save_s or 0.0)


def ratios(by_strategy: Mapping[str, Sequence[Summary]], base: str) -> dict[str, dict[str, float]]:
    """The speeds of every strategy as multiples of those of `base`; empty if `base` was not run."""
    if base not in by_strategy:
        return {}
    own = speeds(by_strategy[base])
    return {
        strategy: {name: round(speed / own[name], 3) for name, speed in speeds(runs).items()}
        for strategy, runs in by_strategy.items()
    }


def idle_slot_steps(runs: Sequence[Summary]) -> float:
    """The mean over runs of the share of slot-steps in which the slot did not run."""
    return round(statistics.mean(run.idle_slot_steps or 0.0 for run in runs), 3)


def quantiles(lengths: Sequence[int]) -> dict[str, float]:
    cuts = statistics.quantiles(lengths, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}


def share_right_second_half(batches: Sequence[BatchTaken]) -> float:
    """The share of right answers in the second half of training: of 160 samples, those from 81 to 160."""
    samples = [sample for batch in batches for sample in batch.samples]
    assert [batch.update for batch in batches] == sorted({batch.update for batch in batches}), "updates are in order"
    assert len(samples) == len(set(samples)) > 1, "every sample was trained once"
    least = SortedConfig.load(CONFIG).eval.right_above  # right as in evaluations: parts of a reward do not count
    is_right = [reward > least for batch in batches for reward in batch.rewards]
    return statistics.mean(is_right[len(is_right) // 2 :])


def paired(runs: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Differences of every strategy to both bases in the registered figures, paired by seed, with Student's intervals.

    `runs` has a run's figures by strategy and seed. A comparison with fewer than two common seeds is left out.
    """
    found: list[dict[str, Any]] = []
    for base in BASES:
        for strategy, own in runs.items():
            seeds = sorted(own.keys() & runs.get(base, {}).keys())
            if strategy == base or len(seeds) < 2:
                continue
            for figure in LEARN_FIGURES:
                ends = student([own[seed][figure] - runs[base][seed][figure] for seed in seeds])
                row = {"strategy": strategy, "base": base, "figure": figure, "seeds": len(seeds)}
                found.append({**row, "difference": ends, "answer": answer_of(ends, len(seeds))})
    return found


def answer_of(ends: tuple[float, float, float], seeds: int) -> str:
    """Where a strategy is against its base: decided by the whole interval, and with five seeds only."""
    if seeds < VERDICT_SEEDS or ends[1] <= 0 <= ends[2]:
        return "undecided"
    return "ahead" if ends[1] > 0 else "behind"


def result(
    by_strategy: Mapping[str, Sequence[Summary]],
    lengths: Sequence[int],
    facts: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Everything about the runs; `facts` has more about each of them, in the same order."""
    runs = {strategy: [run.model_dump(mode="json") for run in runs] for strategy, runs in by_strategy.items()}
    for strategy, more in (facts or {}).items():
        runs[strategy] = [{**run, **fact} for run, fact in zip(runs[strategy], more, strict=True)]
    by_seed = {strategy: {run["seed"]: run for run in own if SECOND_HALF in run} for strategy, own in runs.items()}
    return {
        "runs": [run for own in runs.values() for run in own],
        "ratio": ratios(by_strategy, "sync"),
        "ratio_large": ratios(by_strategy, "sync-large"),
        "lengths": quantiles(lengths),
        "idle_slot_steps": {strategy: idle_slot_steps(runs) for strategy, runs in by_strategy.items()},
        SECOND_HALF: {
            strategy: statistics.mean(run[SECOND_HALF] for run in own.values())
            for strategy, own in by_seed.items()
            if own
        },
        "paired": paired(by_seed),
    }


def table(by_strategy: Mapping[str, Sequence[Summary]], found: Mapping[str, Any]) -> Table:
    lengths = ", ".join(f"{name} {value:.0f}" for name, value in found["lengths"].items())
    shown = Table("strategy", box=None, caption=f"lengths in tokens: {lengths}", caption_justify="left")
    headers = ["idle", "tokens/s", "rollout", "whole", "whole/large", "rollout s", "update s", "stale", "accuracy"]
    for header in [*headers, *(["2nd half"] if found[SECOND_HALF] else [])]:
        shown.add_column(header, justify="right")
    for strategy, runs in by_strategy.items():
        ratio, large = found["ratio"].get(strategy), found["ratio_large"].get(strategy)
        before, after = (mean_of([getattr(run, f"accuracy_{when}") for run in runs]) for when in ("before", "after"))
        second = found[SECOND_HALF].get(strategy)
        shown.add_row(
            strategy,
            share(found["idle_slot_steps"][strategy]),
            f"{speeds(runs)['whole']:.1f}",
            *(f"{ratio[name]:.2f}" if ratio else "–" for name in ("rollout", "whole")),
            f"{large['whole']:.2f}" if large else "–",
            f"{sum(run.rollout_s or 0 for run in runs):.0f}",
            f"{sum(run.update_s or 0 for run in runs):.0f}",
            str(max(run.staleness_max or 0 for run in runs)),
            "–" if before is None or after is None else f"{before:.2f} → {after:.2f}",
            *([] if second is None else [f"{second:.2f}"]),
        )
    return shown


def paired_table(found: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table("strategy", "against", "figure", "difference", "seeds", "answer", box=None)
    for row in found:
        ends = interval(row["difference"], "+.3f")
        shown.add_row(row["strategy"], row["base"], row["figure"], ends, str(row["seeds"]), row["answer"])
    return shown


def mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


# ---- the command -----------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    known = [name for name in STRATEGIES if name in list(Strategy)]
    parser.add_argument("--strategies", default=",".join(known), help=f"default: {','.join(known)}")
    parser.add_argument("--samples", type=int, help=f"per run; default {SAMPLES}, with --learn {LEARN_SAMPLES}")
    parser.add_argument("--seeds", type=int, default=1, help="runs per strategy")
    parser.add_argument("--slots", type=int, default=8, help="slots, and samples per update")
    parser.add_argument("--threads", type=int, help="run.threads; one is faster than two beside other work")
    parser.add_argument("--full", action="store_true", help="train all weights instead of adapters")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "int16"), help="engine.dtype")
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    parser.add_argument("--learn", action="store_true", help="evaluate before and after; continues stopped runs")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "real_tail", help="folder of the runs")
    parser.add_argument("--python", help="interpreter of the runs; default: this one, for vllm that of `make vllm`")
    options = parser.parse_args()
    options.strategies = [name.strip() for name in options.strategies.split(",") if name.strip()]
    unknown = [name for name in options.strategies if name not in list(Strategy)]
    if unknown or not options.strategies:
        parser.error(f"unknown strategy {', '.join(unknown)}: choose from {', '.join(Strategy)}")
    if options.slots < 1 or options.seeds < 1 or (options.samples is not None and options.samples < options.slots):
        parser.error("--slots and --seeds must be at least 1, and --samples at least --slots")
    options.python = options.python or find_python(options.engine)
    options.runs = options.runs.resolve()
    return options


def find_python(engine: str) -> str:
    """The interpreter of the runs: this one, or for vLLM that of `make vllm` if it is there."""
    own = ROOT / ".venv-vllm" / "bin" / "python"
    return str(own) if engine == "vllm" and own.exists() else sys.executable


def group_name(options: argparse.Namespace) -> str:
    """The folder of runs with the same main flags; the runs' own names tell them apart (`run_folder`)."""
    parts = (
        "learn" if options.learn else "speed",
        options.engine,
        options.slots,
        options.dtype,
        options.full and "full",
    )
    return "-".join(str(part) for part in parts if part)


def main() -> None:
    options, made_by = parse(), stamp()
    start = make_start(options.runs)
    if options.learn:
        start = make_impatient_start(options.runs, start)
    by_strategy: dict[str, list[Summary]] = {strategy: [] for strategy in options.strategies}
    facts: dict[str, list[dict[str, Any]]] = {strategy: [] for strategy in options.strategies}
    lengths: list[int] = []
    for seed in range(options.seeds):
        for strategy in options.strategies:
            folder = run_folder(strategy, seed, start, options)
            _out.print(f"{strategy}, seed {seed}")
            train(folder, overrides(strategy, seed, start, folder, options), options)
            by_strategy[strategy].append(Summary.read(folder / "summary.json"))
            facts[strategy].append(facts_of(folder, learn=options.learn))
            lengths += read_lengths(folder)
    found = result(by_strategy, lengths, facts)
    flags = {name: getattr(options, name) for name in ("slots", "threads", "full", "dtype", "engine", "seeds")}
    flags["samples"] = samples_of(options)
    name = "real_tail" + ("_learn" if options.learn else "") + ("_vllm" if options.engine == "vllm" else "")
    save(name, {"stamp": made_by, "options": flags, **found})
    if options.json:
        print(json.dumps(found))
    else:
        console = Console(width=int(os.environ.get("COLUMNS", "120")))
        console.print(table(by_strategy, found))
        if found["paired"]:
            console.print(paired_table(found["paired"]))


if __name__ == "__main__":
    main()
