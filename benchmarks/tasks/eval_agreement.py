"""Compare `sortedrl eval` with an independent script: plain batches of transformers, scored by math-verify.

    python -m benchmarks.tasks.eval_agreement --data ../shared/data [--limit 64] [--max-tokens 160]

Both use the same model in float32 and decode greedily. The independent side shares no code with the command: it reads
the file, builds the prompt, generates, and calls `parse` and `verify` of math-verify on the whole response. The script
compares the texts and the scores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import make_parser, save

MODEL = "smollm2-135m"
BATCH = 16
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def main() -> None:
    parser = make_parser(__doc__, has_json=False)
    parser.add_argument("--data", type=Path, required=True, help="folder that contains gsm8k.jsonl")
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--slots", type=int, default=16)
    given = parser.parse_args()
    start = time.perf_counter()
    found, answers = by_command(given)
    command_s = time.perf_counter() - start
    direct = directly(given)
    direct_s = time.perf_counter() - start - command_s
    same_text = [ours["text"] == theirs["text"] for ours, theirs in zip(answers, direct, strict=True)]
    same_mark = [ours["is_right"] == theirs["is_right"] for ours, theirs in zip(answers, direct, strict=True)]
    record = {
        "model": MODEL,
        "suite": "gsm8k",
        "limit": given.limit,
        "max_tokens": given.max_tokens,
        "mean_at_1": found["suites"]["gsm8k"]["mean_at_k"],
        "direct_mean_at_1": sum(theirs["is_right"] for theirs in direct) / len(direct),
        "same_texts": sum(same_text),
        "same_marks": sum(same_mark),
        "num": len(direct),
        "truncation_rate": found["suites"]["gsm8k"]["truncation_rate"],
        "mean_length": found["suites"]["gsm8k"]["mean_length"],
        "command_s": command_s,
        "direct_s": direct_s,
        "differing": [
            {"problem": n, "ours": ours, "direct": theirs}
            for n, (ours, theirs) in enumerate(zip(answers, direct, strict=True))
            if not (same_text[n] and same_mark[n])
        ],
    }
    print(json.dumps({key: value for key, value in record.items() if key != "differing"}, indent=1))
    print(save("eval_agreement", record))


def by_command(given: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "answers.jsonl")
        command = [Path(sys.executable).with_name("sortedrl"), "eval", MODEL, "--suite", "gsm8k", "--engine", "local"]
        numbers = ["--limit", given.limit, "--max-tokens", given.max_tokens, "--slots", given.slots]
        options = ["--data", given.data, *numbers, "--out", out, "--json"]
        done = subprocess.run([*map(str, command + options)], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        return json.loads(done.stdout), [json.loads(line) for line in out.read_text().splitlines()]


def directly(given: argparse.Namespace) -> list[dict[str, Any]]:
    import torch
    from math_verify import parse, verify
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sortedrl.learner.smollm2 import smollm2_path

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_path(), dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_path())
    lines = next(given.data.rglob("gsm8k.jsonl")).read_text(encoding="utf-8").splitlines()[: given.limit]
    rows = [json.loads(line) for line in lines]
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    answers = []
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        chats = [[{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}] for row in batch]
        prompts = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompts, do_sample=False, max_new_tokens=given.max_tokens)
        for row, tokens in zip(batch, output[:, prompts["input_ids"].shape[1] :], strict=True):
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            gold = parse(row["answer"].rpartition("####")[2].strip())
            answers.append({"text": text, "is_right": bool(verify(gold, parse(text)))})
    return answers


if __name__ == "__main__":
    main()
