"""What the verifiers accept and reject: references of math suites, adversarial outputs, generators of reasoning-gym.

    python -m benchmarks.tasks.verifiers math --data DIR      # references are accepted, changed ones are rejected
    python -m benchmarks.tasks.verifiers storm --count 10000  # outputs that try to crash, hang or fool: no reward
    python -m benchmarks.tasks.verifiers gym                  # every generator makes a prompt and scores its answer

Each prints its table as Markdown (for docs/guides/own_data.md) and saves its figures. DIR contains the suites as JSON
lines with their original field names, as in the evaluation data of Qwen2.5-Math.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.record import make_parser, save
from benchmarks.tasks.adversarial import KINDS, LOGIC_REFERENCE, MATH_REFERENCE, outputs
from sortedrl.reward.pool import RewardPool
from sortedrl.tasks.files import read_rows
from sortedrl.tasks.gym import FORMULAS, LISTS, generator_names, gym_reward, make_dataset, reference_answer, score
from sortedrl.tasks.logic import logic_reward
from sortedrl.tasks.math import is_equal, is_right, math_reward
from sortedrl.tasks.math import reference_answer as math_reference

SUITES = {"aime24": "answer", "amc23": "answer", "gsm8k": "answer", "math500": "answer", "minerva_math": "solution"}
RESPONSES = (
    "Let me work it out step by step.\nTherefore the final answer is $\\boxed{%s}$.",
    "<think>First, we have $x = \\boxed{1}$, then it follows.</think>\n<answer>%s</answer>",
    "The answer is\n\\[\\boxed{ %s }\\]",
)
SHARES = {"math": 0.3, "logic": 0.4, "gym": 0.3}  # of the adversarial outputs; math answers take longest
GENERATOR_S = 60


def perturbed(text: str, rng: random.Random) -> str:
    """A different answer: one number is changed, or a letter if there is no number."""
    numbers = list(re.finditer(r"\d+", text))
    if numbers:
        chosen = rng.choice(numbers)
        return f"{text[: chosen.start()]}{int(chosen[0]) + rng.choice((1, 2, 10))}{text[chosen.end() :]}"
    letters = [i for i, char in enumerate(text) if char.isalpha() and not re.search(r"\\[a-zA-Z]*$", text[:i])]
    if not letters:
        return f"{text}+1"
    place = rng.choice(letters)
    return f"{text[:place]}{'q' if text[place] != 'q' else 'p'}{text[place + 1 :]}"


def measure_math(folder: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """For each suite the references that are rejected in a response, and the changed ones that are accepted."""
    rng = random.Random(0)
    results = []
    for suite, column in SUITES.items():
        rows = read_rows(folder / f"{suite}.jsonl", columns={"answer": column}, required=("answer",))
        answers = [rows[i]["answer"] for i in range(len(rows))][:limit]
        refused, passed = [], []
        for answer in track(answers, description=suite, console=Console(stderr=True), transient=True):
            reference = math_reference(answer)
            if not all(is_right(response % reference, answer) for response in RESPONSES):
                refused.append(reference)
            other = perturbed(reference, rng)
            if is_equal(other, reference):
                passed.append([reference, other])
        results.append({"suite": suite, "references": len(answers), "refused": refused, "perturbed_accepted": passed})
    return results


def measure_storm(count: int, timeout_s: float = 10.0) -> list[dict[str, Any]]:
    """Score adversarial outputs with the reward pool that training uses, with one worker process."""
    gym = [{"name": name, "seed": "storm", "item": 0, "options": {}} for name in sorted(LISTS | FORMULAS)]
    setups: dict[str, tuple[Any, Any]] = {
        "math": (math_reward, lambda n: {"answer": MATH_REFERENCE}),
        "logic": (logic_reward, lambda n: {"answer": LOGIC_REFERENCE}),
        "gym": (gym_reward, lambda n: {"gym": gym[n // len(KINDS["gym"]) % len(gym)]}),
    }
    results = []
    for kind, (reward, columns) in setups.items():
        texts = outputs(kind, round(count * SHARES[kind]))
        pool = RewardPool(reward, timeout_s=timeout_s, workers=1)
        start, slowest, rewards = time.monotonic(), 0.0, []
        try:
            pool.start()
            for number, text in enumerate(track(texts, description=kind, console=Console(stderr=True), transient=True)):
                begun = time.monotonic()
                pool.submit((number, 0), "p", text, columns(number))
                while not (scores := pool.poll(1.0)):
                    pass
                slowest = max(slowest, time.monotonic() - begun)
                rewards.append(scores[0].reward)
        finally:
            pool.close()
        failures = {name.rpartition(".")[2]: num for name, num in pool.errors.items()}
        results.append(
            {
                "verifier": kind,
                "outputs": len(texts),
                "rewarded": sum(reward > 0 for reward in rewards),
                "largest_reward": max(rewards),
                "slowest_s": round(slowest, 2),
                "failures": failures,
                "seconds": round(time.monotonic() - start),
            }
        )
    return results


def measure_gym(names: Sequence[str]) -> list[dict[str, Any]]:
    """For each generator whether it makes a prompt, and the score of its own answer."""
    return [_measure_generator(name) for name in track(names, console=Console(stderr=True), transient=True)]


class _TooLong(BaseException):
    pass


def _raise_too_long(signum: int, frame: object) -> None:
    raise _TooLong


def _measure_generator(name: str) -> dict[str, Any]:
    result: dict[str, Any] = {"generator": name, "loads": False, "score": None, "item_s": None, "reason": ""}
    signal.signal(signal.SIGALRM, _raise_too_long)
    signal.alarm(GENERATOR_S)
    start = time.monotonic()
    try:
        item = make_dataset(name, "check/0")[0]
        result |= {"loads": True, "item_s": round(time.monotonic() - start, 2)}
        assert item["question"].strip(), "the prompt is empty"
        answer = reference_answer(name, item)
        if answer is None:
            result["reason"] = "gives no answer, only a score"
        else:
            origin = {"name": name, "seed": "check/0", "item": 0, "options": {}}
            result["score"] = score(f"<answer>{answer}</answer>", origin)
            result["reason"] = "" if result["score"] == 1.0 else f"scores its own answer {result['score']}"
    except _TooLong:
        result["reason"] = f"takes more than {GENERATOR_S} s"
    except Exception as error:
        result["reason"] = " ".join(str(error).split())[:120]
    finally:
        signal.alarm(0)
    return result


def _print_table(rows: Sequence[dict[str, Any]]) -> None:
    names = list(rows[0])
    print(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}")
    for row in rows:
        cells = [len(row[name]) if isinstance(row[name], list) else row[name] for name in names]
        print(f"| {' | '.join(str(cell) for cell in cells)} |")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("what", choices=("math", "storm", "gym"))
    parser.add_argument("--data", type=Path, help="folder of the math suites (for math)")
    parser.add_argument("--count", type=int, default=10_000, help="number of outputs (for storm)")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    match options.what:
        case "math":
            if options.data is None:
                parser.error("math needs --data DIR, the folder of the suites")
            results = measure_math(options.data)
        case "storm":
            results = measure_storm(options.count)
        case _:
            results = measure_gym(generator_names())
    if not options.no_save:
        save(f"verifiers_{options.what}", {"results": results})
    if options.json:
        json.dump({"results": results}, sys.stdout)
    elif options.what == "gym":
        _print_table([row for row in results if row["reason"] or row["item_s"] > 1.0])
    else:
        _print_table(results)


if __name__ == "__main__":
    main()
