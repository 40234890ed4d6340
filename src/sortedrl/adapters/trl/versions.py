"""The versions of TRL that the adapters know. `__init__.py` checks them before it imports the rest."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from sortedrl.errors import ConfigError

TESTED = ((1, 16),)
"""Minor releases that tests/adapters run with."""


def check_version() -> None:
    """Raise a ConfigError if TRL is missing or of a release whose hooks are not known to fit."""
    shown = " or ".join(f"{major}.{minor}" for major, minor in TESTED)
    try:
        found = version("trl")
    except PackageNotFoundError:
        raise ConfigError(f"sortedrl.adapters.trl needs TRL {shown}: pip install 'sortedrl[trl]'") from None
    parts = found.split(".")
    number = (int(parts[0]), int(parts[1])) if parts[0].isdigit() and parts[1:] and parts[1].isdigit() else (0, 0)
    if number not in TESTED:
        raise ConfigError(
            f"TRL {found} is installed, and sortedrl.adapters.trl is tested with {shown}, whose hooks for rollouts may "
            f"differ: pip install 'trl=={TESTED[-1][0]}.{TESTED[-1][1]}.*'"
        )
