"""Telemetry: the report of a long run."""
