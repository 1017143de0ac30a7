"""Communication: what backends declare, and what the core builds on top.

Importing this package is cheap: what needs torch is loaded when it is first asked for, so that a plugin can declare
its capabilities without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardrt.comm.availability import choose_backend, require_available
from shardrt.comm.capabilities import Capabilities, OpSupport
from shardrt.comm.negotiate import negotiate
from shardrt.comm.traffic import Traffic

if TYPE_CHECKING:
    from shardrt.comm.collective import CollectiveCommunicator
    from shardrt.comm.negotiated import Negotiated

__all__ = [
    "Capabilities",
    "CollectiveCommunicator",
    "Negotiated",
    "OpSupport",
    "Traffic",
    "choose_backend",
    "negotiate",
    "require_available",
]

_NEED_TORCH = {
    "CollectiveCommunicator": "shardrt.comm.collective",
    "Negotiated": "shardrt.comm.negotiated",
}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module 'shardrt.comm' has no attribute {name!r}")
