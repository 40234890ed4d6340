# pyright: reportMissingImports=false
"""vLLM's `VLLMWeightSyncClient` for an engine in this process: the calls of a trainer reach it without a network.

`engine.py` makes one for a transfer by CUDA IPC, whose trainer sends memory handles through its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from sortedrl.engine.vllm.process import VllmProcess


class LocalClient:
    """Its methods run in a thread of the sender; vLLM's coroutines run in the event loop of `process`."""

    def __init__(self, process: VllmProcess, *, limit_s: float) -> None:
        self._process, self._limit_s = process, limit_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._run(self._process.frontend.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))

    def start_weight_update(self) -> None:
        self._run(self._process.frontend.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        payload = _json_safe_update_payload(update_info)
        self._run(self._process.frontend.update_weights(WeightTransferUpdateRequest(update_info=payload)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._run(self._process.frontend.finish_weight_update())
        self._run(self._process.frontend.collective_rpc("sorted_tie_head"))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._process.loop).result(self._limit_s)
