"""Benchmarks of the engine and the learner against other implementations, for `sortedrl bench` and benchmarks/."""
