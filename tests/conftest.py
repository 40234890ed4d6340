"""What all tests share: one thread, no network, reproducible property tests."""

from __future__ import annotations

import os

# Before torch and transformers are imported by any test: they read these once.
os.environ["OMP_NUM_THREADS"] = "1"  # torch takes it for its own number of threads
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from hypothesis import HealthCheck, settings

# A shared machine makes single examples slow: time is no reason to fail.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None)
# Derandomized unless asked otherwise, so that two runs of `make test` do the same; `local` looks for more.
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
