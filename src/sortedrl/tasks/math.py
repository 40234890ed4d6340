r"""Math problems: the answer in `\boxed{...}` or `<answer>` tags, compared with the reference by math-verify.

A reward worker imports `math_reward`; evaluation uses `extract_answer` and `is_equal` too. What a model wrote is parsed
by a grammar, never evaluated as code, and three fences stand around that: an answer has a longest length, it has no
number that takes long to compute, and a timer ends the comparison. The pool's own limit (`reward.timeout_s`) is behind
them, for what holds the interpreter.

What this module keeps true: a response gets 1.0 or 0.0, and 0.0 for whatever cannot be told to be right.
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
from sortedrl.tasks.answers import after_thought, boxed, tagged

try:
    from math_verify import LatexExtractionConfig, parse, verify
except ImportError:
    raise ConfigError("the math task needs the package math-verify: pip install 'sortedrl[math]'") from None

MAX_ANSWER = 400  # characters; the longest reference of the usual suites has 200
MAX_DIGITS = 60  # of one number
MAX_POWER = 1000  # a larger exponent, or a power of powers, is not computed
LIMIT_S = 3.0  # of one comparison

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timer is off: ours runs


def math_reward(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **columns: Any
) -> list[float]:
    """1.0 for each completion whose answer equals the reference, else 0.0."""
    return [float(is_right(text_of(given), wanted)) for given, wanted in zip(completions, answer, strict=True)]


def is_right(completion: str, reference: object) -> bool:
    given = extract_answer(completion)
    return given is not None and is_equal(given, reference_answer(reference))


def text_of(completion: Any) -> str:
    """A completion as text: chats give it as messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def extract_answer(text: str) -> str | None:
    r"""The answer that a response ends on: of answer tags and `\boxed` what comes last, and the box within the tags."""
    text = after_thought(text)
    inside = tagged(text)
    if inside is not None and text.rfind("</answer>") > text.rfind("\\boxed"):
        return (boxed(inside) if "\\boxed" in inside else inside) or None
    return boxed(text) or None


def reference_answer(reference: object) -> str:
    r"""The answer of a dataset's own column: a number, a text, a solution that ends in `#### 18` or in a `\boxed`."""
    if isinstance(reference, float) and reference.is_integer():
        return str(int(reference))
    text = str(reference)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    return (boxed(text) if "\\boxed" in text else None) or text.strip()


def is_equal(given: str, reference: str) -> bool:
    """Whether two answers mean the same. In the main thread it takes three seconds at most."""
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
    """A form that equal numbers, and texts that differ in their setting alone, have in common."""
    text = _plain(answer)
    number = _number(text)
    return _squeezed(text) if number is None else str(number)


# ---- plain text and numbers ------------------------------------------------------------------------------------------

FENCES = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
SPACES = re.compile(r"\\[,;:! ]|~|\\quad|\\qquad|\s+")
# Digits are ASCII's: \d alone would take those of every script.
NUMBER = re.compile(r"([-+]?)\$?(\d{1,3}(?:,\d{3})+|\d+)?(\.\d*)?(?:[eE]([-+]?\d{1,3}))?(?:\\?%)?", re.ASCII)
TEN_TO = re.compile(r"\\(?:times|cdot)10\^\{?([-+]?\d{1,3})\}?$", re.ASCII)
BASE = re.compile(r"\d+_(?:\{(\d+)\}|(\d+))", re.ASCII)


def _plain(text: str) -> str:
    text = text.strip().rstrip(".").strip()
    for opening, closing in FENCES:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)].strip()
    return text


def _squeezed(text: str) -> str:
    """Without what only sets the type."""
    text = text.replace("\\left", "").replace("\\right", "").replace("\\!", "").replace("dfrac", "frac")
    return SPACES.sub("", text.replace("tfrac", "frac"))


def _number(text: str) -> Fraction | None:
    """A decimal number, with commas between thousands or a power of ten, as it is written."""
    plain = SPACES.sub("", text.replace("{,}", ",").replace("\\$", ""))
    match = NUMBER.fullmatch(TEN_TO.sub(r"e\1", plain))
    if match is None or not (match[2] or (match[3] or ".") != ".") or len(text) > MAX_DIGITS:
        return None
    digits = (match[2] or "0").replace(",", "") + (match[3] or "")
    value = Fraction(match[1] + (digits + "0" if digits.endswith(".") else digits))
    return value * Fraction(10) ** int(match[4] or 0)


def _is_other_base(given: str, reference: str) -> bool:
    """Whether both are numbers of a base, such as 52_8, and not of the same: math-verify does not look at it."""
    ours, theirs = BASE.fullmatch(_squeezed(given)), BASE.fullmatch(_squeezed(reference))
    return ours is not None and theirs is not None and (ours[1] or ours[2]) != (theirs[1] or theirs[2])


# ---- expressions -----------------------------------------------------------------------------------------------------

LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS},}}")
POWER = re.compile(r"(?:\^|\*\*)[\s{(\-+]*(\d*)")
NEXT_POWER = re.compile(r"(?:\^|\*\*)[\s{(\-+]*[\d.]+[\s})]*(?:\^|\*\*|!)")
FACTORIAL = re.compile(r"(\d+)[\s})]*!")
MAX_NESTED = 8  # braces and brackets; the grammar takes exponential time on deeper ones


def _is_costly(text: str) -> bool:
    """Whether an expression is better not computed: it may take long, or is not what it looks like."""
    if not text.isascii():
        return True  # look-alikes of digits and letters, which parsers may take for those
    depth = deepest = 0
    for char in text:
        depth += (char in "{([") - (char in "})]")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTED or LONG_NUMBER.search(text) or NEXT_POWER.search(text):
        return True
    exponents = [int(power) for power in POWER.findall(text) if power]
    factors = [int(number) for number in FACTORIAL.findall(text)]
    return max(exponents, default=0) > MAX_POWER or max(factors, default=0) > 200


def _is_same_expression(given: str, reference: str) -> bool:
    return bool(verify(_parsed(reference), _parse(given), timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    return parse(f"${text}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)  # type: ignore[arg-type]


_parsed = lru_cache(maxsize=4096)(_parse)  # references come again with every sibling and epoch


class _OutOfTime(BaseException):
    """Not an Exception: what it ends catches those."""


def _in_time(compare: Callable[[], bool]) -> bool:
    """What `compare` says, or False when it fails or takes too long."""
    try:
        with _timer():
            return compare()
    except (Exception, _OutOfTime):  # of any kind: sympy has many, and none of them makes an answer right
        return False


@contextmanager
def _timer() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield  # no signals there: the caller's limit has to do
        return

    def ring(signum: int, frame: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S, LIMIT_S / 4)  # again, should the first be lost in a destructor
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
