"""torch's ``Join`` context around our ZeroRedundancyOptimizer.

Note [Gradients for those who have run out]: in that context DDP reduces gradients for ranks that have inputs. A rank
that has run out owns parameters all the same, and its ``p.grad`` is an old one. So inside it the gradients of the first
rank that has inputs are sent to the owners, along with the group options where they differ.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook

from shardrt.joining.rollcall import RollCall
from shardrt.joining.settings import describe_settings, take_over_settings
from shardrt.optim.sharded import ShardedOptimizer
from shardrt.runtime import Runtime


class UnevenSteps(JoinHook):
    """Steps of a sharded optimizer in torch's ``Join``, on ranks with inputs and without."""

    def __init__(
        self, optimizer: ShardedOptimizer, runtime: Runtime, *, step: Callable[[], object], ended: Callable[[], None]
    ) -> None:
        """``ended`` is called when all ranks leave the context."""
        super().__init__()
        self._optimizer = optimizer
        self._rank = runtime.rank
        self._roll_call = RollCall(runtime.roll_call_communicator(), runtime.device_type)
        self._step = step
        self._ended = ended
        optimizer.take_gradients_of_one_rank(True)

    def main_hook(self) -> None:
        """This rank has run out of inputs: take part in a step of the others."""
        self._call_roll(None)
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks leave: from now on DDP's gradients are everybody's again."""
        del is_last_joiner
        self._optimizer.attendance.absent = False
        self._optimizer.take_gradients_of_one_rank(False)
        self._ended()

    def before_step(self) -> None:
        """This rank has inputs, and is about to step."""
        self._call_roll("step")

    def _call_roll(self, event: str | None) -> None:
        optimizers = [self._optimizer]
        roll = self._roll_call.call(event, settings=describe_settings(optimizers))
        self._optimizer.attendance.absent = not roll.active or roll.active[0] != self._rank
        if event is None and roll.settings is not None:
            take_over_settings(optimizers, roll.settings)
