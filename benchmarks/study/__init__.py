"""Training runs: does sorted scheduling learn better or faster, and the charts of these runs."""
