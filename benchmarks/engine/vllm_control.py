"""What the control of vLLM costs, and whether it is correct: interruption, publication, log-probs and replay.

    python -m benchmarks.engine.vllm_control [--model smollm2-135m] [--dtype auto] [--rounds 3] [--json]

In each round 64 requests decode, all are interrupted, and changed weights are published. Answers written after that are
scored by transformers in float32, once with the published weights and once with the previous ones. At the end answers
are replayed under the same weights that wrote them. A token that is rejected there is a rounding error, since decode
and prefill add numbers in a different order.

Times are also given in parts. `step_s` is a decode step of all slots; `pause_s` is the time until vLLM's core has ended
all requests; a publication consists of `write_s` (into shared memory) and `load_s` (in vLLM's worker). `--dtype auto`
is bfloat16 if the CPU has instructions for it, else float32, because a bfloat16 step is ten times slower without them.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine.with_vllm import go_on_with_vllm
from benchmarks.record import make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.engine.base import Request, Sampling
from sortedrl.engine.local.linear import has_fast_bfloat16
from sortedrl.engine.vllm.engine import VllmEngine
from sortedrl.records import Mode
from sortedrl.run.builders.parts import model_path
from sortedrl.run.checkpoint_folder import load_model
from sortedrl.testing import Caller

PARTS = ("step_s", "pause_s", "write_s", "load_s")
LIMIT_S = 3600.0  # for one step: a replay of all answers takes minutes in bfloat16 on a CPU without instructions for it
TEXT = "The village had two kinds of people, and every one of them had a story about the bridge that"


@dataclass(slots=True, kw_only=True)
class Figures:
    interrupt_s: list[float] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    gap_new: list[float] = field(default_factory=list)  # mean |log-prob difference| to transformers, by round
    gap_old: list[float] = field(default_factory=list)
    num_verified: int = 0
    num_rejected: int = 0


@torch.no_grad()
def forced_logprobs(model: Any, request: Request, tokens: list[int]) -> torch.Tensor:
    """Log-probs of the tokens, from one forward pass of the model."""
    logits = model(torch.tensor([[*request.prompt, *tokens]])).logits[0, len(request.prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)


def stepped(model: Any, number: int, share: float) -> Any:
    """A copy of the model with random noise on every matrix, as a share of the standard deviation of its weights."""
    generator, moved = torch.Generator().manual_seed(number), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * parameter.std() * share)
    return moved


def mean_gap(model: Any, requests: list[Request], caller: Caller) -> float:
    gaps = []
    for request in requests:
        answer = caller.answers[request.sample]
        gaps.append((forced_logprobs(model, request, answer.tokens) - torch.tensor(answer.logprobs)).abs())
    return torch.cat(gaps).mean().item()


def time_parts(engine: VllmEngine, figures: Figures) -> None:
    """Record the seconds of the internal calls that make up interruptions and publications."""

    def keep(owner: Any, name: str, seconds: list[float]) -> None:
        call = getattr(owner, name)

        async def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = await call(*args, **named)
            seconds.append(time.perf_counter() - began)
            return result

        setattr(owner, name, timed)

    assert engine._process is not None, "the engine has started"
    keep(engine._process.frontend, "pause_generation", figures.pause_s)
    keep(engine._process.frontend, "collective_rpc", figures.load_s)
    write = engine._weights.write

    def timed_write(model: Any) -> None:
        began = time.perf_counter()
        write(model)
        figures.write_s.append(time.perf_counter() - began)

    engine._weights.write = timed_write  # type: ignore[method-assign]


def decode(engine: VllmEngine, num_tokens: int) -> None:
    wanted = engine.stats().decoded_tokens + num_tokens
    while engine.stats().decoded_tokens < wanted:
        engine.poll(0.01)


def measure(options: argparse.Namespace, model: Any, prompt: list[int], engine: VllmEngine) -> Figures:
    figures, number = Figures(), 0
    time_parts(engine, figures)
    requests: list[Request] = []
    caller = Caller(engine)

    def make_requests(count: int, budget: int) -> list[Request]:
        nonlocal number
        first, number = number, number + count
        return [
            Request(
                sample=i, attempt=0, prompt=[*prompt, 40 + i % 64], budget=budget, seed=7919 * i, sampling=Sampling()
            )
            for i in range(first, number)
        ]

    for version in range(1, options.rounds + 1):
        engine.submit(make_requests(options.slots, options.max_length - 64))
        decode(engine, 2 * options.slots)  # prefill is over, and every slot decodes
        steps, began = engine.stats().decode_steps, time.perf_counter()
        decode(engine, 3 * options.slots)
        figures.step_s.append((time.perf_counter() - began) / (engine.stats().decode_steps - steps))
        began = time.perf_counter()
        engine.interrupt()
        figures.interrupt_s.append(time.perf_counter() - began)
        before, model = model, stepped(model, version, options.step)
        began = time.perf_counter()
        engine.publish(version, SimpleNamespace(module=model)).wait()
        figures.publish_s.append(time.perf_counter() - began)
        requests = make_requests(options.answers, options.tokens)
        caller.serve(requests)
        figures.gap_new.append(mean_gap(model, requests, caller))
        figures.gap_old.append(mean_gap(before, requests, caller))
        print(f"round {version}: {figures}", file=sys.stderr)
    caller.serve([caller.again(request, Mode.REPLAY) for request in requests])
    for request in requests:
        ((cached, accepted),) = caller.answers[request.sample].verified
        figures.num_verified += min(accepted + 1, cached)
        figures.num_rejected += accepted < cached
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--answers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument(
        "--step", type=float, default=0.03, help="size of a weight change, in standard deviations of the matrix"
    )
    options = parser.parse_args()
    go_on_with_vllm()
    if options.dtype == "auto":
        options.dtype = "bfloat16" if has_fast_bfloat16(torch.device("cpu")) else "float32"
    model, tokenizer = load_model(model_path(SortedConfig(model={"path": options.model})))
    began = time.perf_counter()
    with Console(stderr=True).status("starting vLLM and measuring"):
        engine = VllmEngine(
            model,
            slots=options.slots,
            max_length=options.max_length,
            dtype=getattr(torch, options.dtype),
            limit_s=LIMIT_S,
        )
        start_s = time.perf_counter() - began
        try:
            figures = measure(options, model, tokenizer.encode(TEXT), engine)
        finally:
            engine.close()
    result = {
        "model": options.model,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": options.dtype,
        "start_s": start_s,
        "requests": options.slots,
        "interrupt_s": figures.interrupt_s,
        "publish_s": figures.publish_s,
        "parts": {name: getattr(figures, name) for name in PARTS},
        "threads": torch.get_num_threads(),
        "logprob_gap_new": figures.gap_new,
        "logprob_gap_old": figures.gap_old,
        "replayed_tokens": figures.num_verified,
        "rejected_tokens": figures.num_rejected,
        "divergence_rate": figures.num_rejected / max(1, figures.num_verified),
    }
    save(f"vllm_control_{options.dtype}", {"options": vars(options), "result": result})
    if options.json:
        print(json.dumps(result))
        return
    table = Table("figure", "median", "maximum", title=f"vLLM, {options.model}, {options.dtype}")
    for name in ("interrupt_s", "publish_s", *PARTS, "logprob_gap_new", "logprob_gap_old"):
        values = getattr(figures, name.replace("logprob_", ""))
        table.add_row(name, f"{statistics.median(values):.3f}", f"{max(values):.3f}")
    rate = f"{result['divergence_rate']:.1e}"
    table.add_row("rejected by replay", rate, f"{figures.num_rejected} of {figures.num_verified}")
    Console().print(table)


if __name__ == "__main__":
    main()
