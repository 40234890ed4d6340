"""Rewards: functions called in worker processes under limits, while the engine goes on generating."""
