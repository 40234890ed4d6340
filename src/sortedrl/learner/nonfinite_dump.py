"""A batch whose steps were not finite, written down for inspection before the run stops.

`learner/torch.py` calls it where `inspect_dir` is set. Tokens, log-probs and versions are one safetensors file, all
samples end to end; what is known of each sample, with where its tokens begin, is JSON beside it.
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

TENSORS_FILE = "batch.safetensors"
SAMPLES_FILE = "batch.json"

log = logging.getLogger(__name__)


def try_to_save(folder: Path | None, batch: Batch, advantages: Sequence[float], reason: str) -> Path | None:
    """Where the batch was saved, if anywhere: the run stops for the better reason when it cannot be."""
    if folder is None:
        return None
    try:
        return save_rejected(folder, batch, advantages, reason)
    except OSError as error:
        log.warning("the batch that stopped the run could not be saved in %s: %s", folder, error)
        return None


def save_rejected(folder: Path, batch: Batch, advantages: Sequence[float], reason: str) -> Path:
    """Write `folder`/rejected-<update>/ and return it; what an earlier try left there is replaced."""
    target = folder / f"rejected-{batch.update}"
    target.mkdir(parents=True, exist_ok=True)
    samples = batch.samples
    tensors = {
        "prompt_tokens": torch.tensor([token for sample in samples for token in sample.prompt.tokens]),
        "tokens": torch.tensor([token for sample in samples for token in sample.tokens]),
        "logprobs": torch.tensor([value for sample in samples for value in sample.logprobs], dtype=torch.float64),
        "versions": torch.tensor([version for sample in samples for version in sample.versions]),
    }
    save_file(tensors, target / TENSORS_FILE)
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
    (target / SAMPLES_FILE).write_text(json.dumps(page, indent=1), encoding="utf-8")
    return target


def _json_number(value: float | None) -> float | str | None:
    """JSON has no NaN and no infinity: they are written as words."""
    return value if value is None or math.isfinite(value) else str(value)
