"""A pool of engines in Ray actors that looks like one engine."""
