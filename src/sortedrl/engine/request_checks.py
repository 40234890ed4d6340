"""Why a request cannot be served, whatever else runs: the checks that engines which hold a model share."""

from __future__ import annotations

from sortedrl.engine.base import Request


def find_fault(request: Request, *, max_length: int, vocab: int, has_decode: bool = True) -> str | None:
    """What is wrong with the request, and what to do about it; None if nothing is."""
    length = len(request.prompt) + request.budget
    if length > max_length:
        return (
            f"prompt of {len(request.prompt)} tokens plus budget of {request.budget} is {length}, more than the "
            f"engine's max_length of {max_length}: lower the budget or raise max_length"
        )
    if request.sampling.stop_strings and not has_decode:
        return "stop strings need a tokenizer, and this engine was made without one: pass decode=tokenizer.decode"
    if not request.prompt:
        return "the prompt is empty: give it at least one token"
    tokens = (*request.prompt, *request.cached)
    if min(tokens) < 0 or max(tokens) >= vocab:
        return f"a token lies outside the model's vocabulary of {vocab}: tokenizer and model do not match"
    return None
