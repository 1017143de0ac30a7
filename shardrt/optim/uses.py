"""What a loop says it is going to do with an optimizer, so that a schedule that cannot is refused at once."""

from __future__ import annotations

from collections.abc import Sequence

from shardrt.errors import ConfigError, UnsupportedError
from shardrt.protocols import OverlappingSchedule, Schedule
from shardrt.registry.nearness import did_you_mean

USES = {
    "clipping": "gradients cannot be clipped by what is known only after backward",
    "scaling": "GradScaler cannot decide after backward to skip the update",
    "accumulation": "a second backward outside rt.no_sync cannot add to an update that was made",
}
"""What can be said, and why a schedule that updates inside backward cannot do it."""


def check_uses(schedule: Schedule, uses: Sequence[str], world_size: int) -> None:
    """Raise if the schedule cannot do one of these."""
    if isinstance(uses, str):
        raise ConfigError(f"uses={uses!r} is a word, not a list of words; pass uses=({uses!r},)")
    for use in uses:
        if use not in USES:
            raise ConfigError(f"unknown use {use!r}; there are: {', '.join(USES)}{did_you_mean(use, USES)}")
        if world_size > 1 and isinstance(schedule, OverlappingSchedule) and schedule.updates_early:
            raise UnsupportedError(
                f"schedule {schedule.name!r} updates parameters during backward, so {USES[use]}; use "
                "schedule='bucket' or 'priority'"
            )
