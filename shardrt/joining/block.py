"""The block ``with rt.join(...)``: announces what ranks with inputs do, and follows where there are none left.

Note [Ending together]: where the policy says that ranks do not go on, those that still have inputs learn of it in the
roll call before an update, deep inside their loop: in ``step``, in a backward, in a forward of DDP's. They leave by an
exception that the end of the block takes back. It is no ``Exception``, so that a loop which passes over bad batches
does not pass over it. Nothing of the update has happened then, and every rank has made the same number of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from shardrt.errors import PluginError, ShardrtError
from shardrt.joining.carrying import Carried
from shardrt.joining.ddp import DdpFollower
from shardrt.joining.rollcall import Roll, RollCall
from shardrt.joining.settings import describe_settings, take_over_settings
from shardrt.optim.clip import Covered, clip_by_norm, clip_by_value
from shardrt.optim.sharded import ShardedOptimizer
from shardrt.optim.uneven import UnevenOptimizer
from shardrt.protocols import Communicator, JoinPolicy

if TYPE_CHECKING:
    from shardrt.loop import LoopCalls


class _EndOfInputs(BaseException):
    """All ranks stop here. See Note [Ending together]."""

    def __init__(self, block: JoinBlock) -> None:
        super().__init__("a rank has run out of inputs, and the join policy ends the block for all")
        self.block = block


class JoinBlock:
    """See :meth:`shardrt.Runtime.join`."""

    def __init__(
        self,
        runtime: LoopCalls,
        optimizers: Sequence[ShardedOptimizer],
        followers: Sequence[DdpFollower],
        policy: JoinPolicy,
        carried: Carried,
        communicator: Communicator,
    ) -> None:
        self._runtime = runtime
        self._optimizers = optimizers
        self._followers = followers
        self._policy = policy
        self._carried = carried
        self._roll_call = RollCall(communicator, runtime.device_type)
        self._following = False
        self._updated = [False] * len(optimizers)
        """For each optimizer, whether a backward since the last step may have updated parameters."""
        self._longest = 0
        """The first of the ranks that were active last."""
        self._events: dict[str, Callable[..., None]] = {
            "step": self._follow_step,
            "round": self._follow_round,
            "unscale": self._follow_unscale,
            "clip_norm": partial(self._follow_clip, clip_by_norm),
            "clip_value": partial(self._follow_clip, clip_by_value),
            "forward": self._follow_forward,
            "backward": self._follow_backward,
            "late": self._follow_late,
            "gather": self._follow_gather,
            "bucket": self._follow_bucket,
            "zero": self._follow_zero,
        }

    def __enter__(self) -> None:
        self._runtime.entered_join(self)
        for optimizer in self._optimizers:
            optimizer.announcer = self
            if optimizer.watch is not None:
                optimizer.watch.beginning = partial(self._announce_round, optimizer)
                if not optimizer.residence.params:
                    optimizer.watch.handing = partial(self._announce_bucket, optimizer)
        for index, follower in enumerate(self._followers):
            follower.begin(partial(self._announce_forward, index))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        ended_together = isinstance(error, _EndOfInputs) and error.block is self
        if error is not None and not ended_together:
            self._end()
            self._fail(error)
            return False
        try:
            with self._runtime.telling_peers():
                self._leave(ended_together)
        finally:
            self._end()
        return ended_together

    def announce(self, event: str, optimizer: UnevenOptimizer, **arguments: Any) -> None:
        """See :class:`shardrt.optim.attendance.Announcer`."""
        place = self._place(optimizer)
        if event == "gather":
            arguments["anew"] = self._begins(self._optimizers[place])
        self._announce(event, place, **arguments)

    def _place(self, optimizer: UnevenOptimizer) -> int:
        [place] = [index for index, one in enumerate(self._optimizers) if one is optimizer]
        return place

    def announce_clipping(self, event: str, covered: Covered, **numbers: Any) -> None:
        """Clipping of some optimizers' gradients is next."""
        places = {id(optimizer): index for index, optimizer in enumerate(self._optimizers)}
        targets: list[tuple[int, list[str] | None, bool]] = []
        for optimizer, wanted in covered:
            if id(optimizer) in places:
                assert isinstance(optimizer, ShardedOptimizer)
                names = None if wanted is None or wanted == optimizer.trained() else optimizer.names_of(wanted)
                targets.append((places[id(optimizer)], names, optimizer.begins_anew()))
        if targets:
            anew = all(target[2] for target in targets)
            self._announce(event, targets[0][0], anew=anew, targets=targets, **numbers)

    def _announce_round(self, optimizer: ShardedOptimizer) -> None:
        self._announce("round", self._place(optimizer), anew=self._begins(optimizer))

    def _announce_bucket(self, optimizer: ShardedOptimizer, bucket: int) -> None:
        self._announce("bucket", self._place(optimizer), number=bucket)

    def _announce_forward(self, index: int, trains: bool) -> None:
        attached = [one for one in self._optimizers if _module_of(one) is self._followers[index].ddp]
        self._announce("forward", index, trains=trains, anew=trains and all(map(self._begins, attached)))

    def _begins(self, optimizer: ShardedOptimizer) -> bool:
        """Whether nothing of the next update has happened yet."""
        if optimizer.updates_early:
            return not self._updated[self._place(optimizer)]
        return optimizer.begins_anew()

    def _announce(self, event: str, index: int, **arguments: Any) -> None:
        if self._following:
            return
        text = json.dumps([event, index, *([arguments] if arguments else [])], separators=(",", ":"))
        roll = self._roll_call.call(text, settings=describe_settings(self._optimizers))
        self._heed(roll, event, index, arguments)

    def _heed(self, roll: Roll, event: str, index: int, arguments: dict[str, Any]) -> None:
        """On every rank: how many bring gradients to what comes next, or is this the end?"""
        active, everyone = len(roll.active), self._runtime.world_size
        self._longest = roll.active[0]
        if self._asks(event, index, arguments) and not self._policy.goes_on(active, everyone):
            raise _EndOfInputs(self)
        divisor = self._policy.divisor(active, everyone)
        if isinstance(divisor, bool) or not isinstance(divisor, int) or divisor < 1:
            raise PluginError(
                f"join policy {self._policy.name!r} divides by {divisor!r} where {active} of {everyone} ranks have "
                "inputs; a divisor is a whole number above 0: upgrade or report the plugin"
            )
        for optimizer in self._optimizers:
            optimizer.attendance.divisor = divisor
        if event in ("round", "step"):
            self._updated[index] = event == "round"

    def _asks(self, event: str, index: int, arguments: dict[str, Any]) -> bool:
        """Whether an update begins here. With DDP that is its forward: inside its backward there is no way back."""
        inside_ddp = event in ("backward", "late", "bucket", "zero") or (
            event == "round" and _module_of(self._optimizers[index]) is not None
        )
        return not inside_ddp and bool(arguments["anew"])

    def _leave(self, ended_together: bool) -> None:
        """This rank has run out of inputs, or all stop: follow the others to the end, and settle what may differ."""
        self._following = True  # what this rank calls from here on, it calls for others
        for optimizer in self._optimizers:
            optimizer.run_out()
        settings: str | None = None
        while not ended_together:
            here = describe_settings(self._optimizers)
            roll = self._roll_call.call(None, settings=here)
            if not roll.active:
                settings = self._roll_call.settings_of(self._longest, settings=here)
                break
            event, index, *rest = json.loads(roll.event)
            arguments = rest[0] if rest else {}
            try:
                self._heed(roll, event, index, arguments)
            except _EndOfInputs:
                settings = roll.settings
                break
            if roll.settings is not None:
                take_over_settings(self._optimizers, roll.settings)
            self._events[event](index, **arguments)
        if settings is not None:
            take_over_settings(self._optimizers, settings)
        for optimizer in self._optimizers:
            optimizer.drop_unfinished_step()
        self._carried.share(self._longest)
        for follower in self._followers:
            follower.share_buffers(self._longest)

    def _follow_step(self, index: int, *, anew: bool) -> None:
        optimizer = self._optimizers[index]
        optimizer.follow_peers(anew=anew)
        optimizer.step()

    def _follow_round(self, index: int, *, anew: bool) -> None:
        del anew  # every round reduces
        optimizer = self._optimizers[index]
        self._follow_backward(index)
        assert optimizer.watch is not None
        if optimizer.residence.params:
            optimizer.watch.pass_round()
        else:  # units are gathered between one bucket and the next
            optimizer.watch.pass_beginning()

    def _follow_bucket(self, index: int, *, number: int) -> None:
        del number  # they come in order
        watch = self._optimizers[index].watch
        assert watch is not None
        watch.pass_bucket()

    def _follow_late(self, index: int) -> None:
        watch = self._optimizers[index].watch
        assert watch is not None
        watch.pass_late()

    def _follow_gather(self, index: int, *, unit: int, anew: bool) -> None:
        del anew
        self._optimizers[index].followers.gather(unit)

    def _follow_zero(self, index: int, *, set_to_none: bool) -> None:
        # Where gradients are sharded, what a rank's own shards have got is dropped by nobody else.
        self._optimizers[index].zero_grad(set_to_none=set_to_none)

    def _follow_unscale(self, index: int, *, anew: bool, inverse_scale: float, allow_fp16: bool) -> None:
        optimizer = self._optimizers[index]
        optimizer.follow_peers(anew=anew)
        scale = torch.full((1,), inverse_scale, device=self._runtime.device_type)
        optimizer.unscale(scale, torch.zeros_like(scale), allow_fp16)

    def _follow_clip(
        self, clip: Callable[..., Any], index: int, *, anew: bool, targets: list[Any], **numbers: Any
    ) -> None:
        del index, anew  # both are those of the targets
        covered: Covered = []
        for at, names, from_nothing in targets:
            optimizer = self._optimizers[at]
            optimizer.follow_peers(anew=from_nothing)
            by_name = optimizer.named()
            covered.append((optimizer, None if names is None else {by_name[name] for name in names}))
        clip(covered, self._runtime.negotiate(()), device_type=self._runtime.device_type, **numbers)

    def _follow_forward(self, index: int, *, trains: bool, anew: bool) -> None:
        del anew
        self._followers[index].follow_forward(trains=trains)

    def _follow_backward(self, index: int) -> None:
        module = _module_of(self._optimizers[index])
        for follower in self._followers:
            if follower.ddp is module:
                follower.follow_backward()

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, ShardrtError):
            # torch's own collectives (DDP's) know that a connection broke; the rank that broke it has said why.
            self._runtime.raise_if_peer_failed()
        self._runtime.report_failure(error)

    def _end(self) -> None:
        for optimizer in self._optimizers:
            optimizer.announcer = None
            optimizer.attendance.divisor, optimizer.attendance.absent = None, False
            if optimizer.watch is not None:
                optimizer.watch.beginning = optimizer.watch.handing = None
        for follower in self._followers:
            follower.end()
        self._runtime.left_join()


def _module_of(optimizer: ShardedOptimizer) -> torch.nn.Module | None:
    return None if optimizer.attached_to is None else optimizer.attached_to()
