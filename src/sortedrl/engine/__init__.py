"""Rollout engines behind one protocol (`base.py`). Import the concrete ones from their own modules."""
