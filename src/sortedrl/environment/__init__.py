"""Environments: objects with tools that a model may call between its turns (docs/guides/tools.md)."""
