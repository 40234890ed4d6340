"""The simulated engine: the protocol of `engine/base.py` on a virtual clock."""
