"""The global random generators: after a state is restored, they draw the same numbers as after it was saved."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from sortedrl.errors import RunDirError
from sortedrl.run.rng import rng_state, set_rng_state


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Seed the generators for each test, and restore them afterwards."""
    python, numpy_state, torch_state = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    yield
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)


def draw() -> tuple[list[float], list[float], list[float]]:
    """Odd counts of normal draws: each generator then holds one back, which is part of its state."""
    pythons = [random.gauss(0, 1) for _ in range(3)]
    return pythons, np.random.standard_normal(3).tolist(), torch.randn(3).tolist()


def test_draws_go_on_after_a_round_trip_through_json() -> None:
    draw()
    text = json.dumps(rng_state())
    expected = [draw(), draw()]
    random.seed(9)
    np.random.seed(9)
    torch.manual_seed(9)
    set_rng_state(json.loads(text))
    assert [draw(), draw()] == expected


def test_taking_the_state_changes_nothing_and_it_is_small() -> None:
    first = rng_state()
    assert first == rng_state()
    assert len(json.dumps(first)) < 16_000
    assert first["cuda"] == []


def test_another_numpy_generator_is_kept_too() -> None:
    legacy = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(5))
        text = json.dumps(rng_state())
        expected = np.random.random(4).tolist()
        set_rng_state(json.loads(text))
        assert np.random.random(4).tolist() == expected
    finally:
        np.random.set_bit_generator(legacy)


@pytest.mark.parametrize(
    "change",
    [
        {"torch": {"dtype": "|u1", "base64": "AAAA"}},
        {"torch": {"dtype": "|u1", "base64": "!"}},
        {"torch": None},
        {"python": {"version": 3, "words": {"dtype": "<u4", "base64": ""}, "gauss": None}},
        {"numpy": {"bit_generator": "MT19937", "state": {}}},
        {"numpy": {"dtype": "|O", "base64": "AAAAAAAAAAA="}},
    ],
)
def test_a_damaged_state_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RunDirError, match="damaged"):
        set_rng_state(rng_state() | change)
    incomplete = rng_state()
    del incomplete[next(iter(change))]
    with pytest.raises(RunDirError, match="damaged"):
        set_rng_state(incomplete)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_states_of_absent_devices_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    state = rng_state() | {"cuda": [{"dtype": "|u1", "base64": "AAAA"}]}
    expected = draw()
    with caplog.at_level(logging.WARNING):
        set_rng_state(state)
    assert draw() == expected
    assert "1 CUDA devices, but there are 0" in caplog.text
