"""A sharded module's own ``state_dict`` and ``load_state_dict``: what code that knows nothing of sharding calls.

No rank can read the whole parameters out of the module itself, so both are the runtime's, for this one module. Every
rank must call them, as with everything that brings parameters together.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from shardrt.errors import UnsupportedError
from shardrt.state.fitting import incompatible_keys

if TYPE_CHECKING:
    from shardrt.runtime import Runtime


def answer_by_runtime(module: torch.nn.Module, runtime: Runtime) -> None:
    """Let the module's own calls give and take whole state, or the form that ``rt.state_dict_type`` has set."""
    reference = weakref.ref(runtime)
    sharded = weakref.ref(module)
    plain, plain_load = type(module).state_dict, type(module).load_state_dict

    def state_dict(*args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        alive, owner = sharded(), reference()
        assert alive is not None
        if (
            keep_vars or owner is None
        ):  # keep_vars: whoever asks wants the parameters themselves, with or without values
            return plain(alive, *args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        made = {prefix + name: value for name, value in owner.state_dict(alive).items()}
        if destination is None:
            return made
        destination.update(made)
        return destination

    def load_state_dict(state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        alive, owner = sharded(), reference()
        assert alive is not None
        if owner is None:
            return plain_load(alive, state_dict, strict=strict, assign=assign)
        if assign:
            raise UnsupportedError("load_state_dict(assign=True): values are copied into shards here; leave assign out")
        owner.load_state_dict(alive, state_dict, strict=strict)
        return incompatible_keys(alive, state_dict)

    vars(module).update(state_dict=state_dict, load_state_dict=load_state_dict)
