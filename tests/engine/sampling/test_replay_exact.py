"""Replay equals restart for interrupted samples, and for answers that went on, with real updates, in float32."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.engine.replay import measure


@pytest.mark.parametrize(("unverified", "samples"), [(False, 500), (True, 250)])
def test_replayed_samples_equal_restarted_ones(unverified: bool, samples: int) -> None:
    result = measure(argparse.Namespace(samples=samples, seed=11, lr=5e-4, model="knights-tiny", unverified=unverified))
    assert result["samples"] >= samples
    assert result["updates"] >= 4
    # Decode and prefill round differently, so a token whose score ties with the best one may change.
    assert result["mismatches"] <= 0.002 * result["samples"]
    assert result["logprob_gap_max"] <= 1e-4
    # The updates changed the model: some cached tokens were rejected, and most others were kept.
    assert 0 < result["divergence_rate"] < 0.05
    assert result["accepted_prefix"] > 0.8
    assert result["decode_steps_saved"] > 0.1
