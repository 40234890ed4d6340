"""How far engine and trainer are apart: what an update reports, and what masks leave out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sortedrl.learner.torch import TorchLearner
from sortedrl.learner.update_metrics import mismatch
from sortedrl.records import Batch
from tests.support.learners import Settings, logprobs_of, make_batch, make_model


def metrics_of(batch: Batch, **changes: object) -> dict[str, float]:
    return TorchLearner(make_model(), Settings(**changes), temperature=1.0).start(batch).result().metrics


def drifts_of(batch: Batch, first: int, last: int) -> np.ndarray:
    """Log-probs of the untrained model minus the recorded ones, of the samples from `first` to `last`."""
    found = [
        logprobs_of(make_model(), list(sample.prompt.tokens), sample.tokens).tolist()
        for sample in batch.samples[first:last]
    ]
    recorded = [sample.logprobs for sample in batch.samples[first:last]]
    return np.concatenate(found) - np.concatenate(recorded)


def test_the_mismatch_is_that_of_the_recorded_logprobs() -> None:
    batch = make_batch(make_model(), off_policy=0.1)
    metrics, drifts = metrics_of(batch), drifts_of(batch, 0, 8)
    assert metrics["mismatch_mean"] == pytest.approx(np.abs(drifts).mean(), rel=1e-4)
    assert metrics["mismatch_max"] == pytest.approx(np.abs(drifts).max(), rel=1e-4)
    assert 0.04 < metrics["mismatch_mean"] < metrics["mismatch_max"] <= 0.1001
    assert metrics["mismatch_kl"] == pytest.approx((np.exp(drifts) - 1 - drifts).mean(), rel=1e-3)
    assert "mask_fraction" not in metrics


def test_steps_that_have_moved_the_weights_do_not_count() -> None:
    batch = make_batch(make_model(), off_policy=0.1)
    first = metrics_of(batch, inner_steps=2, lr=0.5)
    assert first["mismatch_mean"] == pytest.approx(np.abs(drifts_of(batch, 0, 4)).mean(), rel=1e-4)
    known = metrics_of(batch, inner_steps=2, lr=0.5, importance="token")  # all log-probs are computed at the start
    assert known["mismatch_mean"] == pytest.approx(np.abs(drifts_of(batch, 0, 8)).mean(), rel=1e-4)


def test_tokens_of_older_versions_are_not_a_mismatch() -> None:
    stale = replace(make_batch(make_model(), off_policy=0.1), version=1)
    assert not {name for name in metrics_of(stale) if name.startswith("mismatch")}
    assert mismatch(np.array([np.nan, 0.5])) == {
        "mismatch_mean": 0.5,
        "mismatch_max": 0.5,
        "mismatch_kl": pytest.approx(np.exp(0.5) - 1.5),
    }


def test_the_share_of_masked_tokens_is_reported() -> None:
    batch = make_batch(make_model(), off_policy=0.1)
    drifts = drifts_of(batch, 0, 8)
    outside = (drifts < np.log(0.95)) | (drifts > np.log(1.05))
    assert 0.1 < outside.mean() < 0.9
    metrics = metrics_of(batch, importance_mask="token", importance_low=0.95, importance_high=1.05)
    assert metrics["mask_fraction"] == pytest.approx(outside.mean())
    assert metrics["ratio_mean"] == pytest.approx(np.exp(drifts).mean(), rel=1e-4)  # still to the recorded log-probs
    everything = metrics_of(batch, importance_mask="sequence", importance_low=0.0, importance_high=1.0 + 1e-9)
    assert 0 < everything["mask_fraction"] < 1
