"""Typed events of a run, the figures computed from them, and the pages and traces that read a run directory."""
