"""Buffers that are not in one place: gradients where autograd left them, and this rank's run where it is kept.

Note [In pieces]: a gradient that is copied into a bucket's buffer, to be sent from there, is written and read once more
than it need be, and for a while exists twice. So a communicator may take a buffer in pieces (see
:class:`shardrt.protocols.PieceCommunicator`) and send each from where it is. For those that do not, the pieces are laid
side by side here, in memory that goes with the operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shardrt.comm.checks import check_gather
from shardrt.comm.works import FollowedWork
from shardrt.protocols import PieceCommunicator

if TYPE_CHECKING:
    from torch import Tensor

    from shardrt.protocols import Communicator, PieceMover, Work


def piece_mover(communicator: Communicator) -> PieceMover:
    """The communicator itself where it takes pieces, else one that lays them side by side for it.

    Example:
        >>> import torch
        >>> from shardrt import Group, load_registry
        >>> from shardrt.comm.control import LocalControl
        >>> from shardrt.comm.pieces import piece_mover
        >>> alone = Group(rank=0, world_size=1, device_type="cpu", timeout=30.0, control=LocalControl())
        >>> mover = piece_mover(load_registry().backends.get("cpu", "null").factory(alone))
        >>> reduced = torch.zeros(3)
        >>> mover.reduce_scatter_pieces([torch.ones(2), torch.full((1,), 5.0)], [3], output=reduced).wait()
        >>> reduced
        tensor([1., 1., 5.])
    """
    return communicator if isinstance(communicator, PieceCommunicator) else SideBySide(communicator)


class SideBySide:
    """Pieces for a communicator that takes whole buffers. See Note [In pieces]."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def reduce_scatter_pieces(
        self, pieces: Sequence[Tensor], splits: Sequence[int], *, output: Tensor, average: bool = False
    ) -> Work:
        """See :class:`shardrt.protocols.PieceCommunicator`."""
        buffer = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
        work = self._communicator.reduce_scatter(buffer, splits, output=output, average=average)
        # Devices with streams may read it after this call has returned: it stays until somebody has waited.
        return FollowedWork([work], then=lambda: _let_go(buffer))

    def all_gather_from(self, own: Tensor, runs: Sequence[Tensor]) -> Work:
        """See :class:`shardrt.protocols.PieceCommunicator`."""
        rank, splits = self._communicator.rank, [run.numel() for run in runs]
        check_gather("all_gather", own, runs, self._communicator.world_size, rank)
        if own.data_ptr() != runs[rank].data_ptr():
            runs[rank].copy_(own)
        together = as_one(runs)
        if together is not None:
            return self._communicator.all_gather(together, splits)
        buffer = own.new_empty(sum(splits))
        apart = torch.split(buffer, splits)
        apart[rank].copy_(own)

        def spread() -> None:
            for owner, run in enumerate(runs):
                if owner != rank:
                    run.copy_(apart[owner])

        return FollowedWork([self._communicator.all_gather(buffer, splits)], then=spread)


def as_one(runs: Sequence[Tensor]) -> Tensor | None:
    """Flat tensors that lie one behind the other in one memory, as one; None where they do not.

    Example:
        >>> import torch
        >>> from shardrt.comm.pieces import as_one
        >>> whole = torch.arange(3)
        >>> as_one([whole[:1], whole[1:]]), as_one([whole[1:], whole[:1]])
        (tensor([0, 1, 2]), None)
    """
    filled = [run for run in runs if run.numel()]
    if not filled:
        return runs[0]
    memory, end = filled[0].untyped_storage().data_ptr(), filled[0].storage_offset()
    for run in filled:
        if (run.untyped_storage().data_ptr(), run.storage_offset()) != (memory, end):
            return None
        end += run.numel()
    return filled[0].as_strided((end - filled[0].storage_offset(),), (1,))


def _let_go(buffer: Tensor) -> None:
    del buffer
