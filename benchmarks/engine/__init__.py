"""Engines: sampling speed, the promises that each engine keeps, exact replay, and the control of vLLM."""
