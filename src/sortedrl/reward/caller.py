"""Two ways to call a reward function under a time limit: in a worker process, or in a thread.

Each scoring thread of `reward/pool.py` owns one caller.

Guarantees: after a call that timed out or died, the next call works, because the process is killed and replaced, or the
thread abandoned and replaced; nothing is pickled: processes get names to import and rows as JSON; a process has a
memory limit and gets only listed environment variables, none of which looks like a secret; what a process prints and
replies is limited.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from sortedrl.errors import RewardError
from sortedrl.reward import worker as reward_worker
from sortedrl.reward.output import WorkerOutput
from sortedrl.reward.worker import CallFailed, FailureKind, Row, call_reward

_START_TIMEOUT_S = 120.0  # for imports of the functions' modules, which `timeout_s` does not include
_START_TRIES = 3
_EXIT_TIMEOUT_S = 1.0
_MAX_REPLY = 1 << 20  # bytes; a reply holds at most one number or short text for each answer of a call
MEMORY_BYTES = 4 << 30
_KINDS = frozenset(kind.value for kind in FailureKind)
_SECRET_NAME = re.compile(r"KEY|TOKEN(?!I[SZ])|SECRET|PASSW|PASSPHRASE|CREDENTIAL", re.IGNORECASE)
# Environment variables that reward functions may need: paths, languages, numbers of threads and caches of large files.
# The names are patterns of fnmatch.
_KEPT_VARIABLES = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "TEMP", "TMP", "TZ", "PWD"),
    *("LANG", "LANGUAGE", "LC_*", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "DYLD_*", "XDG_*"),
    *("*_NUM_THREADS", "OMP_*", "KMP_*", "MKL_*", "MALLOC_*", "CUDA_*", "NVIDIA_*", "HIP_*", "ROCR_*", "TORCH_*"),
    *("HF_HOME", "HF_ENDPOINT", "HF_*_CACHE", "HF_*OFFLINE", "TRANSFORMERS_*", "TOKENIZERS_PARALLELISM", "NLTK_DATA"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class RewardFunction:
    """A reward function. `module` and `qualname` are empty if another process cannot import it."""

    index: int
    name: str
    function: Callable[..., Any]
    module: str = ""
    qualname: str = ""

    @property
    def is_importable(self) -> bool:
        return bool(self.module)


class RewardCaller(Protocol):
    def start(self) -> None:
        """Prepare for calls; raises RewardError if that is impossible."""
        ...

    def call(self, function: RewardFunction, rows: Sequence[Row], lines: Sequence[str]) -> list[float | str | None]:
        """Return the rewards of `rows` (`lines` is their JSON) as `call_reward` does; raises CallFailed."""
        ...

    def stop(self) -> None:
        """Make the current call and every later one fail. Any thread may call this."""
        ...

    def close(self) -> None: ...


def find_function(function: Callable[..., Any], index: int) -> RewardFunction:
    """Find the name under which another process would import this function, if there is one."""
    module = getattr(function, "__module__", None) or ""
    qualname = getattr(function, "__qualname__", None) or type(function).__qualname__
    name = f"{module}.{qualname}" if module else qualname
    if _resolves(module, qualname, function) and _is_on_path(module):
        return RewardFunction(index=index, name=name, function=function, module=module, qualname=qualname)
    return RewardFunction(index=index, name=name, function=function)


def _resolves(module: str, qualname: str, function: Callable[..., Any]) -> bool:
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return module != "__main__" and found is function


def _is_on_path(module: str) -> bool:
    """Whether an import in another process would load the same file; a module may have been created at run time."""
    package = sys.modules.get(module.rpartition(".")[0])
    path = getattr(package, "__path__", None)
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(module, path) if find_spec else None
        if spec is not None:
            return spec.origin == getattr(sys.modules[module], "__file__", None)
    return False


def clean_environment(keep: Sequence[str] = ()) -> dict[str, str]:
    """The environment of workers: the listed variables unless they look like secrets, and those named in `keep`."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in keep or (any(fnmatchcase(name, pattern) for pattern in _KEPT_VARIABLES) and not looks_secret(name))
    }


