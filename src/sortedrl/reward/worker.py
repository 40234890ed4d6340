"""The program of a scoring worker. This is the only module that knows the signature of reward functions.

`reward/caller.py` runs this file as a process and exchanges JSON lines with it. For functions that cannot be imported
by name, it imports `call_reward` instead. The file uses the standard library only and is run by its path, so that a
worker loads nothing but the modules of its reward functions.

Guarantees: one reply per request, of limited length; output of reward functions goes to stderr, which
`reward/output.py` limits; the text of their errors holds no control characters, since it may quote a model; no more
data than the memory limit can be allocated; a worker exits when its parent does, even in the middle of a call.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import math
import os
import reprlib
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Sequence
from enum import StrEnum
from operator import attrgetter
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, BinaryIO

_MAX_DETAIL = 500  # characters of an exception's text that are reported
_MAX_NAME = 100  # characters of a type's or a file's name, and of an invalid reward
_EXIT_GRACE_S = 0.5  # for exit handlers of the reward functions' modules
_CPU_SPARE_S = 5.0  # added to the processor time limit of a call
NOT_COLUMNS = frozenset({"prompt", "completion", "prompts", "completions", "completion_ids"})

Row = Sequence[Any]  # prompt, completion, columns, and optionally tokens of the completion and training progress


class FailureKind(StrEnum):
    TIMEOUT = "timeout"
    DIED = "died"
    RAISED = "exception"
    MEMORY = "out of memory"
    MALFORMED = "malformed result"
    NOT_A_NUMBER = "not a number"
    OUT_OF_RANGE = "out of range"
    NO_REWARD = "no reward"


class CallFailed(Exception):
    """A call that returned no rewards."""

    def __init__(self, kind: FailureKind, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


def printable(text: str, keep: str = "") -> str:
    """The text with every character that could control a terminal escaped, except spaces and those in `keep`.

    It is defined here because a worker loads no other module of the package.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_harmless(char) or char in keep else _escape(char) for char in text)


def _is_harmless(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def call_reward(function: Callable[..., Any], rows: Sequence[Row]) -> list[float | str | None]:
    """Call a reward function: one number per row, None where it does not apply, a text that shows an invalid reward.

    Raises CallFailed if the function does not return such a list.
    """
    try:
        result = function(**_arguments(function, rows))
        if inspect.iscoroutine(result):
            import asyncio  # imported only if needed: it would double the start-up time of workers

            result = asyncio.run(result)
        if hasattr(result, "tolist"):  # an array or a tensor
            result = result.tolist()
    except MemoryError as error:
        raise CallFailed(FailureKind.MEMORY, describe(error)) from error
    except BaseException as error:  # sys.exit in a verifier must not end the worker either
        raise CallFailed(FailureKind.RAISED, describe(error)) from error
    if not isinstance(result, list | tuple):
        raise CallFailed(FailureKind.MALFORMED, f"returned a {_type_name(result)}")
    if len(result) != len(rows):
        raise CallFailed(FailureKind.MALFORMED, f"returned {len(result)} rewards for {len(rows)} completions")
    return [None if value is None else _number(value) for value in result]


def _arguments(function: Callable[..., Any], rows: Sequence[Row]) -> dict[str, Any]:
    """One list per keyword argument. A function without `**kwargs` gets only the arguments that it names."""
    names = {name for row in rows for name in row[2]} - NOT_COLUMNS
    arguments: dict[str, Any] = {name: [row[2].get(name) for row in rows] for name in sorted(names)}
    arguments["prompts"] = [row[0] for row in rows]
    arguments["completions"] = [
        row[1] if isinstance(row[0], str) or isinstance(row[1], list) else [{"role": "assistant", "content": row[1]}]
        for row in rows
    ]
    if all(len(row) > 4 for row in rows):
        arguments["completion_ids"] = [list(row[3]) for row in rows]
        arguments["trainer_state"] = SimpleNamespace(**rows[-1][4])
        arguments["log_extra"] = arguments["log_metric"] = _discard_log
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have none
        return arguments
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: values for name, values in arguments.items() if name in parameters}


