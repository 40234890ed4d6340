"""Tiny random models, and a caller that serves requests and keeps what an engine's events say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from sortedrl.engine.base import Delta, Event, Failed, Finished, Partial, Request, Sampling, Verified
from sortedrl.engine.local import LocalEngine
from sortedrl.records import FinishReason, Mode

VOCAB = 23
_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-gqa": ("Llama", {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "gpt-neox": ("GPTNeoX", {}),
}


def tiny_model(kind: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    """Weights large enough that distributions are far from uniform and answers depend on their context."""
    family, sizes = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**(_SIZES | _HEADS | sizes | changes), pad_token_id=None)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    shake(model, 0.25, seed=seed)
    return model.eval()


def shake(model: torch.nn.Module, scale: float, *, seed: int) -> None:
    """Add noise to every weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def source(model: torch.nn.Module) -> SimpleNamespace:
    """What a learner hands to `publish`."""
    return SimpleNamespace(module=model)


def make_requests(count: int, *, seed: int = 0, **changes: Any) -> list[Request]:
    """Ragged prompts and budgets."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 12, (count,), generator=generator).tolist()
    budgets = torch.randint(5, 40, (count,), generator=generator).tolist()
    return [
        replace(
            Request(
                sample=index,
                attempt=0,
                prompt=torch.randint(VOCAB, (lengths[index],), generator=generator).tolist(),
                budget=budgets[index],
                seed=7919 * index + seed,
                sampling=Sampling(),
            ),
            **changes,
        )
        for index in range(count)
    ]


@dataclass(slots=True, kw_only=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    slot_s: float = 0.0
    reason: FinishReason | None = None
    error: str = ""
    num_partials: int = 0
    verified: list[tuple[int, int]] = field(default_factory=list)


class Caller:
    """Holds answers as a ledger would: a Delta replaces what was there from its start on."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.answers: dict[int, Answer] = {}

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            answer = self.answers.setdefault(event.sample, Answer())
            match event:
                case Delta():
                    assert event.start <= len(answer.tokens), "a delta left a gap"
                    assert len(event.tokens) == len(event.logprobs)
                    answer.tokens[event.start :] = event.tokens
                    answer.logprobs[event.start :] = event.logprobs
                    answer.versions[event.start :] = [event.version] * len(event.tokens)
                    answer.slot_s += event.slot_s
                case Finished():
                    answer.reason = event.reason
                case Failed():
                    answer.error = event.error
                case Partial():
                    answer.num_partials += 1
                case Verified():
                    answer.verified.append((event.cached, event.accepted))

    def serve(self, requests: Sequence[Request]) -> dict[int, Answer]:
        """Submit as slots become free, until all have ended."""
        waiting = list(requests)
        while waiting or self.engine.num_running:
            num_free = self.engine.capabilities.slots - self.engine.num_running
            self.engine.submit(waiting[:num_free])
            del waiting[:num_free]
            self.take(self.engine.poll())
        self.take(self.engine.poll())
        return self.answers

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.poll(timeout=0))

    def interrupt(self, samples: Iterable[int] | None = None) -> None:
        self.take(self.engine.interrupt(samples))

    def again(self, request: Request, mode: Mode, **changes: Any) -> Request:
        """The same sample once more, from the tokens that it holds."""
        answer = self.answers.get(request.sample, Answer())
        cached = () if mode is Mode.FRESH else tuple(answer.tokens)
        return replace(request, attempt=request.attempt + 1, mode=mode, cached=cached, **changes)


def serve(model: Any, requests: Sequence[Request], *, slots: int = 4, **options: Any) -> dict[int, Answer]:
    return Caller(LocalEngine(model, slots=slots, max_length=256, **options)).serve(requests)


@torch.no_grad()
def teacher_forced(model: Any, request: Request, tokens: Sequence[int]) -> list[float]:
    """Log-probs of an answer, by one plain pass of the model."""
    temperature = request.sampling.temperature or 1.0
    logits = model(torch.tensor([[*request.prompt, *tokens]])).logits[0, len(request.prompt) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()
