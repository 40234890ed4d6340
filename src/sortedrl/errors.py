"""All errors that a user can cause or fix, under one base class.

Messages name the thing that is wrong and say what to do about it; the command line prints them as one line and exits
with the `exit_code` of the class. Broken invariants are asserts, never one of these.
"""


class SortedRLError(Exception):
    """Base of all errors raised on purpose by this package."""

    exit_code = 2


class ConfigError(SortedRLError, ValueError):
    """A configuration that is malformed or contradicts itself."""


class DataError(SortedRLError, ValueError):
    """A dataset, trace or puzzle file that cannot be used as it is."""


class ModelError(SortedRLError, ValueError):
    """A model folder or architecture that cannot be loaded."""


class HubError(SortedRLError, OSError):
    """A model hub that cannot be reached or refuses an upload."""


class RunDirError(SortedRLError, OSError):
    """A run directory that cannot be written, read or reused."""


class LedgerError(SortedRLError, OSError):
    """A ledger file that cannot be written, read or trusted."""


class DamagedLedgerError(LedgerError):
    """A ledger file whose contents were damaged; the copy in a checkpoint can replace it."""


class EngineError(SortedRLError, RuntimeError):
    """An engine that failed as a whole, not just on one sample."""


class LearnerError(SortedRLError, RuntimeError):
    """An update that failed; training stops."""


class RankLostError(LearnerError):
    """A learner process that died, hangs or failed for a reason outside of this package: starting it again may help."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}: {remedy}")
        self.what = what


class ScheduleError(SortedRLError, RuntimeError):
    """A schedule of the user's that broke a rule of the loop; nothing was changed."""


class RewardError(SortedRLError, RuntimeError):
    """A reward function that cannot be used."""


class NothingLearnedError(SortedRLError, RuntimeError):
    """A run that was stopped and saved because its first answers or updates gave nothing to learn from."""

    exit_code = 3


class WeightsNotReceived(EngineError):
    """An engine did not get the weights of a publication, but still works: sending them again may succeed."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
