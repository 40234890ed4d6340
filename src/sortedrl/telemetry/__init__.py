"""What a run tells: typed events, metrics derived from them, and the views that read a run directory."""
