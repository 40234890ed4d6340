"""Simulation of the training loop on a virtual clock, from a trace of answer lengths and a cost model."""
