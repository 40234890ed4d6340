"""Rollout engines behind one protocol (`base.py`). Import a concrete engine from its own module."""
