r"""Math problems: math-verify compares the answer in `\boxed{...}` or `<answer>` tags with the reference.

Reward workers import `math_reward`; suites use `extract_answer` and `is_equal`. A grammar parses the text of the model,
which is never evaluated as code. Three limits apply: the length of an answer, the size of its numbers and powers, and
the processor time of a comparison. `reward.timeout_s` covers code that holds the interpreter lock.

Guarantees: a response gets 1.0 or 0.0, and 0.0 whenever it cannot be shown to be right.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import Any

from sortedrl.errors import ConfigError
from sortedrl.external.extras import extra_message
from sortedrl.tasks.answers import after_thought, boxed, completion_text, tagged

try:
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Basic, nan, zoo
except ImportError:
    raise ConfigError(extra_message("marking math answers", "math")) from None

MAX_ANSWER = 400  # characters; the longest reference of the usual suites has 200
_MAX_DIGITS = 60  # of one number
_MAX_POWER = 1000  # larger exponents and powers of powers are not computed
LIMIT_S = 2.0  # of processor time per comparison; wall time would fail answers on a busy machine

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timer is off, but ours is on


def math_reward(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **columns: Any
) -> list[float]:
    """1.0 for each completion whose answer equals the reference, else 0.0."""
    return [float(is_right(completion_text(given), wanted)) for given, wanted in zip(completions, answer, strict=True)]


def is_right(completion: str, reference: object) -> bool:
    given = extract_answer(completion)
    return given is not None and is_equal(given, reference_answer(reference))


def extract_answer(text: str) -> str | None:
    r"""The final answer of a response: the last of answer tags and `\boxed`, or the box inside the tags."""
    text = after_thought(text)
    inside = tagged(text)
    if inside is not None and text.rfind("</answer>") > text.rfind("\\boxed"):
        return (boxed(inside) if "\\boxed" in inside else inside) or None
    return boxed(text) or None


def reference_answer(reference: object) -> str:
    r"""The answer in a dataset's column: a number, a text, or a solution that ends in `#### 18` or has a `\boxed`."""
    if isinstance(reference, float) and reference.is_integer():
        return str(int(reference))
    text = str(reference)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    return (boxed(text) if "\\boxed" in text else None) or text.strip()


def is_equal(given: str, reference: str) -> bool:
    """Whether two answers are equal. In the main thread this takes at most LIMIT_S of processor time."""
    if len(given) > max(MAX_ANSWER, 2 * len(reference)):
        return False
    given, reference = _plain(given), _plain(reference)
    if not given:
        return False
    if _squeezed(given) == _squeezed(reference):
        return True
    ours, theirs = _number(given), _number(reference)
    if ours is not None and theirs is not None:
        return ours == theirs
    if _is_costly(given) or _is_other_base(given, reference):
        return False
    return _in_time(lambda: _is_same_expression(given, reference))


def canonical(answer: str) -> str:
    """A normal form: the same for equal numbers, and for texts that differ only in typesetting."""
    text = _plain(answer)
    number = _number(text)
    return _squeezed(text) if number is None else str(number)


# ---- plain text and numbers ------------------------------------------------------------------------------------------

_FENCES = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_SPACES = re.compile(r"\\[,;:! ]|~|\\quad|\\qquad|\s+")
# ASCII, because \d alone matches the digits of every script.
NUMBER = re.compile(r"([-+]?)\$?(\d{1,3}(?:,\d{3})+|\d+)?(\.\d*)?(?:[eE]([-+]?\d{1,3}))?(?:\\?%)?", re.ASCII)
_TEN_TO = re.compile(r"\\(?:times|cdot)10\^\{?([-+]?\d{1,3})\}?$", re.ASCII)
_BASE = re.compile(r"\d+_(?:\{(\d+)\}|(\d+))", re.ASCII)


def _plain(text: str) -> str:
    text = text.strip().rstrip(".").strip()
    for opening, closing in _FENCES:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)].strip()
    return text


