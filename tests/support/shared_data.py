"""The folder of the public test sets: SORTEDRL_DATA, or beside the checkout. Without it, its tests are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("SORTEDRL_DATA") or Path(__file__).parents[3] / "shared" / "data")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the public test sets were not found: set SORTEDRL_DATA")
