"""Try every command with bad input: each must end with one line, the right exit code, no traceback, and in time.

    python tools/bad_input.py [--only TEXT] [--jobs 2] [--json]

A user's mistake must give exit code 2, a run that cannot learn 3, a ledger with broken guarantees 1. `CASES` is a plain
list: add a line for a new mistake. `{files}` in an argument is the folder that `write_files` fills, `{runs}` the folder
that `write_runs` fills with a finished run and damaged copies of it. Each case runs in an empty folder, in a process
that is forked from this one, because importing torch takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TIME_LIMIT_S = 120.0  # of a case, on a busy machine
MAX_LINES = 16  # on stderr: progress and warnings included
HAS_ERROR_LINE = "error: "


@dataclass(slots=True, kw_only=True, frozen=True)
class Case:
    name: str
    arguments: tuple[str, ...]
    code: int = 2
    says: str = ""  # a part of the output
    missing: tuple[str, ...] = ()  # packages that are taken for not installed
    has_error_line: bool = True


def case(name: str, *arguments: str, code: int = 2, says: str = "", missing: tuple[str, ...] = ()) -> Case:
    is_table = arguments[:1] == ("doctor",) or code == 1  # they print findings to stdout
    return Case(name=name, arguments=arguments, code=code, says=says, missing=missing, has_error_line=not is_table)


QUICK = ("train", "quickstart")
SHORT = ("run.samples=256", "engine.max_new_tokens=8", "run.report=false", "eval.prompts=0")
DATA = (*QUICK, "task=dataset", "task.reward=rewards:constant", "task.max_prompt_tokens=64", *SHORT)
RESUME = ("train", "--resume")
DRAWN = ("--trace", "lognormal(70, 1, 500)", "--strategy", "sync")


def rows(name: str, *more: str) -> tuple[str, ...]:
    return (*DATA, f"task.path={{files}}/{name}", *more)


def reward(name: str, *more: str) -> tuple[str, ...]:
    return (*QUICK, *SHORT, f"task.reward={name}", *more)


CASES: list[Case] = [
    case("unknown command", "tarin", says="tarin"),
    case("unknown option", *QUICK, "--fast", says="--fast"),
    # ---- configuration files ----
    case("train without a configuration", "train", says="no configuration is given"),
    case("missing configuration", "train", "none.toml", says="none.toml"),
    case("a folder as configuration", "train", "{files}", says="cannot read"),
    case("binary configuration", "train", "{files}/binary.toml", says="not valid TOML"),
    case("configuration in another encoding", "train", "{files}/latin1.toml", says="not valid TOML"),
    case("broken TOML", "train", "{files}/broken.toml", says="not valid TOML"),
    case("a key twice", "train", "{files}/twice.toml", says="not valid TOML"),
    case("unknown section", "train", "{files}/section.toml", says="did you mean"),
    case("a section that is a number", "train", "{files}/scalar.toml", says="run"),
    case("a NUL in a name", "train", "{files}/nul.toml", says="NUL"),
    case("arrays nested ten thousand deep", "train", "{files}/deep.toml", says="nested too deeply"),
    case("a name longer than the file system takes", "train", "x" * 5000, says="x"),
    # ---- keys and values ----
    case("override without a value", *QUICK, "run.seed", says="run.seed"),
    case("override of an unknown key", *QUICK, "run.sed=1", says="did you mean run.seed"),
    case("override with too many parts", *QUICK, "a.b.c.d=1", says="a.b.c.d"),
    case("text for a number", *QUICK, "run.samples=many", says="run.samples"),
    case("a number of five thousand digits", *QUICK, "run.seed=" + "1" * 5000, says="run.seed"),
    case("no samples", *QUICK, "run.samples=0", says="run.samples"),
    case("fewer samples than an update", *QUICK, "run.samples=8", says="update_batch 16"),
    case("learning rate that is not finite", *QUICK, "learner.lr=nan", says="learner.lr"),
    case("negative temperature", *QUICK, "engine.temperature=-1", says="engine.temperature"),
    case("group size that does not divide", *QUICK, "learner=grpo", "learner.group_size=5", says="multiple of"),
    case("group of one", *QUICK, "learner=grpo", says="compares siblings"),
    case(
        "greedy siblings",
        *(*QUICK, "learner=grpo", "learner.group_size=4", "engine.temperature=0"),
        says="makes all 4 answers to a prompt equal",
    ),
    case("unknown strategy", *QUICK, "schedule=sorted", says="schedule.strategy"),
    case("sync with lookahead", *QUICK, "schedule=sync", "schedule.lookahead=2", says="contradicts"),
    case("sync with overlap", *QUICK, "schedule=sync", "schedule.overlap=true", says="contradicts"),
    case(
        "exact batches that cannot wait", *QUICK, "schedule=async", "schedule.exact_batch=true", says="cannot be kept"
    ),
    case("plan from no logs", "plan", "--from-logs", "{files}/none", says="none"),
    case(
        "plan from logs and a trace",
        "plan",
        "--from-logs",
        "{files}",
        "--trace",
        "lognormal(70, 1, 500)",
        says="--trace",
    ),
    case("exact_batch with a number", *QUICK, "schedule.exact_batch=16", says="schedule.exact_batch"),
    case("async without overlap", *QUICK, "schedule=async", "schedule.overlap=false", says="contradicts"),
    case(
        "a staleness bound that cannot be kept",
        *(*QUICK, "schedule=async", "schedule.max_staleness=0"),
        says="cannot be kept",
    ),
    case("unknown algorithm", *QUICK, "learner=ppo2", says="learner.algorithm"),
    case("unknown engine", *QUICK, "engine=sglang", says="engine.kind"),
    case("more slots than memory holds", *QUICK, "engine.slots=1000000000000", says="engine.slots"),
    case("answers longer than the model's window", *QUICK, "engine.max_new_tokens=100000", says="positions"),
    case("more ranks than processors", *QUICK, "learner.ranks=1000", says="learner.ranks"),
    case("a name with a slash", *QUICK, "run.name=a/b", says="run.name"),
    case("a name that is too long", *QUICK, "run.name=" + "x" * 300, says="name"),
    case("a run directory below a file", *QUICK, "run.dir={files}/rows.jsonl", says="not a folder"),
    case("a run directory that cannot be written", *QUICK, "run.dir=/proc/runs", says="/proc/runs"),
    # ---- extras ----
    case("vLLM is not installed", *QUICK, "engine=vllm", missing=("vllm",), says="needs the extra vllm"),
    case("no server at the address", *QUICK, "engine=vllm", "engine.address=http://127.0.0.1:9", says="127.0.0.1:9"),
    case("wandb is not installed", *QUICK, "track.to=[wandb]", missing=("wandb",), says="wandb"),
    case("unknown tracker", *QUICK, "track.to=[mlflow]", says="track.to"),
    case("peft is not installed", *QUICK, "lora.rank=4", missing=("peft",), says="needs the extra lora"),
    case("Ray is not installed", *QUICK, "engine.replicas=2", missing=("ray",), says="ray"),
    # ---- objects of the user's, hub ids, names of other frameworks ----
    case("an engine in a missing module", *QUICK, "engine=nowhere:Engine", says="there is no module nowhere"),
    case("an engine that is no engine", *QUICK, "engine=json:dumps", says="engine.kind"),
    case("an algorithm that a module lacks", *QUICK, "learner=json:grpo", says="json has no grpo"),
    case("a strategy that is no strategy", *QUICK, "schedule=json:dumps", says="schedule.strategy"),
    case("a task that a module lacks", *QUICK, "task=json:Task", says="json has no Task"),
    case("a tracker in a missing module", *QUICK, "track.to=nowhere:T", says="there is no module nowhere"),
    case("a relative module", *QUICK, "learner.advantage=.own:f", says="relative"),
    case("a model of the hub that cannot be had", *QUICK, "model.path=owner/none", says="owner/none"),
    case("a dataset of the hub that cannot be had", *DATA, "task.path=owner/none", says="owner/none"),
    case("a reward model that cannot be had", *QUICK, "task.reward=owner/none", says="owner/none"),
    case("adapters that cannot be had", *QUICK, "lora.path=owner/none", says="owner/none"),
    case("a name of TRL", *QUICK, "num_generations=8", says="set learner.group_size"),
    case("a name of verl", *QUICK, "actor_rollout_ref.rollout.n=8", says="set learner.group_size"),
    case("an option of OpenRLHF", *QUICK, "--n_samples_per_prompt", "8", says="learner.group_size"),
    # ---- tasks and rows ----
    case("unknown task", *QUICK, "task=chess", says="chess"),
    case("unknown reasoning_gym task", *QUICK, "task=reasoning_gym:chess960", says="chess960"),
    case("unknown people", *QUICK, 'task.people={ "0" = 1 }', says="people"),
    case("dataset without a path", *DATA, says="task.path"),
    case("missing rows", *rows("none.jsonl"), says="none.jsonl"),
    case("no rows", *rows("empty.jsonl"), says="empty.jsonl"),
    case("rows without a prompt", *rows("no_prompt.jsonl"), says="prompt"),
    case("a broken row", *rows("broken.jsonl"), says="broken.jsonl"),
    case("binary rows", *rows("binary.jsonl"), says="binary.jsonl"),
    case("rows that are lists", *rows("lists.jsonl"), says="lists.jsonl"),
    case("a prompt that is a number", *rows("number.jsonl"), says="prompt"),
    case("a prompt that is null", *rows("null.jsonl"), says="prompt"),
    case("a prompt that is too long", *rows("long.jsonl"), says="tokens"),
    case("an empty prompt", *rows("blank.jsonl"), says="prompt"),
    case("messages without a chat template", *rows("chat.jsonl"), says="chat template"),
    case("a row nested ten thousand deep", *rows("deep.jsonl"), says="deep.jsonl"),
    case("a column that is not there", *rows("rows.jsonl", "task.columns.prompt=question"), says="question"),
    case("a split that is not there", *rows("rows.jsonl", "task.split=validation"), says="validation"),
    case("Parquet that is none", *rows("binary.parquet"), says="binary.parquet"),
    case("CSV that is none", *rows("binary.csv"), says="binary.csv"),
    case("unknown kind of file", *rows("rows.xyz"), says="rows.xyz"),
    case("template without the prompt", *rows("rows.jsonl", "task.template=Solve"), says="template"),
    # ---- rewards ----
    case("reward module that is missing", *reward("nowhere:score"), says="nowhere"),
    case("reward function that is missing", *reward("rewards:nothing"), says="nothing"),
    case("reward without a function", *reward("rewards"), says="rewards"),
    case("reward that cannot be called", *reward("rewards:NUMBER"), says="NUMBER"),
    case("reward module that raises", *reward("raising:score"), says="raising"),
    case("relative reward module", *reward(".rewards:score"), says=".rewards"),
    case("too many weights", *reward("rewards:constant", "reward.weights=[1.0,2.0]"), says="weights"),
    case("reward that raises, on_error = stop", *reward("rewards:raises", "reward.on_error=stop"), says="raises"),
    case("reward that raises", *reward("rewards:raises"), code=3, says="none of the first 32 answers"),
    case("reward that raises under skip", *reward("rewards:raises", "reward.on_error=skip"), code=3, says="raises"),
    case("reward that is a number", *reward("rewards:scalar"), code=3, says="returned a float"),
    case("reward of the wrong length", *reward("rewards:short"), code=3, says="rewards for"),
    case("reward that is not finite", *reward("rewards:not_finite"), code=3, says="returned nan"),
    case("reward that is text", *reward("rewards:text"), code=3, says="as a reward"),
    case("reward that is None", *reward("rewards:nones"), code=3, says="returned None"),
    case("reward too large for float32", *reward("rewards:huge"), code=3, says="1e+300"),
    case("reward that ends its process", *reward("rewards:dies"), code=3, says="ended its worker process"),
    case("reward that never returns", *reward("rewards:sleeps", "reward.timeout_s=0.3"), code=3, says="longer than"),
    case("reward that is always the same", *reward("rewards:constant"), code=3, says="first 8 updates"),
    case("held-out answers cannot be scored", *reward("rewards:raises", "eval.prompts=64"), code=3, says="held-out"),
    # ---- models ----
    case("missing model", *QUICK, "model=nowhere", says="nowhere"),
    case("an empty model folder", *QUICK, "model={files}/empty_model", says="empty_model"),
    case("a model configuration that is none", *QUICK, "model={files}/garbage_model", says="garbage_model"),
    case("a model as pickle", *QUICK, "model={files}/pickle_model", says="pickle_model"),
    case("a model with its own code", *QUICK, "model={files}/code_model", says="code_model"),
    # ---- resuming ----
    case("resume nothing", *RESUME, "{runs}/none", says="holds no run"),
    case("resume a folder without a run", *RESUME, "{files}", says="holds no run"),
    case("resume with a configuration", *RESUME, "{runs}/good", "other.toml", says="leave out other.toml"),
    case("resume with another seed", *RESUME, "{runs}/good", "run.seed=9", says="run.seed was"),
    case("resume a damaged configuration", *RESUME, "{runs}/bad_config", says="not valid TOML"),
    case("resume without weights", *RESUME, "{runs}/no_weights", "run.samples=320", says="no_weights"),
    case("resume with the ledger of another run", *RESUME, "{runs}/bad_ledger", "run.samples=320", says="ledger"),
    # ---- compare ----
    case("compare unknown strategies", "compare", "quickstart", "--strategies", "sync,fast", says="fast"),
    case("compare nothing", "compare", "quickstart", "--strategies", ",", says="names no strategy"),
    case("compare no seeds", "compare", "quickstart", "--seeds", "0", says="seeds"),
    case("compare a missing configuration", "compare", "none.toml", says="none.toml"),
    case("compare with a broken reward", "compare", *reward("rewards:raises")[1:], code=3, says="raises"),
    # ---- eval ----
    case("evaluate a missing model", "eval", "nowhere", "--suite", "knights", says="nowhere"),
    case("evaluate an unknown suite", "eval", "knights-tiny", "--suite", "arc", says="arc"),
    case("evaluate without a suite", "eval", "knights-tiny", says="suite"),
    case("evaluate without data", "eval", "knights-tiny", "--suite", "gsm8k", "--data", "{files}", says="gsm8k"),
    case("evaluate no samples", "eval", "knights-tiny", "--suite", "knights", "--samples", "0", says="samples"),
    case(
        "evaluate beyond the window",
        *("eval", "knights-tiny", "--suite", "knights", "--max-tokens", "1000000"),
        says="--max-tokens",
    ),
    case(
        "evaluate on an unknown engine",
        "eval",
        "knights-tiny",
        "--suite",
        "knights",
        "--max-tokens",
        "4",
        "--engine",
        "x",
        says="engine",
    ),
    case(
        "answers that cannot be written",
        *("eval", "knights-tiny", "--suite", "knights", "--limit", "1", "--max-tokens", "4", "--out", "no/answers"),
        says="no/answers",
    ),
    # ---- simulate and plan ----
    case("simulate without a trace", "simulate", says="trace"),
    case("simulate a missing trace", "simulate", "--trace", "none.json", says="none.json"),
    case("simulate a binary trace", "simulate", "--trace", "{files}/binary.json", says="binary.json"),
    case("simulate no lengths", "simulate", "--trace", "{files}/no_lengths.json", says="no_lengths.json"),
    case("simulate negative lengths", "simulate", "--trace", "{files}/negative.json", says="negative.json"),
    case("simulate lengths that are not finite", "simulate", "--trace", "{files}/nan.json", says="nan.json"),
    case(
        "simulate lengths of any size",
        "simulate",
        "--trace",
        "{files}/huge.json",
        "--update-batch",
        "1",
        says="huge.json",
    ),
    case("simulate lengths drawn of any size", "simulate", "--trace", "lognormal(1e30, 1, 1e40)", says="lognormal"),
    case("simulate without end", "simulate", *DRAWN, "--samples", "1000000000000", says="--samples"),
    case("simulate slots without end", "simulate", *DRAWN, "--slots", "1000000000000", says="--slots"),
    case(
        "simulate prompts without end", "simulate", *DRAWN, "--prompt-tokens", "1000000000000", says="--prompt-tokens"
    ),
    case("simulate no number of divergence", "simulate", *DRAWN, "--divergence", "nan", says="--divergence"),
    case("simulate lengths that shrink to nothing", "simulate", *DRAWN, "--drift", "0", says="--drift"),
    case("simulate updates without end", "simulate", *DRAWN, "--update-s", "inf", says="--update-s"),
    case("simulate a broken distribution", "simulate", "--trace", "lognormal(1)", says="lognormal"),
    case("simulate a column that is missing", "simulate", "--trace", "{files}/lengths.csv", says="length"),
    case("simulate an unknown strategy", "simulate", "--trace", "{files}/l.json", "--strategy", "x", says="'x'"),
    case("simulate without slots", "simulate", "--trace", "{files}/l.json", "--slots", "0", says="slots"),
    case("simulate any lookahead", "simulate", "--trace", "{files}/l.json", "--lookahead", "many", says="lookahead"),
    case("simulate an unknown cost", "simulate", "--trace", "{files}/l.json", "--cost", "free", says="free"),
    case(
        "a page that cannot be written",
        "simulate",
        "--trace",
        "{files}/l.json",
        "--update-batch",
        "8",
        "--html",
        "no/x.html",
        says="no/x",
    ),
    case("plan nothing", "plan", says="--trace"),
    case("plan from a missing run", "plan", "--from-run", "{runs}/none", says="none"),
    case("plan from a damaged run", "plan", "--from-run", "{runs}/bad_summary", says="summary.json"),
    case("plan from a run without events", "plan", "--from-run", "{runs}/no_events", says="events.jsonl"),
    case("plan for unknown hardware", "plan", "--trace", "{files}/l.json", "--hardware", "h1000", says="h1000"),
    case("plan without candidates", "plan", "--trace", "{files}/l.json", "--candidates", "0", says="candidates"),
    case(
        "a plan that cannot be written",
        *("plan", "--trace", "{files}/l.json", "--slots", "8", "--candidates", "1", "--out", "no/plan.toml"),
        says="no/plan.toml",
    ),
    # ---- reading runs ----
    case("report nothing", "report", says="'RUN'"),
    case("report a missing run", "report", "{runs}/none", says="none"),
    case("report a run without events", "report", "{runs}/no_events", says="events.jsonl"),
    case("report binary events", "report", "{runs}/bad_events", says="events.jsonl"),
    case("report a damaged summary", "report", "{runs}/bad_summary", says="summary.json"),
    case("a report that cannot be written", "report", "{runs}/good", "--out", "no/report.html", says="no/report.html"),
    case("trace a missing run", "trace", "{runs}/none", says="none"),
    case("trace binary events", "trace", "{runs}/bad_events", says="events.jsonl"),
    case("a trace that cannot be written", "trace", "{runs}/good", "--perfetto", "no/t.json", says="no/t.json"),
    case("ledger of a missing run", "ledger", "{runs}/none", says="none"),
    case("ledger that is no database", "ledger", "{runs}/bad_ledger", says="ledger"),
    case("ledger that is empty", "ledger", "{runs}/empty_ledger", says="ledger"),
    case("ledger that is damaged", "ledger", "{runs}/cut_ledger", "--verify", says="ledger"),
    case("history of an unknown sample", "ledger", "{runs}/good", "--sample", "99999", says="99999"),
    case("history of a sample below 0", "ledger", "{runs}/good", "--sample", "-1", says="sample"),
    case("a summary that the ledger contradicts", "ledger", "{runs}/other_summary", "--verify", code=1, says="summary"),
    # ---- doctor, dashboard, sft, bench ----
    case("doctor on a missing configuration", "doctor", "none.toml", says="none.toml"),
    case("doctor on broken TOML", "doctor", "{files}/broken.toml", says="not valid TOML"),
    case("doctor for unknown hardware", "doctor", "quickstart", "--hardware", "h1000", says="h1000"),
    case("doctor from a missing run", "doctor", "quickstart", "--from-run", "none", says="none"),
    case("dashboard of a missing folder", "dashboard", "{runs}/none", "--port", "0", says="none"),
    case("dashboard for others without a token", "dashboard", "{runs}", "--host", "192.0.2.1", says="token"),
    case("dashboard with a short token", "dashboard", "{runs}", "--host", "192.0.2.1", "--token", "x", says="16"),
    case("dashboard on an impossible port", "dashboard", "{runs}", "--port", "99999", says="port"),
    case("dashboard without its packages", "dashboard", "{runs}", missing=("starlette", "uvicorn"), says="dashboard]"),
    case("sft of a missing configuration", "sft", "none.toml", says="none.toml"),
    case("sft of missing rows", "sft", "quickstart", "sft.path=none.jsonl", says="none.jsonl"),
    case("sft of rows without answers", "sft", "quickstart", "sft.path={files}/rows.jsonl", says="compl"),
    case("sft without steps", "sft", "quickstart", "--steps", "0", says="steps"),
    case("sft with keys and no configuration", "sft", "folder", "run.seed=1", says="overrides and --out"),
    case("a model that cannot be written", "sft", "{files}/rows.jsonl/model", "--steps", "1", says="rows.jsonl"),
    # ---- configurations by name, export ----
    case("a name that does not ship", "train", "quikstart", says="did you mean quickstart"),
    case("a run directory as configuration", "train", "{runs}/good", says="--resume"),
    case("configs of an unknown name", "configs", "none", says="none"),
    case("init with a path", "init", "a/b", says="a/b"),
    case("init with a bad name", "init", "9 lives", says="9 lives"),
    case("export of a missing run", "export", "{runs}/none", "--to", "out", says="none"),
    case("export without a target", "export", "{runs}/good", says="--to"),
    case("export of a missing version", "export", "{runs}/good", "--to", "out", "--version", "99", says="99"),
    case("export of adapters that there are not", "export", "{runs}/good", "--to", "out", "--adapter", says="adapter"),
    case("export over a file", "export", "{runs}/good", "--to", "{files}/rows.jsonl", says="rows.jsonl"),
    case("bench of a missing model", "bench", "engine", "--model", "nowhere", says="nowhere"),
    case("bench against an unknown peer", "bench", "engine", "--model", "knights-tiny", "--against", "x", says="x"),
    case("bench without rounds", "bench", "engine", "--rounds", "0", says="rounds"),
    case("bench on a missing trace", "bench", "learner", "--model", "knights-tiny", "--trace", "none", says="none"),
]


# ---- the files ------------------------------------------------------------------------------------------------------

REWARDS = """
import os, time
NUMBER = 5
def constant(completions, **columns): return [0.5] * len(completions)
def raises(completions, **columns): raise ValueError("no judge")
def scalar(completions, **columns): return 1.0
def short(completions, **columns): return [1.0] * (len(completions) + 1)
def not_finite(completions, **columns): return [float("nan")] * len(completions)
def text(completions, **columns): return ["1.0"] * len(completions)
def nones(completions, **columns): return [None] * len(completions)
def huge(completions, **columns): return [1e300] * len(completions)
def dies(completions, **columns): os._exit(7)
def sleeps(completions, **columns): time.sleep(1000)
"""
BINARY = bytes(range(256)) * 8
PROMPT = "Ann says Bob-knave . Bob says Ann-knight . ?"


def write_files(folder: Path) -> None:
    """Bad configurations, rows, traces and models, and reward functions that fail."""
    folder.mkdir()
    deep = "[" * 10_000 + "]" * 10_000
    texts = {
        "rewards.py": REWARDS,
        "raising.py": "1 / 0\n",
        "broken.toml": "[run\nname = 1\n",
        "twice.toml": '[run]\nname = "a"\nname = "b"\n',
        "section.toml": "[lerner]\nlr = 1\n",
        "scalar.toml": "run = 3\n",
        "nul.toml": '[run]\nname = "a\\u0000b"\n',
        "deep.toml": f"[task]\noptions = {{ a = {deep} }}\n",
        "rows.jsonl": "".join(json.dumps({"prompt": f"{PROMPT} {number}"}) + "\n" for number in range(4)),
        "rows.xyz": "rows\n",
        "empty.jsonl": "",
        "no_prompt.jsonl": '{"question": "?"}\n',
        "broken.jsonl": '{"prompt": "Ann"}\n{"prompt": \n',
        "lists.jsonl": "[1, 2]\n[3]\n",
        "number.jsonl": '{"prompt": 5}\n',
        "null.jsonl": '{"prompt": null}\n',
        "blank.jsonl": '{"prompt": ""}\n',
        "long.jsonl": json.dumps({"prompt": PROMPT * 90}) + "\n",
        "chat.jsonl": '{"prompt": [{"role": "user", "content": "Ann"}]}\n',
        "deep.jsonl": f'{{"prompt": "Ann", "extra": {deep}}}\n',
        "no_lengths.json": "[]",
        "negative.json": "[5, -3]",
        "nan.json": "[5, NaN]",
        "huge.json": "[5, 1e30]",
        "l.json": json.dumps([5, 9, 40, 7] * 16),
        "lengths.csv": "tokens\n5\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name in ("binary.toml", "binary.jsonl", "binary.parquet", "binary.csv", "binary.json"):
        (folder / name).write_bytes(BINARY)
    (folder / "latin1.toml").write_bytes('[run]\nname = "Zoë"\n'.encode("latin-1"))
    _write_models(folder)


def _write_models(folder: Path) -> None:
    for name in ("empty_model", "garbage_model", "pickle_model", "code_model"):
        (folder / name).mkdir()
    (folder / "garbage_model" / "config.json").write_text("{")
    from sortedrl.tasks.tiny import knights_tiny_path

    for path in knights_tiny_path().iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder / "pickle_model")
        shutil.copy(path, folder / "code_model")
    (folder / "pickle_model" / "pytorch_model.bin").write_bytes(BINARY)
    settings = json.loads((folder / "code_model" / "config.json").read_text())
    settings |= {"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
    (folder / "code_model" / "config.json").write_text(json.dumps(settings))
    (folder / "code_model" / "mine.py").write_text("raise SystemExit('code of a model ran')\n")


def write_runs(folder: Path) -> None:
    """A finished run, and copies of it with one thing damaged in each."""
    options = (*SHORT, "engine.max_new_tokens=64", f"run.dir={folder}", "run.name=good", "checkpoint.keep=1")
    process = fork(lambda: run_command([*QUICK, *options]), folder.parent / "good")
    assert wait(process, TIME_LIMIT_S) == 0, process.err.read_text()

    def damaged(name: str) -> Path:
        return shutil.copytree(folder / "good", folder / name)

    (damaged("bad_config") / "config.toml").write_text("[run")
    (damaged("bad_summary") / "summary.json").write_text('{"strategy": 5')
    (damaged("bad_events") / "events.jsonl").write_bytes(BINARY)
    (damaged("no_events") / "events.jsonl").unlink()
    (damaged("bad_ledger") / "ledger.sqlite").write_bytes(BINARY)
    (damaged("empty_ledger") / "ledger.sqlite").write_bytes(b"")
    cut = damaged("cut_ledger") / "ledger.sqlite"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    for path in damaged("no_weights").glob("checkpoints/*/*.safetensors"):
        path.unlink()
    for path in (folder / "bad_ledger").glob("checkpoints/*/ledger.sqlite"):
        path.write_bytes(BINARY)
    other = damaged("other_summary") / "summary.json"
    summary = json.loads(other.read_text())
    summary["samples"] += 16
    other.write_text(json.dumps(summary))


# ---- running --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Process:
    """A forked process and the files with its output."""

    pid: int
    out: Path
    err: Path
    began: float = field(default_factory=time.monotonic)


def fork(call: Callable[[], None], folder: Path) -> Process:
    """Run `call` in a forked process, in a new folder, in a process group of its own."""
    folder.mkdir(parents=True)
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Process(pid=pid, out=out, err=err)
    code = 1
    try:
        os.setsid()
        (folder / "cwd").mkdir()
        os.chdir(folder / "cwd")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate((out, err), start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        call()
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_command(arguments: Sequence[str], missing: Sequence[str] = ()) -> None:
    """The command `sortedrl` with these arguments, as its console script runs it."""
    from sortedrl import cli

    for name in missing:
        for loaded in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
            del sys.modules[loaded]
        sys.modules[name] = None  # type: ignore[assignment]  # an import raises ModuleNotFoundError
    sys.argv = ["sortedrl", *arguments]
    cli.main()


def ended(process: Process) -> int | None:
    """The exit code, or None while the process runs; minus the signal's number if one ended it."""
    pid, status = os.waitpid(process.pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def wait(process: Process, seconds: float) -> int | None:
    """The exit code, or None if the process had to be killed."""
    while (code := ended(process)) is None:
        if time.monotonic() - process.began > seconds:
            os.killpg(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
            return None
        time.sleep(0.01)
    return code


@dataclass(slots=True, kw_only=True, frozen=True)
class Outcome:
    case: Case
    code: int | None  # None: it took too long
    seconds: float
    line: str  # the error that it printed
    faults: list[str]


def judge(tried: Case, process: Process, code: int | None) -> Outcome:
    out, err = (path.read_text(encoding="utf-8", errors="replace") for path in (process.out, process.err))
    lines = [line for line in err.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(HAS_ERROR_LINE)]
    faults: list[str] = []
    if code is None:
        faults.append(f"it did not end within {TIME_LIMIT_S:g} s")
    elif code != tried.code:
        faults.append(f"exit code {code}, not {tried.code}")
    if "Traceback" in out + err:
        faults.append("a traceback")
    if tried.has_error_line and len(errors) != 1:
        faults.append(f"{len(errors)} error lines")
    if len(lines) > MAX_LINES:
        faults.append(f"{len(lines)} lines on stderr")
    if tried.says not in " ".join((errors[0] if errors and tried.has_error_line else out + err).split()):
        faults.append(f"it does not say {tried.says!r}")
    line = (errors or [line for line in lines if "Error" in line] or lines or [""])[-1]
    return Outcome(case=tried, code=code, seconds=time.monotonic() - process.began, line=line, faults=faults)


def try_all(cases: Sequence[Case], folder: Path, jobs: int, report: Callable[[Outcome], None]) -> list[Outcome]:
    """Run the cases, `jobs` at a time."""
    places = {"{files}": str(folder / "files"), "{runs}": str(folder / "runs")}
    waiting = list(enumerate(cases))
    running: dict[int, tuple[Case, Process]] = {}
    outcomes: list[Outcome] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            number, tried = waiting.pop(0)
            arguments = list(tried.arguments)
            for place, path in places.items():
                arguments = [text.replace(place, path) for text in arguments]
            process = fork(lambda a=arguments, m=tried.missing: run_command(a, m), folder / "cases" / f"{number:03}")
            running[number] = (tried, process)
        time.sleep(0.02)
        for number, (tried, process) in list(running.items()):
            is_late = time.monotonic() - process.began > TIME_LIMIT_S
            code = wait(process, TIME_LIMIT_S) if is_late else ended(process)
            if code is not None or is_late:
                del running[number]
                outcomes.append(judge(tried, process, code))
                report(outcomes[-1])
    return outcomes


def warm_up(folder: Path) -> None:
    """Import what the commands need, once, and let reward workers find the files."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import sortedrl.run.builders.parts
    import sortedrl.run.suite_eval
    import sortedrl.trainer  # noqa: F401

    torch.set_num_threads(1)
    sys.path.insert(0, str(folder / "files"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="run the cases whose name contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="number of cases to run at the same time")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    os.nice(10)

    def report(outcome: Outcome) -> None:
        if not options.json:
            verdict = "; ".join(outcome.faults) if outcome.faults else "ok"
            print(f"{outcome.code!s:>4}  {outcome.seconds:5.1f} s  {outcome.case.name}: {verdict}")
            if outcome.faults:
                print(f"      {outcome.line[:300]}")

    with tempfile.TemporaryDirectory(prefix="bad-input-") as name:
        folder = Path(name)
        write_files(folder / "files")
        warm_up(folder)
        write_runs(folder / "runs")
        outcomes = try_all([one for one in CASES if options.only in one.name], folder, options.jobs, report)
    bad = [outcome for outcome in outcomes if outcome.faults]
    if options.json:
        fields = ("code", "seconds", "line", "faults")
        record = [{"name": o.case.name, **{key: getattr(o, key) for key in fields}} for o in outcomes]
        print(json.dumps({"cases": record, "num_bad": len(bad)}))
    else:
        print(f"{len(outcomes)} cases, {len(bad)} of them not as they should be")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
