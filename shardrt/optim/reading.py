"""In which order the forward pass reads buckets, learned from the reads themselves and agreed between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardrt.protocols import Communicator


class ReadingOrder:
    """Starts from the reverse of the order in which backward fills the buckets.

    What ranks see may differ, and gathers must be issued in one order: now and then, after 1, 2, 4, 8 ... steps, all
    take what rank 0 has seen last.
    """

    def __init__(self, buckets: int) -> None:
        self._order: Sequence[int] = range(buckets)[::-1]
        self._seen: dict[int, None] = {}
        self._steps = 0

    def read(self, bucket: int) -> None:
        """Somebody has read a parameter of a bucket."""
        self._seen.setdefault(bucket)

    def agreed(self, communicator: Communicator, device: torch.device) -> Sequence[int]:
        """The order for this step."""
        steps, self._steps = self._steps, self._steps + 1
        if steps and steps & (steps - 1) == 0:
            mine = torch.tensor(self._order_seen(), dtype=torch.float32, device=device)
            communicator.broadcast(mine, source=0).wait()
            self._order = [int(bucket) for bucket in mine.tolist()]
        self._seen.clear()
        return self._order

    def _order_seen(self) -> list[int]:
        """What was read, as it was read; then, as before, what was not."""
        return [*self._seen, *(bucket for bucket in self._order if bucket not in self._seen)]
