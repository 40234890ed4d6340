"""Rewards: reward functions run in worker processes under limits, while the engine continues to generate."""
