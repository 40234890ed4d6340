"""The shape and the architecture of a model, from its config.json or, if its folder is not here, from a shipped preset.

`estimate.py` and `device_memory.py` read them before a run. Guarantees: no weights are read and no hub is asked.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sortedrl.errors import ModelError, first_line
from sortedrl.simulate.costs import ModelShape, load_model_shape, preset_names

FLOAT = 4  # bytes per value in the learner and in the local engine
HALF = 2  # bytes per value in an engine on accelerators


def read_shape(path: str, folder: Path) -> ModelShape:
    """A model's shape from its config.json; without the folder, from a preset with its name."""
    if (folder / "config.json").is_file():
        return _shape_of(folder)
    name = Path(path).name.lower()
    for preset in preset_names("models"):
        if name.startswith(preset) or name.replace("meta-", "").startswith(preset):
            return replace(load_model_shape(preset), bytes_per_value=FLOAT)
    known = ", ".join(preset_names("models"))
    raise ModelError(f"the shape of model {path!r} is unknown: give a folder with a config.json, or one of {known}")


def _shape_of(folder: Path) -> ModelShape:
    """Build the model on the meta device, where tensors have shapes but no data, and read its shape."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            module: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{folder}/config.json cannot be read: {why}") from error
    text = config.get_text_config()
    heads = text.num_attention_heads
    return ModelShape(
        params=sum(parameter.numel() for parameter in module.parameters()),
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        bytes_per_value=FLOAT,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        vocab=text.vocab_size,
        model_type=text.model_type,
        is_tied=bool(config.tie_word_embeddings),
    )


def architecture(folder: Path, shape: ModelShape) -> Any:
    """The configuration of transformers for a model: its own, or without its folder that of a preset."""
    from transformers import AutoConfig

    if (folder / "config.json").is_file():
        try:
            return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True).get_text_config()
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder}/config.json cannot be read: {first_line(error)}") from error
    return AutoConfig.for_model(
        shape.model_type,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.is_tied,
        max_position_embeddings=1 << 20,
    )
