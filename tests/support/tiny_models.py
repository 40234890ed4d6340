"""Tiny random models, requests for them, and the log-probs of an answer by a plain forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from sortedrl.engine.base import Request, Sampling
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.native.kernel import has_wide_kernel, load_kernel
from sortedrl.records import Mode
from sortedrl.tasks.tiny import knights_tiny_path
from sortedrl.testing import Answer, Caller

VOCAB = 23
needs_compiler = pytest.mark.skipif(load_kernel() is None, reason="no C compiler here")
needs_wide_vectors = pytest.mark.skipif(not has_wide_kernel(), reason="no AVX-512 with VNNI, or no C compiler here")
PATHS = [pytest.param("native", marks=needs_compiler), "lean", "module"]  # the decoders of the local engine
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
    """A model with large random weights, so that its distributions are far from uniform and depend on the context."""
    family, sizes = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**(_SIZES | _HEADS | sizes | changes), pad_token_id=None)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    add_noise(model, 0.25, seed=seed)
    return model.eval()


def save_classifier(folder: Path, *, num_labels: int = 1) -> Path:
    """Save a random reward model with the tokenizer of knights-tiny and a chat template that joins messages by dots."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(knights_tiny_path())
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} . {% endfor %}"
    torch.manual_seed(0)
    sizes = _SIZES | {"vocab_size": len(tokenizer), "num_attention_heads": 4, "num_labels": num_labels}
    transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def add_noise(model: torch.nn.Module, scale: float, *, seed: int) -> None:
    """Add noise to every weight."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def source(model: torch.nn.Module) -> SimpleNamespace:
    """The model as a learner hands it to `publish`."""
    return SimpleNamespace(module=model)


def make_requests(count: int, *, seed: int = 0, **changes: Any) -> list[Request]:
    """Requests with random prompts and budgets of different lengths."""
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


def make_caller(model: Any, slots: int = 4, **options: Any) -> Caller:
    return Caller(LocalEngine(model, slots=slots, max_length=256, **options))


def serve(model: Any, requests: Sequence[Request], *, slots: int = 4, **options: Any) -> dict[int, Answer]:
    return make_caller(model, slots, **options).serve(requests)


def tokens_of(answers: Mapping[int, Answer]) -> dict[int, list[int]]:
    return {sample: answer.tokens for sample, answer in answers.items()}


@torch.no_grad()
def teacher_forced(model: Any, request: Request, tokens: Sequence[int]) -> list[float]:
    """Log-probs of an answer, by one plain forward pass of the model."""
    temperature = request.sampling.temperature or 1.0
    logits = model(torch.tensor([[*request.prompt, *tokens]])).logits[0, len(request.prompt) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()


def logprob_gaps(model: Any, requests: Sequence[Request], answers: Mapping[int, Answer]) -> list[float]:
    """For every answer token, how far its log-prob is from that of a plain forward pass."""
    pairs = [
        pair
        for request in requests
        for pair in zip(
            answers[request.sample].logprobs,
            teacher_forced(model, request, answers[request.sample].tokens),
            strict=True,
        )
    ]
    return [abs(ours - plain) for ours, plain in pairs]


def check_replay_equals_restart(**options: Any) -> None:
    """Replay eight interrupted answers after a publication; they must equal answers that start over."""
    requests, changed = make_requests(8, budget=40), tiny_model()
    caller = make_caller(tiny_model(), 8, **options)
    caller.engine.submit(requests)
    caller.steps(25)
    caller.interrupt()
    add_noise(changed, 0.01, seed=3)
    caller.engine.publish(1, source(changed)).wait()
    replayed = caller.serve([caller.again(request, Mode.REPLAY) for request in requests])
    assert tokens_of(replayed) == tokens_of(serve(changed, requests, slots=3, **options))
    accepted = [answer.verified[-1] for answer in replayed.values() if answer.verified]
    assert any(kept < cached for cached, kept in accepted), "new weights must reject something"
