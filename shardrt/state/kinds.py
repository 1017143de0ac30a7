"""Which form a state dict takes: ours by name, or torch's ``StateDictType`` and its configs."""

from __future__ import annotations

from typing import Any

import attrs

from shardrt.errors import ConfigError
from shardrt.registry.nearness import did_you_mean

KINDS = ("full", "sharded", "local")
_TORCH = {"FULL_STATE_DICT": "full", "SHARDED_STATE_DICT": "sharded", "LOCAL_STATE_DICT": "local"}


@attrs.frozen(kw_only=True)
class StateKind:
    """The form of a state dict, and where it goes.

    Example:
        >>> from shardrt.state.kinds import StateKind
        >>> StateKind.read("full", rank0_only=True)
        StateKind(kind='full', rank0_only=True, offload_to_cpu=False)
    """

    kind: str = "full"
    rank0_only: bool = False
    offload_to_cpu: bool = False

    @classmethod
    def read(
        cls, kind: Any, config: Any = None, *, rank0_only: bool = False, offload_to_cpu: bool = False
    ) -> StateKind:
        """From a name or a member of torch's ``StateDictType``, and flags or one of torch's configs."""
        name = _TORCH.get(str(getattr(kind, "name", "")), kind)
        if name not in KINDS:
            listed = ", ".join(map(repr, KINDS))
            raise ConfigError(
                f"state dict type {kind!r} is unknown; there are {listed}{did_you_mean(str(kind), KINDS)}"
            )
        if config is not None:
            rank0_only |= bool(getattr(config, "rank0_only", False))
            offload_to_cpu |= bool(getattr(config, "offload_to_cpu", False))
        if rank0_only and name != "full":
            raise ConfigError(f"rank0_only is for full state dicts; a {name} one is each rank's own part")
        return cls(kind=name, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)
