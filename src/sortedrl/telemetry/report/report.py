"""`report.html`: one or several runs on one page that needs no network.

Called at the end of a run and by the command line; reads run directories only. What it keeps true: the file holds all
it needs, and the page forbids itself to load anything; text from runs reaches it escaped, by way of `page.py`.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from plotly.offline import get_plotlyjs

from sortedrl.errors import RunDirError
from sortedrl.telemetry.report.page import Parts, asset, figure_json, page_parts, words
from sortedrl.telemetry.run_reader import RunReader

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def write_report(
    run_dirs: Sequence[str | Path], out: str | Path, *, tell: Callable[[int, int], None] | None = None
) -> Path:
    """Write one page about these runs to `out`, and return its path. `tell` hears of bytes read, and of all."""
    if not run_dirs:
        raise RunDirError("a report needs at least one run directory; name one")
    readers = [RunReader(run_dir) for run_dir in run_dirs]
    for reader in readers:
        reader.read_all(tell)
        reader.read_summary()
    out = Path(out)
    aside = out.with_name(out.name + ".part")
    try:
        aside.write_text(_page(page_parts(readers)), encoding="utf-8")
        os.replace(aside, out)
    except OSError as error:
        raise RunDirError(f"cannot write {out}: {error.strerror}; create its folder or choose another") from error
    return out


def _page(parts: Parts) -> str:
    frame = parts.frame
    for name, caption in parts.captions.items():
        frame = re.sub(rf'(id="caption-{name}">)', lambda at, text=caption: at[1] + html.escape(text), frame)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(parts.title)} - sortedrl</title>\n<style>{asset('page.css')}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n{parts.head}\n{frame}\n{words()}\n</main>\n"
        f'<script type="application/json" id="figures">{figure_json(parts.figures)}</script>\n'
        f"<script>{asset('page.js')}</script>\n</body>\n</html>\n"
    )
