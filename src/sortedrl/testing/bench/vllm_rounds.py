"""The vLLM side of `bench engine`: `contenders.py` starts it with the Python of an environment that has vLLM.

Guarantees: it imports nothing of this package. It reads one JSON line of settings and then one line per round from
standard input, and answers each with one JSON line on standard output. vLLM's own output goes to standard error.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        serve(answers)
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}) + "\n")
        raise


def serve(answers: Any) -> None:
    settings = json.loads(sys.stdin.readline())
    import torch
    import vllm  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(settings["threads"])
    prompts = [vllm.TokensPrompt(prompt_token_ids=prompt) for prompt in settings["prompts"]]
    num_tokens = sum(map(len, settings["prompts"]))
    llm = vllm.LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_length"],
        max_num_seqs=len(prompts),
        # Prefill whole prompts: for a partial prefill vLLM rewinds the seeded generator, which fails on a CPU.
        max_num_batched_tokens=num_tokens if num_tokens > 2048 else None,
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
    )
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        order = json.loads(line)
        count = order["new_tokens"]
        sampling = [
            vllm.SamplingParams(
                temperature=1.0,
                max_tokens=count,
                ignore_eos=True,
                logprobs=0,
                seed=order["seed"] * len(prompts) + number,
                detokenize=False,
            )
            for number in range(len(prompts))
        ]
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        wall_s, cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        logprobs = [
            step[token].logprob
            for output in outputs
            for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ]
        assert len(logprobs) == count * len(prompts), f"{len(logprobs)} log-probs for {count * len(prompts)} tokens"
        assert all(map(math.isfinite, logprobs)), "a log-prob is not finite"
        answers.write(json.dumps({"tokens": len(logprobs), "wall_s": wall_s, "cpu_s": cpu_s}) + "\n")


if __name__ == "__main__":
    main()
