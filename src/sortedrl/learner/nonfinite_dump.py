"""Saves a batch whose loss or gradients were not finite, for inspection, before the run stops.

`learner/torch.py` calls it if the learner has an `inspect_dir`. Tokens, log-probs and versions go into one safetensors
file, all samples end to end. A JSON file beside it describes each sample and says where its tokens begin.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from sortedrl.records import Batch

_TENSORS_FILE = "batch.safetensors"
_SAMPLES_FILE = "batch.json"

log = logging.getLogger(__name__)


def try_to_save(inspect_dir: Path, batch: Batch, advantages: Sequence[float], reason: str) -> Path | None:
    """Write `inspect_dir`/rejected-<update>/ and return it, or None if it cannot be written.

    A failed write is only logged: the run then stops with the error about the batch, which matters more.
    """
    try:
        return _save(inspect_dir / f"rejected-{batch.update}", batch, advantages, reason)
    except OSError as error:
        log.warning("the batch that stopped the run could not be saved in %s: %s", inspect_dir, error)
        return None


def _save(folder: Path, batch: Batch, advantages: Sequence[float], reason: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    samples = batch.samples
    tensors = {
        "prompt_tokens": torch.tensor([token for sample in samples for token in sample.prompt.tokens]),
        "tokens": torch.tensor([token for sample in samples for token in sample.tokens]),
        "logprobs": torch.tensor([value for sample in samples for value in sample.logprobs], dtype=torch.float64),
        "versions": torch.tensor([version for sample in samples for version in sample.versions]),
    }
    save_file(tensors, folder / _TENSORS_FILE)
    described: list[dict[str, Any]] = []
    prompt_start = start = 0
    for sample, advantage in zip(samples, advantages, strict=True):
        described.append(
            {
                "id": sample.id,
                "prompt": sample.prompt.id,
                "prompt_start": prompt_start,
                "num_prompt_tokens": len(sample.prompt.tokens),
                "start": start,
                "num_tokens": sample.num_tokens,
                "reward": _json_number(sample.reward),
                "advantage": _json_number(advantage),
                "finish_reason": sample.finish_reason,
            }
        )
        prompt_start += len(sample.prompt.tokens)
        start += sample.num_tokens
    page = {"update": batch.update, "version": batch.version, "reason": reason, "samples": described}
    (folder / _SAMPLES_FILE).write_text(json.dumps(page, indent=1), encoding="utf-8")
    return folder


def _json_number(value: float | None) -> float | str | None:
    """The number, or its name as a string if it is NaN or infinite, which JSON cannot hold."""
    return value if value is None or math.isfinite(value) else str(value)
