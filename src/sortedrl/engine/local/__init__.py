"""The local engine: continuous batching on PyTorch, in this process."""
