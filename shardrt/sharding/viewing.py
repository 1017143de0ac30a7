"""Whole parameters as views of all ranks' shards, where ranks share memory.

Note [Read and write]: while a rank computes with a view of its peers' shards, they must not update these. A rank's
gradients do not tell that it is done: a layer may read a parameter for which it computes none. So in every step, when
all gradients have been reduced and before anything is updated, all ranks meet. Whoever comes there has left its forward
and backward. Ranks wait for each other's gradients just before, so there is little to wait for. Everything else that
writes to shards begins with an agreement of all ranks, or with a gather: loading, writing to summoned parameters, new
buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardrt.comm.waiting import start_and_wait
from shardrt.optim.buffers import BucketBuffers
from shardrt.optim.engine import BucketEngine
from shardrt.protocols import Communicator, RunViewer


def show_where_they_are(buffers: Sequence[BucketBuffers], communicator: Communicator) -> None:
    """Let whole parameters that are away be views of all ranks' shards, where there can be such."""
    fitting = [one for one in buffers if not one.residence.params and one.sends_shard]
    if not fitting or not isinstance(communicator, RunViewer):
        return
    views = communicator.view_runs([(one.shard, one.bucket.splits) for one in fitting])
    for one, view in zip(fitting, views, strict=True):
        if view is not None:
            one.look_through(view)


def meet_before_update(engine: BucketEngine) -> None:
    """Return when no rank reads the shards of another any more. See Note [Read and write]; every rank calls it."""
    if any(one.view is not None for one in engine.every_buffers()):
        # First: who is still in backward may be waiting for them.
        start_and_wait(engine.reduce, range(engine.bucket_count))
        engine.gathers_with.barrier()