def _squeezed(text: str) -> str:
    """The text without typesetting commands and spaces."""
    text = text.replace("\\left", "").replace("\\right", "").replace("\\!", "").replace("dfrac", "frac")
    return _SPACES.sub("", text.replace("tfrac", "frac"))


def _number(text: str) -> Fraction | None:
    """The exact value of a decimal number, which may have thousands separators or a power of ten."""
    plain = _SPACES.sub("", text.replace("{,}", ",").replace("\\$", ""))
    match = NUMBER.fullmatch(_TEN_TO.sub(r"e\1", plain))
    if match is None or not (match[2] or (match[3] or ".") != ".") or len(text) > _MAX_DIGITS:
        return None
    digits = (match[2] or "0").replace(",", "") + (match[3] or "")
    value = Fraction(match[1] + (digits + "0" if digits.endswith(".") else digits))
    return value * Fraction(10) ** int(match[4] or 0)


def _is_other_base(given: str, reference: str) -> bool:
    """Whether both are numbers of different bases, such as 52_8 and 52_9: math-verify ignores the base."""
    ours, theirs = _BASE.fullmatch(_squeezed(given)), _BASE.fullmatch(_squeezed(reference))
    return ours is not None and theirs is not None and (ours[1] or ours[2]) != (theirs[1] or theirs[2])


# ---- expressions -----------------------------------------------------------------------------------------------------

_LONG_NUMBER = re.compile(rf"\d{{{_MAX_DIGITS},}}")
_POWER = re.compile(r"(?:\^|\*\*)[\s{(\-+]*(\d*)")
_NEXT_POWER = re.compile(r"(?:\^|\*\*)[\s{(\-+]*[\d.]+[\s})]*(?:\^|\*\*|!)")
_FACTORIAL = re.compile(r"(\d+)[\s})]*!")
_MAX_NESTED = 8  # braces and brackets; the parser takes time exponential in their depth


def _is_costly(text: str) -> bool:
    """Whether an expression must not be computed, because it may take long or has look-alike characters."""
    if not text.isascii():
        return True  # parsers may take look-alikes for digits and letters
    depth = deepest = 0
    for char in text:
        depth += (char in "{([") - (char in "})]")
        deepest = max(deepest, depth)
    if deepest > _MAX_NESTED or _LONG_NUMBER.search(text) or _NEXT_POWER.search(text):
        return True
    exponents = [int(power) for power in _POWER.findall(text) if power]
    factors = [int(number) for number in _FACTORIAL.findall(text)]
    return max(exponents, default=0) > _MAX_POWER or max(factors, default=0) > 200


def _is_same_expression(given: str, reference: str) -> bool:
    ours, theirs = _parse(given), _parsed(reference)
    if _is_undefined(ours) or _is_undefined(theirs):
        return False  # all undefined expressions are equal to sympy
    return bool(verify(theirs, ours, timeout_seconds=None))


def _is_undefined(parsed: list[Any]) -> bool:
    """Whether sympy gave up on a part: a division by zero, or a letter such as gamma that it reads as a function."""
    return any(isinstance(found, Basic) and found.has(zoo, nan) for found in parsed)


def _parse(text: str) -> list[Any]:
    return parse(f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]


_parsed = lru_cache(maxsize=4096)(_parse)  # the same reference comes with every sibling and epoch


class _OutOfTime(BaseException):
    """Not an Exception, because the code that it interrupts catches those."""


def _in_time(compare: Callable[[], bool]) -> bool:
    """The result of `compare`, or False if it fails or takes too long."""
    try:
        with _timer():
            return compare()
    except (Exception, _OutOfTime):  # sympy raises errors of many kinds
        return False


@contextmanager
def _timer() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield  # only the main thread gets signals; elsewhere the caller's limit applies
        return

    def ring(signum: int, frame: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S, LIMIT_S / 4)  # repeated: a destructor may swallow the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
