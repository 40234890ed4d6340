"""The probe of an engine's replay, and what the builder makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sortedrl.config import SortedConfig
from sortedrl.config.shipped import shipped_path
from sortedrl.engine.base import Sampling
from sortedrl.engine.local.engine import LocalEngine
from sortedrl.engine.replay_probe import ReplayEvidence, probe_replay
from sortedrl.errors import ConfigError, EngineError
from sortedrl.run.builders import engine as builder
from tests.support.lying_engine import LyingEngine
from tests.support.tiny_models import VOCAB, tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def test_an_exact_engine_keeps_every_token(model: Any) -> None:
    engine = LocalEngine(model, slots=4, max_length=256)
    evidence = probe_replay(engine, vocab=VOCAB, max_length=256)
    assert evidence == ReplayEvidence(num_tokens=256, num_differences=0)
    assert evidence.is_exact
    assert engine.stats().running == 0


def test_filters_and_stop_tokens_do_not_shorten_the_probe(model: Any) -> None:
    engine = LocalEngine(model, slots=8, max_length=128)
    sampling = Sampling(temperature=0.7, top_k=5, stop_tokens=tuple(range(VOCAB)))
    assert probe_replay(engine, vocab=VOCAB, max_length=128, sampling=sampling).num_tokens == 256


@pytest.mark.parametrize("lie", [0.003, 0.1])
def test_an_engine_that_lies_is_found_out(model: Any, lie: float) -> None:
    """At the smaller scale about one token in a hundred differs, as in bfloat16."""
    engine = LyingEngine(model, lie=lie, slots=8, max_length=256)
    evidence = probe_replay(engine, vocab=VOCAB, max_length=256)
    assert 1 <= evidence.num_differences <= 8  # a verification ends at its first difference
    assert not evidence.is_exact
    engine.take_evidence(evidence)
    assert not engine.capabilities.exact_replay


def test_a_sequence_of_one_token_cannot_be_probed(model: Any) -> None:
    with pytest.raises(EngineError, match="too short"):
        probe_replay(LocalEngine(model, slots=1, max_length=1), vocab=VOCAB, max_length=1)


def settings(*changes: str) -> SortedConfig:
    return SortedConfig.load(
        shipped_path("quickstart"), ["engine=vllm", "engine.slots=8", "engine.max_new_tokens=128", *changes]
    )


def build(monkeypatch: pytest.MonkeyPatch, model: Any, lie: float, *changes: str) -> Any:
    """`build_engine` with the lying engine in the place of vLLM."""
    monkeypatch.setattr(builder, "check_installed", lambda: "")
    monkeypatch.setattr(builder, "load_vllm_engine", lambda: lambda own, **given: LyingEngine(own, lie=lie, **given))
    return builder.build_engine(config := settings(*changes), model, config.knobs)


def test_the_builder_refuses_replay_on_an_engine_that_lies(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    with pytest.raises(ConfigError, match=r"test at the start [1-8] of \d+ tokens differed.*sorted-partial"):
        build(monkeypatch, model, 0.05)


def test_a_tolerance_allows_replay_that_is_not_exact(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    engine = build(monkeypatch, model, 0.05, "engine.replay_tolerance=0.1")
    assert not engine.capabilities.exact_replay
    engine.close()


def test_filters_whose_order_differs_are_refused(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    with pytest.raises(ConfigError, match="min-p before top-p"):
        build(monkeypatch, model, 0.0, "engine.top_p=0.9", "engine.min_p=0.1")


def test_an_exact_engine_is_probed_only_for_replay(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    engine = build(monkeypatch, model, 0.0)
    assert engine.capabilities.replay_probe == "0 of 256 tokens differed"
    engine.close()
    engine = build(monkeypatch, model, 0.0, "schedule.strategy=sorted-partial")
    assert engine.capabilities.replay_probe == ""
    engine.close()


@pytest.mark.parametrize(
    ("dtype", "has_gpu", "mode", "may"),
    [
        (torch.float32, False, "auto", True),
        (torch.bfloat16, False, "auto", False),
        (torch.bfloat16, True, "auto", True),
        (torch.bfloat16, True, "off", False),
    ],
)
def test_bfloat16_may_replay_on_a_gpu_with_batch_invariance(
    dtype: torch.dtype, has_gpu: bool, mode: str, may: bool
) -> None:
    config = settings(f"engine.batch_invariant={mode}")
    assert builder.may_replay_exactly(config, dtype, has_gpu=has_gpu) == may


REPLAY = "schedule.strategy=sorted-replay"
COLOCATED = ["placement.mode=colocated", "placement.engines=2", "placement.ranks=2", REPLAY]


def test_colocated_engines_are_on_gpus(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Ray reserves none for them, because they use those of the ranks."""
    monkeypatch.setattr(builder, "check_processors", lambda config: None)
    config = settings(*COLOCATED, "engine.dtype=bfloat16")
    assert (config.engine_gpus, config.has_gpu_engines) == (0.0, True)
    assert builder.is_invariant_pool(config)
    probed: list[Any] = []

    class Built(Exception):
        pass

    def probe(engine: Any, *_: Any) -> None:
        probed.append(engine)
        raise Built

    monkeypatch.setattr(builder, "build_vllm_pool", lambda *_, **__: "pool")
    monkeypatch.setattr(builder, "probe", probe)
    for dtype in ("bfloat16", "float32"):
        with pytest.raises(Built):
            builder.build_engine(settings(*COLOCATED, f"engine.dtype={dtype}"), model, config.knobs)
    assert probed == ["pool", "pool"]
    filtered = settings(*COLOCATED, "engine.top_p=0.9", "engine.min_p=0.1")
    with pytest.raises(ConfigError, match="min-p before top-p"):  # before the pool is started in vain
        builder.build_engine(filtered, model, filtered.knobs)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(Built):
        builder.build_engine(filtered, model, filtered.knobs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["engine=vllm", "schedule.overlap=true", "schedule.strategy=sorted-partial"], "schedule.overlap exclude"),
        (["engine=local", "engine.replicas=2", "schedule.strategy=sorted-partial"], "local cannot free its memory"),
        (["engine=local", "schedule.strategy=sorted-partial"], "local cannot free its memory"),
    ],
)
def test_engines_that_cannot_sleep_are_refused(model: Any, changes: list[str], message: str) -> None:
    given = ["engine.sleep_during_updates=true", "engine.max_new_tokens=128", *changes]
    config = SortedConfig.load(shipped_path("quickstart"), given)
    with pytest.raises(ConfigError, match=message):
        builder.build_engine(config, model, config.knobs)
