"""`report.html`: one or several runs on one page that needs no network.

The trainer calls it at the end of a run, and so does `sortedrl report`; it reads run directories only. Guarantees: the
file contains everything it needs, and its content policy forbids the page to load anything else. `page.py` escapes all
text from runs.
"""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from plotly.offline import get_plotlyjs

from sortedrl.errors import RunDirError
from sortedrl.ledger.atomic_file import atomic_file
from sortedrl.telemetry.report.page import PageParts, asset, figure_json, glossary, page_parts
from sortedrl.telemetry.run_reader import RunReader

log = logging.getLogger(__name__)

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def write_report(
    run_dirs: Sequence[str | Path], out: str | Path, *, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Write one page about these runs to `out` and return its path.

    `progress` is called with the bytes read so far and the size of the event file.
    """
    if not run_dirs:
        raise RunDirError("a report needs at least one run directory; pass one")
    readers = [RunReader(run_dir) for run_dir in run_dirs]
    for reader in readers:
        reader.read_all(progress)
        reader.read_summary()
        for note in reader.damage_notes():
            log.warning("%s %s", reader.run_dir, note)
    out = Path(out)
    page = _page(page_parts(readers))
    try:
        with atomic_file(out) as file:
            file.write(page.encode("utf-8", "backslashreplace").decode())  # names of files may not be text
    except OSError as error:
        raise RunDirError(f"cannot write {out}: {error.strerror}; create its folder or choose another") from error
    return out


def _page(parts: PageParts) -> str:
    frame = parts.frame
    for name, caption in parts.captions.items():
        frame = re.sub(rf'(id="caption-{name}">)', lambda at, text=caption: at[1] + html.escape(text), frame)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(parts.title)} - sortedrl</title>\n<style>{asset('page.css')}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n{parts.head}\n{frame}\n{glossary()}\n</main>\n"
        f'<script type="application/json" id="figures">{figure_json(parts.figures)}</script>\n'
        f"<script>{asset('page.js')}</script>\n</body>\n</html>\n"
    )
