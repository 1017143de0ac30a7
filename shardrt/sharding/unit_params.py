"""The whole parameters of one unit: away, on their way, or here.

Note [Parameters that are away]: the memory of a parameter that is away is not there, and reading it would read nothing.
So, as for parameters under way (see Note [Unfinished parameters]), its class is one that hears of every read. Inside
the forward of the sharded module a read gathers the unit: a layer may use another layer's weight. Anywhere else a read
is an error that says how to get at the values: a gather that only one rank asks for would wait for the others.

Note [Lent parameters]: whoever reads a parameter outside its unit's forward may need it again in backward, where no
hook tells when. So a unit that was gathered for such a reader stays until backward has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardrt.errors import StateError
from shardrt.optim.buffers import BucketBuffers
from shardrt.optim.readers import KeptByModule, is_watched, let_read, watch_reads
from shardrt.protocols import Communicator, Work


class UnitParams(KeptByModule):
    """See Note [Parameters that are away]."""

    def __init__(
        self, name: str, buffers: Sequence[BucketBuffers], communicator: Communicator, on_read: Callable[[], bool]
    ) -> None:
        """``on_read`` is asked when somebody reads a parameter that is away: whether it may be gathered."""
        self.name = name
        self.nbytes = sum(one.bucket.nbytes for one in buffers)
        """Of the whole parameters."""
        self._buffers = buffers
        self._communicator = communicator
        self._on_read = on_read
        self._tensors = [slot.param.tensor for one in buffers for slot in one.slots]
        self._works: list[Work] | None = None
        self.is_here = not any(is_watched(tensor) for tensor in self._tensors)
        """They can be computed with."""
        if not self.is_here:  # they were put away before the buckets were laid out anew
            with torch._C.DisableTorchFunctionSubclass():
                for one in buffers:
                    one.give_back_params()
            watch_reads(self._tensors, self)
        self._is_lent = False

    @property
    def is_coming(self) -> bool:
        """A gather is under way."""
        return self._works is not None

    def start(self) -> None:
        """Begin to gather, unless they are here or on their way."""
        if self.is_here or self._works is not None:
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._works = []
            for one in self._buffers:
                one.obtain_params()
                self._works.append(self._communicator.all_gather(one.params, one.bucket.splits))

    def bring(self) -> None:
        """Wait until they are here."""
        if self.is_here:
            return
        self.start()
        works, self._works = self._works, None
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for work in works or ():
                work.wait()
            for one in self._buffers:
                one.store_staged()
        let_read(self._tensors)
        self.is_here = True

    def put_away(self, *, lent_too: bool = False) -> None:
        """Give their memory back; what is on its way arrives first. See Note [Lent parameters]."""
        if self._is_lent and not lent_too:
            return
        self._is_lent = False
        if self._works is not None:
            self.bring()
        if not self.is_here:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for one in self._buffers:
                one.give_back_params()
        self.is_here = False
        watch_reads(self._tensors, self)

    def read(self) -> None:
        """Somebody reads a parameter that is away."""
        if not self._on_read():
            raise StateError(
                f"parameters of unit {self.name or 'root'!r} are sharded: outside the module's forward and backward no "
                "rank has them whole; read them inside rt.summon_full_params(module), or take rt.full_state_dict(...)"
            )
        self.bring()
        self._is_lent = True
