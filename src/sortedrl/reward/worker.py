"""Calls reward functions: the program of a scoring worker, and the one place that knows their signature.

`reward/pool.py` runs this file as a process and talks to it in JSON lines; for callables that cannot be imported by
name it imports `call_reward` and stays in its own process. Standard library only: the file is run by its path, so that
a worker loads nothing but the modules of its reward functions.

What a worker keeps true: one reply per request; what reward functions print goes to stderr, and like the text of their
errors it carries no control characters, since it may quote a model; data past the memory limit cannot be allocated; it
ends when its parent does, also in the middle of a call.
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

MAX_DETAIL = 500  # characters of an exception's text that are passed on
EXIT_GRACE_S = 0.5  # for exit handlers of the reward functions' modules
CPU_SPARE_S = 5.0
NOT_COLUMNS = frozenset({"prompt", "completion", "prompts", "completions", "completion_ids"})

Row = Sequence[Any]  # prompt, completion, columns, and, where they are known, tokens of the completion and progress


class FailureKind(StrEnum):
    TIMEOUT = "timeout"
    DIED = "died"
    RAISED = "exception"
    MEMORY = "out of memory"
    MALFORMED = "malformed result"
    NOT_A_NUMBER = "not a number"
    NO_REWARD = "no reward"


class CallFailed(Exception):
    """A call that gave no rewards at all."""

    def __init__(self, kind: FailureKind, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


def printable(text: str, keep: str = "") -> str:
    """The text with characters that could steer a terminal as escapes; those in `keep`, and spaces, stay.

    Defined here because a worker loads nothing else of the package; `redact.py` has it for the main process.
    """
    if text.isprintable():
        return text
    return "".join(char if _is_harmless(char) or char in keep else _escape(char) for char in text)


def _is_harmless(char: str) -> bool:
    return char.isprintable() or unicodedata.category(char) == "Zs"


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def call_reward(function: Callable[..., Any], rows: Sequence[Row]) -> list[float | str | None]:
    """One reward per row, None where the function has no say; a string stands for a bad one and shows it.

    Raises CallFailed when there is no such list.
    """
    try:
        result = function(**_arguments(function, rows))
        if inspect.iscoroutine(result):
            import asyncio  # few reward functions are coroutines, and it would double the start-up time

            result = asyncio.run(result)
        if hasattr(result, "tolist"):  # an array or a tensor
            result = result.tolist()
    except MemoryError as error:
        raise CallFailed(FailureKind.MEMORY, _describe(error)) from error
    except BaseException as error:  # sys.exit in a verifier must not end the worker either
        raise CallFailed(FailureKind.RAISED, _describe(error)) from error
    if not isinstance(result, list | tuple):
        raise CallFailed(FailureKind.MALFORMED, f"returned a {type(result).__name__}")
    if len(result) != len(rows):
        raise CallFailed(FailureKind.MALFORMED, f"returned {len(result)} rewards for {len(rows)} completions")
    return [None if value is None else _number(value) for value in result]


def _arguments(function: Callable[..., Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Keyword arguments, one list each; a function without `**kwargs` gets only those that it names."""
    names = {name for row in rows for name in row[2]} - NOT_COLUMNS
    arguments: dict[str, Any] = {name: [row[2].get(name) for row in rows] for name in sorted(names)}
    arguments["prompts"] = [row[0] for row in rows]
    arguments["completions"] = [
        row[1] if isinstance(row[0], str) else [{"role": "assistant", "content": row[1]}] for row in rows
    ]
    if all(len(row) > 4 for row in rows):
        arguments["completion_ids"] = [list(row[3]) for row in rows]
        arguments["trainer_state"] = SimpleNamespace(**rows[-1][4])
        arguments["log_extra"] = arguments["log_metric"] = _not_kept
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have none
        return arguments
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return arguments
    return {name: values for name, values in arguments.items() if name in parameters}


def _not_kept(name: str, value: object) -> None:
    """TRL's functions may log by these; there is no table here for what they log."""


def _number(value: object) -> float | str:
    if isinstance(value, str | bytes):  # float() would read the text of an answer as its reward
        return printable(reprlib.repr(value))
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception:
        return printable(reprlib.repr(value))
    return number if math.isfinite(number) else str(number)


def _describe(error: BaseException) -> str:
    """Type, text and place of an exception, in one line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno})" if trace else ""
    try:
        text = str(error)
    except Exception:
        text = "no text"
    return printable(f"{type(error).__name__}: {text[:MAX_DETAIL]}{place}")


def serve(lines: SimpleQueue[bytes | None], out: BinaryIO) -> None:
    """Answer set-up and requests until None comes."""

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
        functions = [attrgetter(name)(importlib.import_module(module)) for module, name in setup["functions"]]
    except BaseException as error:
        reply({"error": _describe(error)})
        return
    reply({"ready": True})
    while (line := lines.get()) is not None:
        request = json.loads(line)
        _limit_cpu(setup["timeout_s"] * (os.cpu_count() or 1) + CPU_SPARE_S)
        try:
            reply({"rewards": call_reward(functions[request["function"]], request["rows"])})
        except CallFailed as failed:
            reply({"kind": failed.kind, "detail": failed.detail})
        _limit_cpu(0)


def _limit_memory(num_bytes: int | None) -> None:
    """Make allocations past so much data fail, in this process and in each that it starts.

    Linux counts as data what a process can write to, so that a module with large libraries, or one that reserves
    address space which it does not use, as CUDA does, is not refused for that. Elsewhere the address space is limited.
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
    """Have the kernel end this process once a call has used so much processor time; 0 lifts the limit.

    The parent keeps the time limit. This one is for a call that holds the interpreter lock, such as a regular
    expression gone wild, in a worker whose parent is gone: no thread could end it.
    """
    with contextlib.suppress(OSError, ValueError):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _read_lines(source: BinaryIO, lines: SimpleQueue[bytes | None]) -> None:
    try:
        with contextlib.suppress(OSError, MemoryError):
            for line in source:
                lines.put(line)
        lines.put(None)
        time.sleep(EXIT_GRACE_S)
    finally:
        os._exit(1)


class _PlainOutput(io.TextIOWrapper):
    """A stream to the console through which no control characters pass."""

    def write(self, text: str, /) -> int:
        super().write(printable(text, keep="\n\t"))
        return len(text)


def main() -> None:
    channel = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # reward functions that read stdin must not eat requests
    os.close(null)
    sys.stdout = sys.stderr = _PlainOutput(sys.stderr.buffer, "utf-8", "backslashreplace", line_buffering=True)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, this process goes first, not the trainer
    lines: SimpleQueue[bytes | None] = SimpleQueue()
    threading.Thread(target=_read_lines, args=(os.fdopen(channel, "rb"), lines), daemon=True).start()
    # Reward functions run in the main thread: some set alarms, which no other thread may do.
    with contextlib.suppress(BrokenPipeError):  # whoever asked is gone
        serve(lines, os.fdopen(os.dup(channel), "wb"))


if __name__ == "__main__":
    main()
