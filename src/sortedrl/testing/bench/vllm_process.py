"""vLLM in `bench engine`: a process of its own environment, driven line by line.

vLLM pins versions that this package does not, so it is never imported here: `vllm_rounds.py` runs under the Python of
an environment that has it, in process and with all threads, its fastest way on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from sortedrl.errors import EngineError
from sortedrl.testing.bench.contenders import Job, Timing

_SCRIPT = Path(__file__).with_name("vllm_rounds.py")
_REMEDY = "give --vllm-python, or SORTEDRL_VLLM_PYTHON, the Python of an environment with vLLM"


class Vllm:
    def __init__(self, job: Job, python: str | None) -> None:
        if python is None or not Path(python).is_file():
            raise EngineError(f"vLLM is not here ({python or 'no Python given'}): {_REMEDY}")
        threads = str(job.threads)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [python, "-P", str(_SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        settings = {
            "model": str(job.folder),
            "dtype": str(job.peer_dtype).removeprefix("torch."),
            "prompts": job.prompts,
            "max_length": max(map(len, job.prompts)) + job.new_tokens + 1,
            "threads": job.threads,
        }
        try:
            self._ask(settings)
        except EngineError:
            self.close()
            raise

    def run(self, seed: int, new_tokens: int) -> Timing:
        return Timing(**self._ask({"seed": seed, "new_tokens": new_tokens}))

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None, "the process was started with a pipe"
        assert self._process.stdout is not None, "the process was started with a pipe"
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its last line says why
        line = self._process.stdout.readline()
        answer = json.loads(line) if line else {"error": "its process ended"}
        if "error" in answer:
            raise EngineError(f"vLLM does not run here: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the process; it ends by itself when its input does."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
