"""What a run takes from the model's generation_config: the tokens that end an answer, and nothing else.

`parts.py` calls `fill_from_model` once the model is there. End tokens are needed, because a chat model ends its answers
with tokens that its tokenizer may not name. Temperature and filters are not taken: they were chosen for chat. A model
that is trained on a sharpened distribution explores less, and under filters the learner's ratios are wrong. TRL, verl
and OpenRLHF do the same. The user is told about them once.

Guarantees: a key that the configuration sets is never changed; the tokens are in the configuration that the run saves,
so that a resumed run has the same.
"""

from __future__ import annotations

from typing import Any

from sortedrl.config import SortedConfig

_FILTERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """All tokens that end an answer, from the model's generation settings and the tokenizer."""
    named = [tokenizer.eos_token_id, _of_model(model, "eos_token_id")]
    flat = [token for entry in named for token in (entry if isinstance(entry, list | tuple) else [entry])]
    return tuple(sorted({int(token) for token in flat if token is not None}))


def fill_from_model(config: SortedConfig, model: Any, tokenizer: Any) -> tuple[SortedConfig, str]:
    """The configuration with the model's end tokens if it sets none, and a line for the user.

    The line is empty if the tokenizer names the same tokens and no sampling setting of the model is left out.
    """
    if config.engine.stop_tokens is not None:
        return config, ""
    tokens, said = stop_token_ids(model, tokenizer), []
    if tokens != stop_token_ids(None, tokenizer):
        said.append(f"answers end at tokens {', '.join(map(str, tokens))} (engine.stop_tokens)")
    if left := _left_out(config, model):
        said.append(f"{left} not used: training samples from the whole distribution, unless engine says otherwise")
    line = f"the model's generation_config: {'; '.join(said)}" if said else ""
    return config.replaced(engine={"stop_tokens": tokens}), line


def _left_out(config: SortedConfig, model: Any) -> str:
    """The model's sampling settings that differ from those of the run, where the configuration is silent."""
    neutral = {"repetition_penalty": 1.0, **config.engine.model_dump(include=set(_FILTERS))}
    found = {
        key: value
        for key in _FILTERS
        if key not in config.engine.model_fields_set
        and isinstance(value := _of_model(model, key), int | float)
        and value != neutral[key]
    }
    listed = ", ".join(f"{key} {value:g}" for key, value in found.items())
    return f"{listed} {'is' if len(found) == 1 else 'are'}" if found else ""


def _of_model(model: Any, name: str) -> Any:
    return getattr(getattr(model, "generation_config", None), name, None)
