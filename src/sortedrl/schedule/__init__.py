"""The schedule: which cohort is loaded, which sample runs, which batch is trained. Pure functions of buffer and knobs.

knobs.py has the settings, strategies.py the names of sets of settings, decisions.py the decisions, and checked.py
checks a schedule of the user's. The package has all decisions as functions, so it is a `Schedule` itself.
"""

from sortedrl.schedule.decisions import (
    DECISIONS,
    Schedule,
    SortedSchedule,
    admission_needs_scores,
    admit,
    choose_batch,
    decide_fates,
    due_cohorts,
    interrupts_at_publication,
    is_provisional,
    lacks_only_scores,
    owed,
    wants_cohort,
)
from sortedrl.schedule.knobs import Admission, Fate, HarvestRule, Knobs, Order, RestartNoise
from sortedrl.schedule.strategies import (
    PRESETS,
    Strategy,
    check_strategy,
    defining_knobs,
    reported_name,
    resolve_knobs,
)

__all__ = [
    "DECISIONS",
    "PRESETS",
    "Admission",
    "Fate",
    "HarvestRule",
    "Knobs",
    "Order",
    "RestartNoise",
    "Schedule",
    "SortedSchedule",
    "Strategy",
    "admission_needs_scores",
    "admit",
    "check_strategy",
    "choose_batch",
    "decide_fates",
    "defining_knobs",
    "due_cohorts",
    "interrupts_at_publication",
    "is_provisional",
    "lacks_only_scores",
    "owed",
    "reported_name",
    "resolve_knobs",
    "wants_cohort",
]
