"""Where reduced gradients arrive: in memory that buckets take turns with, as long as the schedule lets them.

Note [Taking turns]: a bucket's reduced gradients are needed from the start of its reduction to its update. A schedule
that updates one bucket while the next is reduced needs memory for two of them, not for all. So buckets share two
places, in turn. Where more are needed at once (clipping looks at all) each bucket gets a place of its own, for good:
whoever clips once clips again. Where reductions begin inside backward each has its own from the beginning.

Note [Reduced in place]: where no state is shared (every rank has everything) the reduction is an all-reduce, and
arrives where it came from: ``p.grad`` is then the average over the ranks, as under DDP. What further backwards add to
it is averaged with it, which leaves the average as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardrt.optim.gradients import BucketAtWork

_PLACES = 2


class Arrivals:
    """The places of all buckets. See Note [Taking turns]."""

    def __init__(self, buckets: Sequence[BucketAtWork], *, take_turns: bool) -> None:
        self._buckets = buckets
        self._place: dict[int, tuple[object, int]] = {}
        """By bucket; empty once each has a place of its own."""
        self._holders: dict[tuple[object, int], int] = {}
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, bucket in enumerate(buckets):
            buffers = bucket.buffers
            if buffers.reduces_in_place:
                buffers.put_reduced(buffers.gradients)
            elif buffers.holds_reduced and take_turns:
                kinds.setdefault(buffers.reduced_kind, []).append(index)
            elif buffers.holds_reduced:
                self._give_own(index)
        for kind, indices in kinds.items():
            sizes = [buckets[index].buffers.run for index in indices]
            longest = [max(sizes[place::_PLACES], default=0) for place in range(_PLACES)]
            at_rest = buckets[indices[0]].buffers.at_rest
            memory = [torch.zeros(numel, dtype=kind[0], **at_rest) for numel in longest]
            for turn, index in enumerate(indices):
                place = turn % _PLACES
                self._place[index] = (kind, place)
                buckets[index].buffers.put_reduced(memory[place][: sizes[turn]])

    def take(self, index: int) -> None:
        """A bucket's reduction is about to start."""
        place = self._place.get(index)
        if place is None:
            return
        holder = self._holders.get(place)
        if holder is not None and holder != index:
            self._part()
        else:
            self._holders[place] = index

    def give_back(self, indices: Iterable[int]) -> None:
        """What was reduced of these has been used, or nobody wants it."""
        for index in indices:
            place = self._place.get(index)
            if place is not None and self._holders.get(place) == index:
                del self._holders[place]

    def _part(self) -> None:
        held = set(self._holders.values())
        for index in self._place:
            bucket = self._buckets[index]
            before = bucket.buffers.reduced
            if index in held and bucket.reduction is not None:
                bucket.reduction.wait()
            self._give_own(index)
            assert before is not None and bucket.buffers.reduced is not None
            if index in held:
                bucket.buffers.reduced.copy_(before)
            for _, owned in bucket.owned:
                attached = owned.stepped.grad is owned.gradient
                owned.gradient = bucket.buffers.reduced_gradient_of_shard(owned.slot, owned.shard)
                if attached:
                    owned.stepped.grad = owned.gradient
        self._place.clear()
        self._holders.clear()

    def _give_own(self, index: int) -> None:
        buffers = self._buckets[index].buffers
        buffers.put_reduced(torch.zeros(buffers.run, dtype=buffers.reduced_kind[0], **buffers.at_rest))
