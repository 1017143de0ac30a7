"""What an optimizer does for ranks with uneven inputs. See :mod:`shardrt.joining`, which asks for it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from shardrt.errors import OptimizerError
from shardrt.optim.amp import ScaledOptimizer
from shardrt.optim.attendance import Announcer, Attendance
from shardrt.optim.backward import BackwardWatch
from shardrt.optim.engine import BucketEngine, Gradients
from shardrt.optim.followers import Followers
from shardrt.optim.wires import Wires


class UnevenOptimizer(ScaledOptimizer):
    """An optimizer that can take part in its peers' updates with no gradients of its own."""

    attendance: Attendance
    announcer: Announcer | None
    """Whom to tell before each collective; None outside a block of uneven inputs."""
    attached_to: weakref.ref[DistributedDataParallel] | None
    """The DDP module whose gradients it takes, if it was attached to one."""
    gradients: Gradients
    watch: BackwardWatch | None
    followers: Followers
    wires: Wires
    _left: list[tuple[int, int]] | None

    @property
    def updates_early(self) -> bool:
        """Whether parameters are updated inside backward, before anything can be done to the gradients."""
        raise NotImplementedError

    @property
    def engine(self) -> BucketEngine:
        """The buckets as they are laid out now."""
        raise NotImplementedError

    def agree_on_late(self, late: Sequence[int]) -> list[int]:
        """The buckets that on any rank have got gradients after they were handed on. See Note [Backward inside
        backward] in :mod:`shardrt.optim.backward`."""
        if self.updates_early and late:
            raise OptimizerError(
                "a parameter got gradients in more than one part of a backward (reentrant checkpoints that share it), "
                "and was updated with the first already; checkpoint with use_reentrant=False, or use "
                "schedule='bucket' or 'priority'"
            )
        if self.announcer is not None:
            self.announcer.announce("late", self)
        flags = torch.zeros(self.engine.bucket_count, dtype=torch.int8)
        flags[list(late)] = 1
        flags = flags.to(self._runtime.device_type)
        self.wires.everybody.all_reduce(flags, op="max").wait()
        return [int(bucket) for bucket in flags.nonzero().flatten().tolist()]

    def begins_anew(self) -> bool:
        """Whether what comes next has to reduce the gradients, since nothing has yet, or it was dropped."""
        # Where buckets are updated inside backward a thread is at work on them: what it has done by now says nothing.
        return not self.updates_early and not self.engine.reducing

    def follow_peers(self, *, anew: bool) -> None:
        """Peers have dropped what they had reduced, if they had: so does this rank."""
        if anew:
            self.engine.forget_reduction()

    def run_out(self) -> None:
        """This rank has no more inputs: from now on it takes part without gradients. Those it has are dropped."""
        self.attendance.absent = True
        self._left = None
        for param in self.trained():
            param.grad = None
        self.followers.renewed()  # units that are still here are not, on other ranks

    def drop_unfinished_step(self) -> None:
        """Forget gradients, and reductions of them, that no step is going to take."""
        self.zero_grad()
        if self.watch is not None and not self.updates_early:
            self.watch.rounds = 0

    def set_trained(self, frozen: set[str]) -> None:
        """Freeze the parameters of these names and thaw the others, as a peer has done."""
        for name, param in self.named().items():
            if param.requires_grad == (name in frozen):
                param.requires_grad_(name not in frozen)

    def frozen_names(self) -> list[str]:
        """The parameters that are frozen now."""
        return [name for name, param in self.named().items() if not param.requires_grad]

    def names_of(self, params: set[torch.Tensor]) -> list[str]:
        """The names of these parameters, in their order."""
        return [name for name, param in self.named().items() if param in params]
