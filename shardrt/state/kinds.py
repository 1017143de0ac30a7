"""Which form a state dict takes: ours by name, or torch's ``StateDictType`` and its configs."""

from __future__ import annotations

from typing import Any

import attrs

from shardrt.errors import ConfigError, UnsupportedError
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
            _check_config(name, config)
            rank0_only |= bool(getattr(config, "rank0_only", False))
            offload_to_cpu |= bool(getattr(config, "offload_to_cpu", False))
        if rank0_only and name != "full":
            raise ConfigError(f"rank0_only is for full state dicts; a {name} one is each rank's own part")
        return cls(kind=name, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)


def _check_config(kind: str, config: Any) -> None:
    """One of torch's configs for another form, or with a field that means nothing here, is a misunderstanding."""
    called = type(config).__name__
    other = next((one for one in KINDS if called.startswith(one.capitalize()) and one != kind), None)
    if other is not None:
        raise ConfigError(f"{called} is for {other} state dicts, and this one is to be {kind}; pass the config for it")
    if getattr(config, "_use_dtensor", False):
        raise UnsupportedError(
            f"{called}(_use_dtensor=True): parts here are plain tensors that say what they are parts of; leave it out, "
            "or write DTensor checkpoints with shardrt.interchange"
        )
