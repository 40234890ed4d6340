"""Weights from the learner's processes to vLLM's workers, by vLLM's own weight transfer."""
