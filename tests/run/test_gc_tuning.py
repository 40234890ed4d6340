"""The garbage collector during a run; its settings are restored however the run ends."""

from __future__ import annotations

import gc

import pytest

from sortedrl.run.gc_tuning import RARE, rare_collections
from sortedrl.simulate.run import gc_paused


def test_collections_are_rare_and_as_before_behind() -> None:
    def fail() -> None:
        with rare_collections():
            assert gc.get_threshold() == RARE
            assert gc.get_freeze_count() > 0
            raise KeyError

    before = gc.get_threshold()
    with pytest.raises(KeyError):
        fail()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_none_at_all_and_as_before_behind() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
