"""How the gradients of a bucket are started on their way to their owners, and what is done when they have come."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import attrs
import torch

from shardrt.comm.pieces import piece_mover
from shardrt.comm.works import FinishedWork, FollowedWork
from shardrt.optim.attendance import Attendance
from shardrt.optim.gradients import BucketAtWork, bring_nothing, collect_gradients, take_pieces
from shardrt.optim.hooked import HookResults
from shardrt.optim.settings import MARKS, Settings
from shardrt.protocols import Communicator, PieceMover, Work


@attrs.define(kw_only=True, eq=False)
class Reductions:
    """Starts them, for one optimizer."""

    communicator: Communicator
    """Among the ranks that divide the state."""
    replicas: Communicator | None
    """Among those that have the same shards; None where all ranks share."""
    everybody: Communicator
    gradients: str
    """Whether they are averaged, summed, or ``reduced`` already."""
    adopts: bool
    stay: bool
    """Whether the whole gradients of this rank do."""
    in_pieces: bool
    """Whether they are sent from where autograd left them, and not from the bucket's buffer."""
    attendance: Attendance
    settings: Settings | None
    hooked: HookResults | None
    skipped: Collection[torch.Tensor] = ()
    """Parameters that count as having no gradient."""
    _pieces: PieceMover = attrs.field(init=False)

    @_pieces.default
    def _takes_pieces(self) -> PieceMover:
        return piece_mover(self.communicator)

    def start(self, at_work: BucketAtWork) -> Work:
        """Start reducing a bucket."""
        buffers = at_work.buffers
        if self.gradients == "reduced":
            if self.settings is None:
                return FinishedWork()
            return self._tell_present(at_work, [0] * len(buffers.slots))
        if self.hooked is not None:
            told = self._tell_present(at_work, [int(slot.param.tensor.grad is not None) for slot in buffers.slots])
            return FollowedWork([told], then=partial(_take_hooked, at_work, self.hooked))
        average, divisor = self.gradients == "average", self.attendance.divisor
        by_all = divisor is None or divisor == self.everybody.world_size
        by = None if by_all or not average else divisor
        if self.in_pieces:
            return self._from_pieces(at_work, average=average and by_all, divisor=by)
        assert buffers.gradients is not None and buffers.reduced is not None
        # Small and first: where a backend lets it, it travels beside the reduction.
        absent = self.attendance.absent
        told = self._tell_present(
            at_work, bring_nothing(buffers) if absent else collect_gradients(buffers, self.adopts, self.skipped)
        )
        source, output = buffers.gradients, buffers.reduced
        if source.dtype != buffers.reduce_dtype:
            source = source.to(buffers.reduce_dtype)
        if (output.dtype, output.device) != (source.dtype, source.device):
            output = torch.empty_like(output, dtype=source.dtype, device=source.device)
        reducing = self.communicator.reduce_scatter(
            source, buffers.bucket.splits, output=output, average=average and by_all
        )
        if by is None and output is buffers.reduced and self.replicas is None:
            return FollowedWork([reducing, told])
        return self._followed([reducing, told], at_work, output, by)

    def _from_pieces(self, at_work: BucketAtWork, *, average: bool, divisor: int | None) -> Work:
        """They are sent from where autograd left them."""
        buffers = at_work.buffers
        pieces, present = take_pieces(buffers, self.attendance.absent, self.skipped, stay=self.stay)
        told = self._tell_present(at_work, present)
        output = buffers.reduced
        assert output is not None
        kind = (buffers.reduce_dtype, buffers.params.device)
        # What was reduced before is the only trace of those gradients.
        if (output.dtype, output.device) != kind or at_work.accumulated is not None:
            output = torch.empty(output.numel(), dtype=kind[0], device=kind[1])
        reducing = self._pieces.reduce_scatter_pieces(pieces, buffers.bucket.splits, output=output, average=average)
        return self._followed([reducing, told], at_work, output, divisor)

    def _followed(
        self, works: Sequence[Work], at_work: BucketAtWork, output: torch.Tensor, divisor: int | None
    ) -> Work:
        then = partial(self._arrived, at_work, output, divisor)
        return FollowedWork(works, then=then, talks=self.replicas is not None)

    def _arrived(self, at_work: BucketAtWork, output: torch.Tensor, divisor: int | None) -> None:
        buffers = at_work.buffers
        assert buffers.reduced is not None
        if self.replicas is not None:
            self.replicas.all_reduce(output, average=self.gradients == "average" and divisor is None).wait()
        if divisor is not None:
            output.div_(divisor)
        if output is not buffers.reduced and at_work.accumulated is None:
            buffers.reduced.copy_(output)
        if output is buffers.gradients:
            at_work.note_gradients()  # they are the average now
        if self.stay:
            return
        if at_work.accumulated is not None:
            buffers.reduced.add_(output.to(buffers.reduced.device))
            present = at_work.present[:-MARKS]
            torch.maximum(present, at_work.accumulated, out=present)
        at_work.accumulated = at_work.present[:-MARKS].clone()

    def _tell_present(self, at_work: BucketAtWork, present: Sequence[int]) -> Work:
        marks = [0] * MARKS if self.settings is None else self.settings.marks()
        at_work.present.copy_(torch.tensor([*present, *marks], dtype=torch.int8))
        return self.everybody.all_reduce(at_work.present, op="max")


def _take_hooked(at_work: BucketAtWork, hooked: HookResults) -> None:
    shards = [(owned, owned.slot.param.tensor) for _, owned in at_work.owned if owned.slot is not None]
    for (owned, tensor), whole in zip(shards, hooked.wait_for([t for _, t in shards]), strict=True):
        assert owned.gradient is not None
        if owned.shard.numel == tensor.numel():
            owned.gradient.copy_(whole)
        else:
            owned.gradient.copy_(whole.reshape(-1)[owned.shard.start : owned.shard.stop])
