"""Simulation: the training loop on a virtual clock, over a trace of answer lengths and a model of what work costs."""
