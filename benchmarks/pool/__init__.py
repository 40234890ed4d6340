"""Engines in processes of their own: pools of engines, and rollout that continues during updates."""
