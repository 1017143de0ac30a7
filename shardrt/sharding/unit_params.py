"""The whole parameters of one unit: away, on their way, or here.

Note [Parameters that are away]: the memory of a parameter that is away is not there, and reading it would read nothing.
So, as for parameters under way (see Note [Unfinished parameters]), its class is one that hears of every read. Inside
the forward of the sharded module a read gathers the unit: a layer may use another layer's weight. Anywhere else a read
is an error that says how to get at the values: a gather that only one rank asks for would wait for the others.

Note [Gathers are told apart]: a gather does not know what is gathered. If one rank asks for one unit and another for
another of the same size, each would get half of both, and compute on. So every gather goes along with the number of the
unit, two bytes from each rank, and numbers that differ are an error on all of them.

Note [Kept nearby]: between forward and backward a unit need not go as far away as between steps. With
``reshard_after_forward`` as a number of ranks each of that many neighbours keeps its part of the gathered parameters,
and backward gathers among these few.

Note [Gathered without a copy]: where ranks share memory, whole parameters are a view of all ranks' shards (see Note
[Shown where they are]), and a gather is nothing but the numbers above: once all ranks have told theirs, all shards have
the values that count. In exchange no rank may update its shards while another still reads them: see Note [Read and
write]. Where inputs are uneven ranks step at other times than others compute: there all copy into the view, which from
then on is memory of their own, until it is put away.

Note [Lent parameters]: whoever reads a parameter outside its unit's forward may need it again in backward, where no
hook tells when. So a unit that was gathered for such a reader stays until backward has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from shardrt.comm.pieces import piece_mover
from shardrt.errors import CommunicationError, HandshakeError, StateError
from shardrt.optim.buffers import BucketBuffers
from shardrt.optim.readers import KeptByModule, is_watched, let_read, watch_reads
from shardrt.protocols import Communicator, Work

Reader = Literal["around", "elsewhere", "outside"]
"""Who reads what is away: a module around it, see Note [Parts that follow]; another one; or nobody in the module."""


class UnitParams(KeptByModule):
    """See Note [Parameters that are away]."""

    def __init__(
        self,
        names: Sequence[str],
        number: int,
        buffers: Sequence[BucketBuffers],
        communicator: Communicator,
        *,
        on_read: Callable[[int], Reader],
        on_gather: Callable[[int], None],
        copies: Callable[[], bool] = lambda: False,
        nearby: Communicator | None = None,
    ) -> None:
        """``names`` are those of all units, of which this is the one with the ``number``.

        ``on_read`` is asked when somebody reads a parameter that is away: where that one is. ``on_gather`` is
        told of each gather right before it. ``copies``: see Note [Gathered without a copy]. ``nearby`` are the ranks
        among which it stays between forward and backward.
        """
        self._names = [name or "root" for name in names]
        self.name = self._names[number]
        self._number = number
        self.nbytes = sum(one.bucket.nbytes for one in buffers)
        """Of the whole parameters."""
        self._buffers = buffers
        self._communicator = communicator
        self._mover = piece_mover(communicator)
        self._nearby = nearby
        self._near: list[torch.Tensor] | None = None
        self._copies = copies
        self._is_copied = False
        """Whether what is here, or on its way, is a copy."""
        self._is_current = False
        """Whether views show what they did in the forward that a backward is yet to come for."""
        self._on_read = on_read
        self._on_gather = on_gather
        self._tensors = [slot.param.tensor for one in buffers for slot in one.slots]
        self._works: list[Work] | None = None
        # Made here and not when it is used: inside torch.inference_mode it could be written to only there.
        ranks = max(communicator.world_size, 1 if nearby is None else nearby.world_size)
        device = buffers[0].params.device if buffers else None
        self._numbers = torch.zeros(2 * ranks, dtype=torch.int8, device=device)
        self._told = self._numbers[:0]
        self.is_here = not any(is_watched(tensor) for tensor in self._tensors)
        """They can be computed with."""
        if not self.is_here:  # they were put away before the buckets were laid out anew
            with torch._C.DisableTorchFunctionSubclass():
                for one in buffers:
                    one.give_back_params()
            watch_reads(self._tensors, self)
        self.is_lent = False

    @property
    def is_coming(self) -> bool:
        """A gather is under way."""
        return self._works is not None

    def start(self) -> None:
        """Begin to gather, unless they are here or on their way."""
        if self.is_here or self._works is not None:
            return
        if self._buffers:
            self._on_gather(self._number)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            near, self._near = self._near, None
            if near is not None and self._nearby is not None:
                self._works = [self._tell_number(self._nearby)]
                self._works += [
                    _gather_nearby(one, kept, self._nearby) for one, kept in zip(self._buffers, near, strict=True)
                ]
                return
            self._is_copied = self._copies()
            self._works = [self._tell_number(self._communicator)] if self._buffers else []
            self._works += [self._gather(one) for one in self._buffers if not self._look(one)]
            self._is_current = True

    def _look(self, one: BucketBuffers) -> bool:
        """Whether a bucket is there as soon as all ranks have told the number. See Note [Gathered without a copy]."""
        if one.view is None or self._is_copied:
            return False
        one.obtain_params()  # of what is staged
        if not self._is_current or torch._C._current_graph_task_id() == -1:
            one.view.renew()  # not for a backward: nothing has changed since its forward
        return True

    def _gather(self, one: BucketBuffers) -> Work:
        one.obtain_params()
        if one.sends_shard:
            return self._mover.all_gather_from(one.shard, torch.split(one.params, list(one.bucket.splits)))
        one.load_own_run()
        return self._communicator.all_gather(one.params, one.bucket.splits)

    def bring(self) -> None:
        """Wait until they are here."""
        if self.is_here:
            return
        self.start()
        works, self._works = self._works, None
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._wait(works or [])
            for one in self._buffers:
                if one.view is not None and not self._is_copied:
                    one.view.complete()
                one.store_staged()
        let_read(self._tensors)
        self.is_here = True

    def _tell_number(self, communicator: Communicator) -> Work:
        """See Note [Gathers are told apart]."""
        low, high = self._number % 128, self._number // 128 % 128
        here = 2 * communicator.rank
        self._told = self._numbers[: 2 * communicator.world_size].zero_()
        self._told[here : here + 2] = torch.tensor([low, high], dtype=torch.int8)
        # Zeros and each rank's own: the largest are a gather that, being small, nothing has to wait behind.
        return communicator.all_reduce(self._told, op="max")

    def _wait(self, works: Sequence[Work]) -> None:
        try:
            for index, work in enumerate(works):
                work.wait()
                if index == 0:
                    self._check_number()
        except CommunicationError as error:
            raise CommunicationError(f"gathering the parameters of unit {self.name!r}: {error}") from error

    def _check_number(self) -> None:
        numbers = [low + 128 * high for low, high in self._told.view(-1, 2).tolist()]
        for other, number in enumerate(numbers):
            if number != self._number:
                raise HandshakeError(
                    f"ranks run different units: rank {self._communicator.rank} gathers {self.name!r} while rank "
                    f"{other} gathers {self._names[number]!r}; where parameters are sharded all ranks must run the "
                    "same units in the same order: call the unit on every rank (with a weight of zero where its result "
                    "is not wanted), leave what only some ranks run out of units= (and units undivided), or use "
                    "strategy='shard_grad_op'"
                )

    def put_away(self, *, lent_too: bool = False, for_backward: bool = False) -> None:
        """Give their memory back; what is on its way arrives first. See Note [Lent parameters].

        ``for_backward``: they are needed again before they change. See Note [Kept nearby].
        """
        if self.is_lent and not lent_too:
            return
        self.is_lent = False
        if self._works is not None:
            self.bring()
        if not for_backward:
            self._near = None
            self._is_current = False
        if not self.is_here:
            return
        if for_backward and self._nearby is not None:
            with torch._C.DisableTorchFunctionSubclass():
                self._near = [_near_part(one.params, self._nearby).clone() for one in self._buffers]
        with torch._C.DisableTorchFunctionSubclass():
            for one in self._buffers:
                one.give_back_params()
                if one.view is not None and self._is_copied:
                    one.view.renew()
        self.is_here = False
        watch_reads(self._tensors, self)

    def read(self) -> None:
        """Somebody reads a parameter that is away."""
        reader = self._on_read(self._number)
        if reader == "outside":
            raise StateError(
                f"parameters of unit {self.name!r} are sharded: outside the module's forward and backward no "
                "rank has them whole; read them inside rt.summon_full_params(module), or take rt.full_state_dict(...)"
            )
        self.bring()
        self.is_lent = self.is_lent or reader == "elsewhere"


def _near_splits(numel: int, ranks: int) -> list[int]:
    share, left = divmod(numel, ranks)
    return [share + (rank < left) for rank in range(ranks)]


def _near_part(whole: torch.Tensor, nearby: Communicator) -> torch.Tensor:
    return torch.split(whole, _near_splits(whole.numel(), nearby.world_size))[nearby.rank]


def _gather_nearby(one: BucketBuffers, kept: torch.Tensor, nearby: Communicator) -> Work:
    one.obtain_params()
    _near_part(one.params, nearby).copy_(kept)
    return nearby.all_gather(one.params, _near_splits(one.params.numel(), nearby.world_size))
