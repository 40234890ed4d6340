"""Draw the speed of the local engine and its competitors as bars, from results/engine.json.

    python -m benchmarks.engine.draw_engine docs/images/engine.svg

There is one panel per case, each with its own scale. The bar is the median; each dot is one round.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from benchmarks.record import load, make_parser

NAMES = {
    "sortedrl": "sortedrl, local",
    "sortedrl-float32": "the same in float32",
    "sortedrl-bfloat16": "the same in bfloat16",
    "vllm": "vLLM, CPU build",
    "hf": "transformers, generate",
    "hf-continuous": "transformers, continuous",
    "limit": "torch's products alone",
}
COLOURS = {"sortedrl": "#2171b5", "sortedrl-float32": "#6baed6", "sortedrl-bfloat16": "#6baed6", "limit": "#cccccc"}
OTHERS = "#9a8c6a"
LEFT, BAR_W, BAR_H, ROW, TITLE, WIDTH = 170, 380, 14, 22, 34, 660


def draw(cases: dict[str, dict[str, Any]]) -> str:
    parts: list[str] = []
    top = 8
    for case in cases.values():
        title = f"{case['model']}, {case['slots']} slots, {case['new_tokens']} tokens each, {case['dtype']}"
        parts.append(_text(12, top + 14, title, 'font-weight="bold"'))
        top += TITLE - 10
        measured = [result for result in case["results"] if "rounds" in result]
        most = max(max(result["rounds"]) for result in measured)
        for result in measured:
            parts += _bar(result, case["ratio"].get(result["name"]), top, BAR_W / most)
            top += ROW
        top += 12
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img" '
    style = 'font-family="sans-serif" font-size="12" fill="#222">'
    background = f'<rect width="{WIDTH}" height="{top}" fill="white"/>'
    return f"{head}{style}{background}{''.join(parts)}</svg>\n"


def _bar(result: dict[str, Any], ratio: float | None, top: float, scale: float) -> list[str]:
    name: str = result["name"]
    rate: float = result["tokens_per_s"]
    colour = COLOURS.get(name, OTHERS)
    label = f"{rate:,.0f} tokens/s" + ("" if ratio is None else f" (ours: {ratio:.3g} times)")
    end = max(rate, *result["rounds"]) * scale
    marks = [f'<circle cx="{LEFT + r * scale:.1f}" cy="{top + 7}" r="2" fill="#222"/>' for r in result["rounds"]]
    return [
        _text(LEFT - 8, top + 11, NAMES.get(name, name), 'text-anchor="end"'),
        f'<rect x="{LEFT}" y="{top}" width="{rate * scale:.1f}" height="{BAR_H}" fill="{colour}"/>',
        *marks,
        _text(LEFT + end + 8, top + 11, label),
    ]


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def main() -> None:
    parser = make_parser(__doc__, has_json=False)
    parser.add_argument("svg", type=Path)
    options = parser.parse_args()
    options.svg.write_text(draw(load("engine")["cases"]), encoding="utf-8")


if __name__ == "__main__":
    main()
