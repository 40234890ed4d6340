"""How long a publication to vLLM takes when only LoRA adapters are trained: the adapters alone, or merged weights.

    python -m benchmarks.engine.vllm_adapter [--model smollm2-135m] [--rank 16] [--rounds 5] [--json]

Two engines of the same model receive the same updates. Each round changes the adapters, publishes them in both ways and
lets both engines decode with all slots. The log-probs of the last answers are compared with a forward pass of the model
with its adapters (peft), in float32. `publish_s` of the merged way includes the merging, which `merge_s` gives
separately. `step_s` is the time of a decode step, with separate adapters and with merged weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine.vllm_control import LIMIT_S, TEXT, decode, mean_gap
from benchmarks.engine.with_vllm import go_on_with_vllm
from benchmarks.record import make_parser, save
from sortedrl.config import SortedConfig
from sortedrl.engine.base import Request, Sampling
from sortedrl.engine.vllm.engine import VllmEngine
from sortedrl.learner.lora import adapt, peft_config_of
from sortedrl.run.builders.parts import model_path
from sortedrl.run.checkpoint_folder import load_model
from sortedrl.testing import Caller
from sortedrl.weights import ModuleWeights

FIGURES = ("start_s", "publish_s", "merge_s", "step_s", "gap")


@dataclass(slots=True, kw_only=True)
class Way:
    """One way to publish, with its times by round."""

    engine: VllmEngine
    start_s: float
    publish_s: list[float] = field(default_factory=list)
    merge_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    gap: float = 0.0  # mean |log-prob difference| to peft, of the last round


class TimedWeights(ModuleWeights):
    """A weight source that records how long each merge takes."""

    def __init__(self, model: Any, merge_s: list[float]) -> None:
        super().__init__(model)
        self._merge_s = merge_s

    @property
    def module(self) -> Any:
        began = time.perf_counter()
        merged = super().module
        self._merge_s.append(time.perf_counter() - began)
        return merged


def move(model: Any, seed: int) -> None:
    """Change the adapters by a small random step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.01)


def start(model: Any, options: argparse.Namespace) -> Way:
    began = time.perf_counter()
    engine = VllmEngine(model, slots=options.slots, max_length=options.max_length, dtype=torch.float32, limit_s=LIMIT_S)
    return Way(engine=engine, start_s=time.perf_counter() - began)


def measure(options: argparse.Namespace, model: Any, prompt: list[int], ways: dict[str, Way]) -> None:
    sources = {name: TimedWeights(model, way.merge_s) for name, way in ways.items()}
    sources["merged"].module  # noqa: B018  (the first access allocates the copy, which later ones reuse)
    ways["merged"].merge_s.clear()
    for version in range(1, options.rounds + 1):
        move(model, version)
        # The first engine alternates, so that neither always profits from warm CPU caches.
        for name in sorted(ways, reverse=version % 2 == 0):
            way, is_last = ways[name], version == options.rounds
            began = time.perf_counter()
            way.engine.publish(version, sources[name]).wait()
            way.publish_s.append(time.perf_counter() - began)
            requests = make_requests(options, prompt, version)
            way.engine.submit(requests)
            decode(way.engine, 2 * options.slots)  # prefill is over
            steps, began = way.engine.stats().decode_steps, time.perf_counter()
            decode(way.engine, options.steps * options.slots)
            way.step_s.append((time.perf_counter() - began) / max(1, way.engine.stats().decode_steps - steps))
            caller = Caller(way.engine)
            caller.interrupt()  # returns all tokens written so far
            if is_last:
                way.gap = mean_gap(model, requests[: options.answers], caller)
        print(f"round {version} of {options.rounds}", file=sys.stderr)


def make_requests(options: argparse.Namespace, prompt: list[int], version: int) -> list[Request]:
    return [
        Request(
            sample=version * options.slots + index,
            attempt=0,
            prompt=[*prompt, 40 + index % 64],
            budget=options.max_length - 64,
            seed=7919 * index + version,
            sampling=Sampling(),
        )
        for index in range(options.slots)
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3, help="timed decode steps per round")
    parser.add_argument("--answers", type=int, default=8, help="number of answers to compare with peft")
    parser.add_argument("--max-length", type=int, default=256)
    options = parser.parse_args()
    go_on_with_vllm()
    config = SortedConfig(model={"path": options.model}, lora={"rank": options.rank})
    plain, tokenizer = load_model(model_path(config))
    model = adapt(plain, peft_config_of(config.lora))
    ways: dict[str, Way] = {}
    with Console(stderr=True).status("starting vLLM twice and measuring"):
        try:
            ways["adapter"] = start(model, options)
            ways["merged"] = start(ModuleWeights(model).module, options)
            measure(options, model, tokenizer.encode(TEXT), ways)
        finally:
            for way in ways.values():
                way.engine.close()
    figures = {name: {key: getattr(way, key) for key in FIGURES} for name, way in ways.items()}
    ratios = {
        name: statistics.median(figures["merged"][name]) / statistics.median(figures["adapter"][name])
        for name in ("publish_s", "step_s")
    }
    result = {"model": options.model, "rank": options.rank, "ways": figures, "merged_to_adapter": ratios}
    save("vllm_adapter", {"options": vars(options), "result": result})
    if options.json:
        print(json.dumps(result))
        return
    table = Table("figure", *ways, "merged / adapter", title=f"vLLM, {options.model}, rank {options.rank}, medians")
    for name in ("publish_s", "merge_s", "step_s"):
        values = [statistics.median(figures[way][name]) if figures[way][name] else 0.0 for way in ways]
        table.add_row(name, *(f"{value:.3f}" for value in values), f"{ratios[name]:.2f}" if name in ratios else "")
    table.add_row("log-probs to peft", *(f"{figures[way]['gap']:.1e}" for way in ways), "")
    Console().print(table)


if __name__ == "__main__":
    main()
