"""A worker process that serves requests over a socket, under limits of time, memory and output.

`reward/caller.py` runs reward functions in such processes, `environment/runner.py` the objects of environments. The
process runs `reward/worker.py`.

Guarantees: nothing is pickled: a process gets names to import and requests as JSON; after a request that timed out or
died, the next one works, because the process is killed and replaced; a process has a memory limit and gets only listed
environment variables, none of which looks like a secret; what a process prints and replies is limited.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from sortedrl.errors import RewardError
from sortedrl.reward import worker as worker_program
from sortedrl.reward.output import WorkerOutput
from sortedrl.reward.worker import CallFailed, FailureKind

_START_TIMEOUT_S = 120.0  # for imports of the functions' modules, which `timeout_s` does not include
_START_TRIES = 3
_EXIT_TIMEOUT_S = 1.0
_MAX_REPLY = 1 << 20  # bytes; a reply holds at most one number or short text for each answer of a call
MEMORY_BYTES = 4 << 30
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


def clean_environment(keep: Sequence[str] = ()) -> dict[str, str]:
    """The environment of workers: the listed variables unless they look like secrets, and those named in `keep`."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in keep or (any(fnmatchcase(name, pattern) for pattern in _KEPT_VARIABLES) and not looks_secret(name))
    }


class WorkerProcess:
    """A process that starts at the first request. `names` and `section` are for messages: what it loads, who set it up.

    `setup` is the first message that the process gets.
    """

    def __init__(self, setup: Mapping[str, Any], *, names: str, section: str, keep_env: Sequence[str] = ()) -> None:
        self._setup = setup
        self._names = names
        self._section = section
        self._worker = f"{'an' if section[0] in 'aeiou' else 'a'} {section} worker"
        self._keep_env = keep_env
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._output: WorkerOutput | None = None
        self._is_stopped = False

    def start(self) -> None:
        setup, names, section = {"path": sys.path, **self._setup}, self._names, self._section
        num_failures = 0
        if self._process is not None and self._process.poll() is not None:
            self._end()  # it died while it was idle, so no request is at fault
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
                        f"{self._worker} for {names} did not start ({failed}): check that a plain process can "
                        f"import their modules within {section}.memory_mb"
                    ) from failed
                continue
            if "error" in reply:
                raise RewardError(
                    f"{self._worker} could not import {names}: {reply['error']}. Make their modules importable by "
                    "another process, or pass a lambda, which runs in a thread of this process"
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
        command = [sys.executable, "-P", worker_program.__file__]
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
                raise RewardError(
                    f"{self._worker} could not be started ({error}): lower {self._section}.workers"
                ) from error
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


def _read_json(line: bytes | bytearray) -> Any:
    """The message on a line, or None if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def looks_secret(name: str) -> bool:
    """Whether a configuration key or environment variable of this name probably holds a secret."""
    return _SECRET_NAME.search(name) is not None


def as_plain(value: Any) -> Any:
    """Convert arrays and scalars of numpy and the like to plain numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