class ProcessCaller:
    """Calls functions in a worker process, which starts at the first call and is killed when a call takes too long."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        timeout_s: float,
        memory_bytes: int | None = MEMORY_BYTES,
        keep_env: Sequence[str] = (),
    ) -> None:
        self._indices = {function.index: position for position, function in enumerate(functions)}
        self._names = [(function.module, function.qualname) for function in functions]
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._keep_env = keep_env
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._output: WorkerOutput | None = None
        self._is_stopped = False

    def start(self) -> None:
        setup = {
            "path": sys.path,
            "functions": self._names,
            "timeout_s": self._timeout_s,
            "memory_bytes": self._memory_bytes,
        }
        names = ", ".join(f"{module}.{qualname}" for module, qualname in self._names)
        num_failures = 0
        while self._channel is None:
            self._spawn()
            try:
                reply = self._exchange(json.dumps(setup), _START_TIMEOUT_S)
                if not isinstance(reply, dict) or not reply.keys() & {"ready", "error"}:
                    self._end()
                    raise CallFailed(FailureKind.MALFORMED, "a module wrote to the worker's channel")
            except CallFailed as failed:
                num_failures += 1
                if self._is_stopped:
                    raise
                if num_failures == _START_TRIES:
                    raise RewardError(
                        f"a reward worker for {names} did not start ({failed}): check that a plain Python process can "
                        "import their modules within reward.memory_mb"
                    ) from failed
                continue
            if "error" in reply:
                raise RewardError(
                    f"a reward worker could not import {names}: {reply['error']}. Make their modules importable by "
                    "another process, or pass a lambda, which runs in a thread of this process"
                )

    def call(self, function: RewardFunction, rows: Sequence[Row], lines: Sequence[str]) -> list[float | str | None]:
        self.start()
        request = f'{{"function":{self._indices[function.index]},"rows":[{",".join(lines)}]}}'
        reply = self._exchange(request, self._timeout_s)
        match reply:
            case {"kind": str(kind), "detail": str(detail)} if kind in _KINDS:
                if kind == FailureKind.MEMORY:
                    self._end()  # earlier calls may have filled its memory
                raise CallFailed(FailureKind(kind), detail)
            case {"rewards": list(rewards)} if len(rewards) == len(rows) and all(map(_is_reward, rewards)):
                return rewards
            case _:
                self._end()
                raise CallFailed(
                    FailureKind.MALFORMED,
                    "sent a result that is not a list of numbers, because it wrote to the worker's channel",
                )

    def stop(self) -> None:
        self._is_stopped = True
        channel = self._channel
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end(_EXIT_TIMEOUT_S)

    def _spawn(self) -> None:
        # Run by path and with -P: the worker imports nothing of this package and does not run the parent's __main__.
        command = [sys.executable, "-P", reward_worker.__file__]
        ours, theirs = socket.socketpair()
        self._output = WorkerOutput()
        with theirs, os.fdopen(self._output.write_fd, "wb"):
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=self._output.write_fd,
                    stderr=self._output.write_fd,
                    env=clean_environment(self._keep_env),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise RewardError(f"a reward worker could not be started ({error}): lower reward.workers") from error
        self._channel = ours
        if self._is_stopped:  # `stop` was called before there was a channel to shut down
            ours.shutdown(socket.SHUT_RDWR)

    def _exchange(self, message: str, timeout_s: float) -> Any:
        assert self._channel is not None, "no worker to talk to"
        assert self._output is not None, "a worker without output"
        deadline = time.monotonic() + timeout_s
        reply = bytearray()
        self._output.start_call()
        try:
            self._channel.settimeout(timeout_s)
            self._channel.sendall(message.encode() + b"\n")
            while not reply.endswith(b"\n"):
                self._channel.settimeout(max(deadline - time.monotonic(), 1e-3))
                chunk = self._channel.recv(1 << 16)
                if not chunk:
                    raise ConnectionResetError
                reply += chunk
                if len(reply) > _MAX_REPLY:
                    self._end()
                    raise CallFailed(FailureKind.MALFORMED, f"sent a result of more than {_MAX_REPLY >> 20} MiB")
            return _read_json(reply)
        except TimeoutError:
            self._end()
            raise CallFailed(FailureKind.TIMEOUT) from None
        except OSError as error:
            raise CallFailed(FailureKind.DIED, f"exit code {self._end(_EXIT_TIMEOUT_S)}") from error

    def _end(self, grace_s: float = 0.0) -> int | None:
        """Close the channel, upon which the worker exits, and kill its process group after `grace_s`."""
        channel, process, output = self._channel, self._process, self._output
        self._channel = self._process = self._output = None
        if channel is not None:
            channel.close()
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the group includes processes that functions started
        code = process.wait()
        if output is not None:
            output.close()
        return code


class ThreadCaller:
    """Calls functions in a thread. Threads cannot be killed, so one whose call takes too long is abandoned."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._inbox: SimpleQueue[Callable[[], None] | None] | None = None
        self._outbox: SimpleQueue[list[float | str | None] | CallFailed] = SimpleQueue()
        self._is_stopped = False

    def start(self) -> None:
        if self._inbox is None:
            self._inbox = SimpleQueue()
            threading.Thread(target=self._work, args=(self._inbox,), name="reward-call", daemon=True).start()

    @staticmethod
    def _work(inbox: SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := inbox.get()) is not None:
            task()

    def call(self, function: RewardFunction, rows: Sequence[Row], lines: Sequence[str]) -> list[float | str | None]:
        self.start()
        assert self._inbox is not None, "no thread to call in"
        # One outbox per call, so that what an abandoned thread returns later is never taken for another call's reward.
        outbox: SimpleQueue[list[float | str | None] | CallFailed] = SimpleQueue()
        self._outbox = outbox

        def task() -> None:
            try:
                outbox.put(call_reward(function.function, rows))
            except CallFailed as failed:
                outbox.put(failed)

        self._inbox.put(task)
        if self._is_stopped:
            raise CallFailed(FailureKind.DIED, "closed")
        try:
            outcome = outbox.get(timeout=self._timeout_s)
        except Empty:
            self._abandon(function)
            raise CallFailed(FailureKind.TIMEOUT) from None
        if isinstance(outcome, CallFailed):
            raise outcome
        return outcome

    def _abandon(self, function: RewardFunction) -> None:
        logger.warning(
            "reward function %s took longer than %g s in a thread, which cannot be killed and keeps running: "
            "define the function at the top level of a module, so that it runs in a process, which can be killed",
            function.name,
            self._timeout_s,
        )
        self.close()

    def stop(self) -> None:
        self._is_stopped = True
        self._outbox.put(CallFailed(FailureKind.DIED, "closed"))

    def close(self) -> None:
        if self._inbox is not None:
            self._inbox.put(None)
            self._inbox = None


def _read_json(line: bytes | bytearray) -> Any:
    """The message on a line, or None if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_reward(value: object) -> bool:
    """Whether a worker may send this: a finite number, None, or the text that shows an invalid reward."""
    return value is None or isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))


def looks_secret(name: str) -> bool:
    """Whether a configuration key or environment variable of this name probably holds a secret."""
    return _SECRET_NAME.search(name) is not None
