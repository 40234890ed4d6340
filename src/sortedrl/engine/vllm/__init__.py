"""The vLLM engine: vLLM in this process or as a server, behind the protocol of `engine/base.py`."""
