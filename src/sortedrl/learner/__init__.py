"""Learners behind one protocol (`base.py`). Import a concrete learner from its module."""
