"""Whom an optimizer's ranks talk to, and over what."""

from __future__ import annotations

import attrs

from shardrt.optim.mesh import Mesh
from shardrt.protocols import Communicator


@attrs.frozen(kw_only=True, eq=False)
class Wires:
    """The communicators of one optimizer."""

    shared: Communicator
    """Among the ranks that divide the state."""
    gathers: Communicator | None = None
    """The same ranks, for gathers that are issued beside reductions."""
    replicas: Communicator | None = None
    """Among the ranks that have the same shards; None where all ranks share."""
    everybody: Communicator = attrs.field()
    mesh: Mesh | None = None

    @everybody.default
    def _all_share(self) -> Communicator:
        return self.shared
