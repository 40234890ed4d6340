"""Checks of sizes and requests that the engines with a model share."""

from __future__ import annotations

from sortedrl.engine.base import Request
from sortedrl.engine.sampling.noise import NUM_SEEDS
from sortedrl.errors import EngineError, ModelError


def check_limits(*, slots: int, max_length: int, model_length: int) -> None:
    """Raise an error if an engine cannot have these sizes."""
    if slots < 1:
        raise EngineError(f"slots = {slots}: set engine.slots to at least 1")
    if max_length > model_length:
        raise ModelError(
            f"max_length {max_length} is more than the model's {model_length} positions: "
            "lower the token budget or take a model with a longer context"
        )


def check_submit(num_requests: int, *, running: int, slots: int, is_closed: bool) -> None:
    """Raise an EngineError if the engine cannot accept this many requests now."""
    if is_closed:
        raise EngineError("the engine is closed: create a new one")
    if num_requests > slots - running:
        raise EngineError(
            f"{num_requests} requests for {slots - running} free slots of {slots}: submit no more than are free"
        )


def find_fault(request: Request, *, max_length: int, vocab: int, has_decode: bool = True) -> str | None:
    """Why the engine cannot serve the request, and the remedy; None if it can."""
    length = len(request.prompt) + request.budget
    if length > max_length:
        return (
            f"prompt of {len(request.prompt)} tokens plus budget of {request.budget} is {length}, more than the "
            f"engine's max_length of {max_length}: lower the budget or raise max_length"
        )
    if request.sampling.stop_strings and not has_decode:
        return "stop strings need a tokenizer, and this engine has none: pass decode=tokenizer.decode"
    if not 0 <= request.seed < NUM_SEEDS:
        return f"seed {request.seed} is outside [0, 2**63): take one from sortedrl.records.sample_seed"
    if not request.prompt:
        return "the prompt is empty: give it at least one token"
    tokens = (*request.prompt, *request.cached)
    if min(tokens) < 0 or max(tokens) >= vocab:
        return f"a token lies outside the model's vocabulary of {vocab}: use the tokenizer that belongs to the model"
    return None