def _discard_log(name: str, value: object) -> None:
    """TRL passes logging callbacks to reward functions. This accepts such calls and ignores them."""


def _number(value: object) -> float | str:
    if isinstance(value, str | bytes):  # float() would read the text of an answer as its reward
        return _show(value)
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception:
        return _show(value)
    return number if math.isfinite(number) else str(number)


def _show(value: object) -> str:
    return printable(reprlib.repr(value)[:_MAX_NAME])


def _type_name(value: object) -> str:
    return printable(type(value).__name__[:_MAX_NAME])


def describe(error: BaseException) -> str:
    """Type, text and place of an exception, in one line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = os.path.basename(trace.tb_frame.f_code.co_filename)[-_MAX_NAME:] if trace else ""
    place = f" ({file}:{trace.tb_lineno})" if trace else ""
    try:
        text = str(error)
    except Exception:
        text = "no text"
    return printable(f"{_type_name(error)}: {text[:_MAX_DETAIL]}{place}")


def serve(lines: SimpleQueue[bytes | None], out: BinaryIO) -> None:
    """Answer the set-up message and requests until None arrives."""

    def reply(message: dict[str, Any]) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    line = lines.get()
    if line is None:
        return
    setup = json.loads(line)
    sys.path[:] = setup["path"]
    _limit_memory(setup.get("memory_bytes"))
    try:
        answer = _find_answer(setup)
    except BaseException as error:
        reply({"error": describe(error)})
        return
    reply({"ready": True})
    while (line := lines.get()) is not None:
        request = json.loads(line)
        timeout_s = request.get("timeout_s", setup["timeout_s"])  # some requests may take longer than a call
        _limit_cpu(timeout_s * (os.cpu_count() or 1) + _CPU_SPARE_S)
        reply(answer(request))
        _limit_cpu(0)


def _find_answer(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers requests: a handler that another part of the package names, or calls of reward functions."""
    if "handler" in setup:
        module, name = setup["handler"]
        return attrgetter(name)(importlib.import_module(module))(setup)
    functions = [attrgetter(name)(importlib.import_module(module)) for module, name in setup["functions"]]

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"rewards": call_reward(functions[request["function"]], request["rows"])}
        except CallFailed as failed:
            return {"kind": failed.kind, "detail": failed.detail}

    return answer


def _limit_memory(num_bytes: int | None) -> None:
    """Limit the memory of this process and of each process that it starts.

    On Linux the limit counts writable memory only. Large libraries and reserved address space (CUDA reserves much) do
    not count. On other systems the address space is limited.
    """
    if num_bytes is None:
        return
    with contextlib.suppress(ImportError, AttributeError, OSError, ValueError):
        import resource

        kind = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
        _, hard = resource.getrlimit(kind)
        limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
        resource.setrlimit(kind, (limit, limit))


def _limit_cpu(seconds: float) -> None:
    """Have the kernel end this process once a call has used this much processor time; 0 removes the limit.

    The parent enforces `timeout_s`. This limit is for a worker whose parent is gone, in a call that holds the
    interpreter lock, such as a slow regular expression: no thread could end it.
    """
    with contextlib.suppress(OSError, ValueError):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _read_lines(source: BinaryIO, lines: SimpleQueue[bytes | None]) -> None:
    try:
        with contextlib.suppress(OSError, MemoryError):
            for line in source:
                lines.put(line)
        lines.put(None)
        time.sleep(_EXIT_GRACE_S)
    finally:
        os._exit(1)


def main() -> None:
    channel = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # reward functions that read stdin must not take requests
    os.close(null)
    sys.stdout = sys.stderr = io.TextIOWrapper(sys.stderr.buffer, "utf-8", "backslashreplace", line_buffering=True)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, the kernel ends this process before the trainer
    lines: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_read_lines, args=(os.fdopen(channel, "rb"), lines), daemon=True).start()
    # Reward functions run in the main thread, because some set alarms, which only the main thread may do.
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        serve(lines, os.fdopen(os.dup(channel), "wb"))


if __name__ == "__main__":
    main()
