"""`python -m sortedrl`: the command line, where the script of that name is not on the path."""

from __future__ import annotations

from sortedrl.cli import main

if __name__ == "__main__":
    main()
