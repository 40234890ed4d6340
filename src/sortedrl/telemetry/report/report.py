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
from typing import Any

from plotly.offline import get_plotlyjs

from sortedrl.errors import RunDirError
from sortedrl.ledger.atomic_file import atomic_file
from sortedrl.telemetry.report.completions import embedded_completions
from sortedrl.telemetry.report.page import SCRIPTS, PageParts, asset, glossary, page_parts, script_json
from sortedrl.telemetry.report.sample_page import Decode
from sortedrl.telemetry.run_reader import RunReader

log = logging.getLogger(__name__)

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
    "base-uri 'none'; form-action 'none'"
)


def write_report(
    run_dirs: Sequence[str | Path],
    out: str | Path,
    *,
    progress: Callable[[int, int], None] | None = None,
    find_decode: Callable[[Path], Decode | None] | None = None,
) -> Path:
    """Write one page about these runs to `out` and return its path.

    `progress` is called with the bytes read so far and the size of the event file. `find_decode` returns the function
    that decodes a run's tokens, or None if it has no tokenizer; without one, answers are token numbers.
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
    parts = page_parts(readers)
    listed = [(reader.view.name, reader.run_dir, reader.num_updates_done) for reader in readers]
    page = _page(parts, embedded_completions(listed, find_decode))
    try:
        with atomic_file(out) as file:
            file.write(page.encode("utf-8", "backslashreplace").decode())  # names of files may not be text
    except OSError as error:
        raise RunDirError(f"cannot write {out}: {error.strerror}; create its folder or choose another") from error
    return out


def _page(parts: PageParts, completions: list[dict[str, Any]]) -> str:
    frame = parts.frame
    for name, caption in parts.captions.items():
        frame = re.sub(rf'(id="caption-{name}">)', lambda at, text=caption: at[1] + html.escape(text), frame)
    scripts = "\n".join(f"<script>{asset(name)}</script>" for name in SCRIPTS)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(parts.title)} - sortedrl</title>\n<style>{asset('page.css')}</style>\n"
        f"<script>{asset('theme.js')}</script>\n<script>{get_plotlyjs()}</script>\n</head>\n<body>\n"
        f'<nav class="bar"><strong>sortedrl</strong><span>{html.escape(parts.title)}</span></nav>\n'
        f'<main data-smoothing="{parts.smoothing}">\n{parts.head}\n{frame}\n{glossary()}\n</main>\n'
        f'<script type="application/json" id="figures">{script_json(parts.figures)}</script>\n'
        f'<script type="application/json" id="embedded">{script_json(completions)}</script>\n'
        f"{scripts}\n</body>\n</html>\n"
    )
