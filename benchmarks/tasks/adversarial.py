"""Outputs that try to crash, hang or fool a verifier, made from a seed. None of them deserves a reward.

`verifiers.py` scores all of them, tests score a few. Many contain the right answer in a place where it must not count.
"""

from __future__ import annotations

import random
from collections.abc import Callable

MATH_REFERENCE = "42"
LOGIC_REFERENCE = "(1) Alice is a knight\n(2) Boris is a knave"
CODE = (
    "__import__('os').system('true')",
    "exit()",
    "open('/etc/passwd').read()",
    "[1 for _ in range(10**9)]",
    "lambda: 42",
)


def _boxed(text: str) -> str:
    return f"So the answer is $\\boxed{{{text}}}$."


MATH: tuple[Callable[[random.Random], str], ...] = (
    lambda r: "\\boxed" + "{" * (n := r.randrange(2, 5000)) + "41" + "}" * n,
    lambda r: "\\boxed" + "{" * r.randrange(2, 5000) + "42",
    lambda r: _boxed("\\frac{1}{" * r.randrange(1, 60) + "2" + "}" * r.randrange(1, 60)),
    lambda r: _boxed("\\sqrt{" * (n := r.randrange(1, 60)) + "2" + "}" * n),
    lambda r: _boxed("(" * (n := r.randrange(1, 150)) + "7" + ")" * n),
    lambda r: _boxed("7" * r.randrange(61, 400)),
    lambda r: _boxed(str(r.randrange(1, 10)) * r.choice((10**4, 10**5, 10**6, 3 * 10**6))),
    lambda r: f"\\boxed{{42}} and on: \\boxed{{{'4' * r.randrange(1, 10**5)}",
    lambda r: _boxed(r.choice(("10**10**10", "10^{10^{10}}", "9^{9^{9^9}}", "2^{2^{2^{2^{2^2}}}}", "(10^{9})^{10^9}"))),
    lambda r: _boxed(f"{r.randrange(2, 99)}^{{{10 ** r.randrange(3, 12)}}}"),
    lambda r: _boxed(f"{r.randrange(10**4, 10**9)}!" + "!" * r.randrange(4)),
    lambda r: _boxed(f"\\binom{{{10 ** r.randrange(5, 9)}}}{{{10 ** r.randrange(3, 5)}}}"),
    lambda r: _boxed(f"\\sum_{{k=1}}^{{{10 ** r.randrange(6, 12)}}} \\sin(k^k)"),
    lambda r: _boxed(f"\\prod_{{k=1}}^{{{10 ** r.randrange(6, 12)}}} k"),
    lambda r: _boxed(f"\\int_0^{{{r.randrange(1, 9)}}} e^{{-x^{r.randrange(3, 9)}}} \\sin(x^{r.randrange(3, 9)}) dx"),
    lambda r: _boxed(f"(x+y+z)^{{{r.randrange(50, 1000)}}} - (x+y)^{{{r.randrange(50, 1000)}}}"),
    lambda r: _boxed(r.choice(("４２", "٤٢", "4２", "𝟒𝟐", "४२", "４2", "4\u200b2", "4\u00a02x"))),
    lambda r: _boxed(
        r.choice(("42 or 41", "41 or 42", "42, 41", "\\{41, 42\\}", "[42, 41]", "41 < x < 43", "x", "42 \\neq x"))
    ),
    lambda r: f"<answer>42{' ' * r.randrange(1, 2000)}",
    lambda r: f"42</answer>{' ' * r.randrange(1, 2000)}<answer>",
    lambda r: "<answer>42</answer>" + "<answer>" * r.randrange(0, 50) + "<answer>41</answer>",
    lambda r: "<think>" * r.randrange(1, 99) + "\\boxed{42}</think> I do not know.",
    lambda r: "\\boxed{42}" + "\\boxed{41}" * r.randrange(1, 2000),
    lambda r: "\\boxed" * r.randrange(1, 10**5) + "{",
    lambda r: _boxed(r.choice(CODE)),
    lambda r: f"<answer>{r.choice(CODE)}</answer>",
    lambda r: _boxed("".join(chr(r.randrange(1, 0x2FF)) for _ in range(r.randrange(1, 300))) + "x"),
    lambda r: _boxed("".join(r.choice("\\{}^_$&#%~()[]") for _ in range(r.randrange(1, 300))) + "x"),
    lambda r: _boxed(
        r.choice(("\\frac{1}{0}", "\\frac{0}{0}", "\\infty", "\\text{NaN}", "1e999", "\\sqrt{-1}", "0^0"))
    ),
    lambda r: "".join(chr(r.randrange(0x20, 0xD7FF)) for _ in range(r.randrange(1, 5000))),
    lambda r: _boxed("\\begin{matrix}" + "1 & " * r.randrange(1, 90) + "1 \\end{matrix}"),
    lambda r: "The answer is 42." * r.randrange(1, 1000),
    lambda r: "",
)

