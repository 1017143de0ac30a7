"""The process group of an optimizer, as torch's attributes describe it, and the limits its user gave it."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.distributed as dist

from shardrt.errors import ConfigError


@attrs.frozen(kw_only=True)
class Place:
    """This process in its group; alone where there is none."""

    group: Any = None
    rank: int = 0
    world_size: int = 1
    global_rank: int = 0


def find_place(process_group: Any) -> Place:
    """The place in a given group, or in the default one.

    Example:
        >>> from shardrt.compat.groups import find_place
        >>> find_place(None)
        Place(group=None, rank=0, world_size=1, global_rank=0)
    """
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Place()
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group={process_group!r} is not a group this process belongs to; make the optimizer only on the "
            "ranks that torch.distributed.new_group was given"
        )
    return Place(
        group=process_group,
        rank=process_group.rank(),
        world_size=process_group.size(),
        global_rank=dist.get_rank(),
    )


def timeout_of(group: Any, device: torch.device) -> float | None:
    """The seconds that whoever made the group lets an operation take; None where the group does not tell."""
    if group is None:
        return None
    try:
        return float(group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # a backend without options, or none for this device
        return None
