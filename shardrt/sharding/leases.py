"""Who still reads the shards of others, where whole parameters are a view of them.

Note [Read and write]: while a rank computes with a view of its peers' shards, they must not update these. A rank's
gradients do not tell that it is done: a layer may read a parameter for which it computes none. So when nothing of the
module computes any more (at the end of backward, and of a forward without one) all ranks meet, and only then go on to
whatever may write: their step, or that of an optimizer which knows nothing of all this. The same before a step, if a
forward was left without its backward. Ranks have just gathered and reduced in step with one another, so there is little
to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardrt.optim.buffers import BucketBuffers
from shardrt.protocols import Communicator, RunViewer


class Leases:
    """See Note [Read and write]."""

    def __init__(self, communicator: Communicator, *, can_tell: Callable[[], bool]) -> None:
        """``can_tell``: whether all ranks would meet."""
        self._communicator = communicator
        self.can_tell = can_tell
        self._is_taken = False

    def take(self) -> None:
        """Something of other ranks is about to be read."""
        self._is_taken = True

    def end(self) -> None:
        """Nothing of other ranks is read here any more; returns when nobody reads anything."""
        if self._is_taken and self.can_tell():
            self._is_taken = False
            self._communicator.barrier()


def show_where_they_are(buffers: Sequence[BucketBuffers], communicator: Communicator) -> None:
    """Let whole parameters that are away be views of all ranks' shards, where there can be such."""
    fitting = [one for one in buffers if not one.residence.params and one.sends_shard]
    if not isinstance(communicator, RunViewer):
        return
    views = communicator.view_runs([(one.shard, one.bucket.splits) for one in fitting])
    for one, view in zip(fitting, views, strict=True):
        if view is not None:
            one.look_through(view)
