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

    def all_gather_from(self, own: Tensor, buffer: Tensor, splits: Sequence[int]) -> Work:
        """See :class:`shardrt.protocols.PieceCommunicator`."""
        rank = self._communicator.rank
        start = sum(splits[:rank])
        buffer[start : start + splits[rank]].copy_(own)
        return self._communicator.all_gather(buffer, splits)


def _let_go(buffer: Tensor) -> None:
    del buffer
