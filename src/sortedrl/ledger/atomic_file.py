"""Write a file atomically: the name gets the complete file or keeps what it had.

The trainer, the report, the trace, summaries and simulations write their files through `atomic_file`. For folders see
`run/atomic_folder.py`.
Guarantees: no symbolic link is followed, because another user may have put links into a run directory. The temporary
file has a random name and is created anew, and the rename replaces a link instead of the file that it points to.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def atomic_file(path: Path) -> Iterator[TextIO]:
    """Yield a text file that replaces `path` when the block ends, and is deleted if the block raises."""
    temporary = path.parent / f".{secrets.token_hex(8)}.part"
    with temporary.open("x", encoding="utf-8") as file:  # "x" fails if the name exists, even as a dead link
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