LOGIC: tuple[Callable[[random.Random], str], ...] = (
    lambda r: f"<answer>{LOGIC_REFERENCE}</answer>" * r.randrange(2, 50),
    lambda r: f"<answer>{LOGIC_REFERENCE}" + " " * r.randrange(10**5),
    lambda r: f"{LOGIC_REFERENCE}</answer>",
    lambda r: f"<answer>{LOGIC_REFERENCE}</answer> {r.choice(('I think.', 'x', '</answer>', '<think>'))}",
    lambda r: f"<think><answer>{LOGIC_REFERENCE}</answer>",
    lambda r: f"<answer>{LOGIC_REFERENCE}</answer></think>",
    lambda r: f"<answer>{LOGIC_REFERENCE.replace('A', 'А')}</answer>",  # a Cyrillic letter
    lambda r: f"<answer>{LOGIC_REFERENCE.replace('a knave', 'a knаve')}</answer>",
    lambda r: f"<answer>{LOGIC_REFERENCE}\n(3) {r.choice(('Clara', 'Alice', 'Bob'))} is a knight</answer>",
    lambda r: "<answer>(1) Alice is a knight</answer>",
    lambda r: "<answer>(1) Alice is a knight\n(2) Clara is a knave</answer>",
    lambda r: "<answer>(2) Alice is a knight\n(1) Boris is a knave</answer>",
    lambda r: "<answer>Alice is a knight or a knave, Boris is a knave</answer>",
    lambda r: f"<answer>{'(1) Alice is a knight, ' * r.randrange(2, 10**4)}</answer>",
    lambda r: f"<answer>{LOGIC_REFERENCE.replace('knave', 'knave or knight')}</answer>",
    lambda r: f"<answer>{'(' * r.randrange(1, 10**5)}</answer>",
    lambda r: f"<answer>{'9' * r.choice((10**3, 10**6))}</answer>",
    lambda r: "<answer>" * r.randrange(1, 10**4),
    lambda r: f"<answer>{r.choice(CODE)}</answer>",
    lambda r: "<answer>" + "".join(r.choice("(12) Alice is a knight\n.,;") for _ in range(3000)) + "</answer>",
)

GYM: tuple[Callable[[random.Random], str], ...] = (
    lambda r: f"<answer>{r.choice(CODE)}</answer>",
    lambda r: (
        f"<answer>{r.choice(('9**9**9**9', '10**10**10', '(9**99)**99', '9^9^9^9', 'factorial(10**9)'))}</answer>"
    ),
    lambda r: f"<answer>{'[' * (n := r.randrange(1, 3000))}{']' * n}</answer>",
    lambda r: f"<answer>{'(' * (n := r.randrange(1, 3000))}1{')' * n}</answer>",
    lambda r: f"<answer>{'7' * r.choice((100, 10**4, 10**6))}</answer>",
    lambda r: "<answer>" + "".join(chr(r.randrange(1, 0x2FF)) for _ in range(r.randrange(1, 300))) + "</answer>",
    lambda r: "<answer>" + "".join(r.choice("\\{}^_$&#%~()[]'\"") for _ in range(r.randrange(1, 300))) + "</answer>",
    lambda r: (
        f"<answer>{r.choice(('x.__class__', '().__class__.__mro__', 'getattr(x, y)', 'chr(42)', '1;2'))}</answer>"
    ),
    lambda r: "<answer>" * r.randrange(1, 1000),
    lambda r: "",
)
KINDS = {"math": MATH, "logic": LOGIC, "gym": GYM}


def outputs(kind: str, count: int, seed: int = 0) -> list[str]:
    """`count` outputs for one of the verifiers, from each recipe in turn."""
    recipes = KINDS[kind]
    return [recipes[n % len(recipes)](random.Random(f"{seed}/{kind}/{n}")) for n in range(count)]
