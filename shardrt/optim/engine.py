"""The buckets of one sharded optimizer: reduce their gradients, step this rank's shards, gather the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import attrs
import torch

from shardrt.comm.waiting import start_and_wait
from shardrt.errors import OptimizerError, SparseGradientError
from shardrt.optim.backward import BackwardWatch
from shardrt.optim.buffers import BucketBuffers, Slot, check_unchanged, frozen_shard
from shardrt.optim.params import NamedParam
from shardrt.optim.settings import MARKS, Settings
from shardrt.plan import Plan, Shard
from shardrt.protocols import Communicator, Work

Gradients = Literal["average", "sum", "reduced"]


@attrs.define(eq=False)
class OwnedShard:
    """A shard this rank steps: the parameter object its optimizer holds, and where its gradient arrives."""

    shard: Shard
    stepped: torch.nn.Parameter
    slot: Slot | None = None
    """Its place in a bucket; None while the parameter is frozen."""
    gradient: torch.Tensor | None = None


class _Done:
    def wait(self) -> None:
        pass


DONE: Work = _Done()


class BucketEngine:
    """See :class:`shardrt.protocols.StepEngine`."""

    def __init__(
        self,
        plan: Plan,
        params: Mapping[str, NamedParam],
        communicator: Communicator,
        *,
        gradients: Gradients,
        owned: Mapping[Shard, OwnedShard],
        update: Callable[[Sequence[OwnedShard] | None], None],
        gather_communicator: Communicator | None = None,
        watch: BackwardWatch | None = None,
        adopts_gradients: bool = True,
        settings: Settings | None = None,
    ) -> None:
        self.plan = plan
        self.owned = owned
        self._communicator = communicator
        self._gather_communicator = gather_communicator or communicator
        self._watch = watch
        self._adopts = adopts_gradients
        self._settings = settings
        self._gradients = gradients
        self._update = update
        self._buckets = [
            _BucketAtWork(BucketBuffers(bucket, params, rank=communicator.rank, holds_gradients=gradients != "reduced"))
            for bucket in plan.buckets
        ]
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._place_owned_shards(params)
        if gradients != "reduced":
            self._install_hooks()

    @property
    def bucket_count(self) -> int:
        """Number of buckets."""
        return len(self._buckets)

    def reduce(self, bucket: int) -> Work:
        """Start reducing a bucket's gradients onto their owners."""
        at_work = self._buckets[bucket]
        if self._gradients == "reduced":
            return self._compare_settings_only(at_work)
        if at_work.reduction is not None and at_work.gradients_changed():
            raise OptimizerError(
                "gradients were changed or accumulated after their reduction had started; clip with "
                "rt.clip_grad_norm_, between the last backward and step(), or use schedule='sync'"
            )
        if at_work.reduction is None:
            present = _collect_gradients(at_work.buffers, self._adopts)
            marks = [0] * MARKS if self._settings is None else self._settings.marks()
            at_work.present.copy_(torch.tensor([*present, *marks], dtype=torch.int8))
            buffers = at_work.buffers
            assert buffers.gradients is not None
            at_work.reduction = _Both(
                self._communicator.reduce_scatter(
                    buffers.gradients,
                    buffers.bucket.splits,
                    output=buffers.reduced,
                    average=self._gradients == "average",
                ),
                self._communicator.all_reduce(at_work.present, op="max"),
            )
            at_work.note_gradients()
        return at_work.reduction

    def _compare_settings_only(self, bucket: _BucketAtWork) -> Work:
        if self._settings is None:
            return DONE
        if bucket.reduction is None:
            bucket.present.copy_(torch.tensor([0] * len(bucket.buffers.slots) + self._settings.marks()))
            bucket.reduction = self._communicator.all_reduce(bucket.present, op="max")
        return bucket.reduction

    def renew(self, bucket: int) -> None:
        """Another backward has added to the bucket: let the reduction of the one before end, and forget it."""
        at_work = self._buckets[bucket]
        if at_work.reduction is not None:
            at_work.reduction.wait()
            at_work.reduction = None

    def reduced_gradients(self, wanted: set[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Reduce every bucket, if that has not happened, and return the gradients of this rank's shards."""
        start_and_wait(self.reduce, range(self.bucket_count))
        self._attach_gradients()
        return [
            owned.stepped.grad
            for owned in self.owned.values()
            if owned.stepped.grad is not None
            and (wanted is None or (owned.slot is not None and owned.slot.param.tensor in wanted))
        ]

    def _attach_gradients(self, buckets: Sequence[int] | None = None) -> None:
        """Give owned shards their reduced gradients, or None where no rank had one."""
        chosen = self._buckets if buckets is None else [self._buckets[index] for index in buckets]
        if self._gradients == "reduced":
            for bucket in chosen:
                if self._settings is not None:
                    self._settings.compare(bucket.present.tolist()[-MARKS:])
                for _, owned in bucket.owned:
                    assert owned.slot is not None
                    owned.stepped.grad = _part_of_gradient(owned.slot, owned.shard)
            return
        for bucket in chosen:
            found = bucket.present.tolist()
            if self._settings is not None:
                self._settings.compare(found[-MARKS:])
            present = None if all(found[:-MARKS]) else found
            for index, owned in bucket.owned:
                wanted = owned.gradient if present is None or present[index] else None
                if owned.stepped.grad is not wanted:
                    owned.stepped.grad = wanted

    def update(self, buckets: Sequence[int] | None = None) -> None:
        """Step the local optimizer over this rank's shards of some buckets, or of all."""
        self._attach_gradients(buckets)
        chosen = self._buckets if buckets is None else [self._buckets[index] for index in buckets]
        for bucket in chosen:
            bucket.buffers.load_staged()
        self._update(None if buckets is None else [owned for bucket in chosen for _, owned in bucket.owned])
        for bucket in chosen:
            bucket.reduction = None

    def forget_reduction(self) -> None:
        """The next step reduces anew."""
        for bucket in self._buckets:
            bucket.reduction = None

    def gather(self, bucket: int) -> Work:
        """Start spreading a bucket's parameters from their owners to everyone."""
        buffers = self._buckets[bucket].buffers
        gathering = self._gather_communicator.all_gather(buffers.params, buffers.bucket.splits)
        return _Then(gathering, buffers.store_staged) if buffers.staged else gathering

    def follow_moved_parameters(self) -> None:
        """Notice parameters whose data was replaced since the last step."""
        for bucket in self._buckets:
            bucket.buffers.follow_moved_parameters()

    def broadcast_parameters(self, source: int) -> None:
        """Everyone gets the source's values."""
        for bucket in self._buckets:
            bucket.buffers.load_staged()
            self._communicator.broadcast(bucket.buffers.params, source).wait()
            bucket.buffers.store_staged()

    def gradient_counts(self) -> list[int]:
        """How many gradients fill each bucket."""
        return [sum(slot.param.tensor.requires_grad for slot in bucket.buffers.slots) for bucket in self._buckets]

    def remove_hooks(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def _place_owned_shards(self, params: Mapping[str, NamedParam]) -> None:
        for owned in self.owned.values():
            owned.slot = owned.gradient = None
        for bucket in self._buckets:
            buffers = bucket.buffers
            for index, slot in enumerate(buffers.slots):
                for offset, shard in slot.offsets:
                    mine = self.owned.get(shard)
                    if mine is None:
                        continue
                    mine.slot = slot
                    mine.stepped.data = buffers.shard_of(slot, offset, shard)
                    if buffers.reduced is not None:
                        mine.gradient = buffers.reduced_gradient_of(slot, offset, shard)
                    bucket.owned.append((index, mine))
        for owned in self.owned.values():
            if owned.slot is None:
                owned.stepped.grad = None
                owned.stepped.data = frozen_shard(owned.shard, params[owned.shard.param])

    def _install_hooks(self) -> None:
        for index, bucket in enumerate(self._buckets):
            for slot in bucket.buffers.slots:
                tensor = slot.param.tensor
                if tensor.requires_grad:
                    arrived = None if self._watch is None else partial(self._watch.arrived, index)
                    move = _move_gradient_home(bucket, slot, self._adopts, arrived)
                    self.hooks.append(tensor.register_post_accumulate_grad_hook(move))  # type: ignore[no-untyped-call]
                    if self._watch is not None:
                        self.hooks.append(tensor.register_hook(_wait_for_reduction(bucket)))  # type: ignore[no-untyped-call]


@attrs.define(eq=False)
class _BucketAtWork:
    """A bucket's buffers and what is under way with them."""

    buffers: BucketBuffers
    owned: list[tuple[int, OwnedShard]] = attrs.field(factory=list)
    """This rank's shards, with the index of their slot."""
    reduction: Work | None = None
    outdated: bool = False
    """Gradients have come in since the reduction was started."""
    version: int = -1
    present: torch.Tensor = attrs.field(init=False)
    """For each slot, whether this rank (after the reduction: any rank) has a gradient, see Note [Missing gradients];
    then the marks of the settings it is to be stepped with, see :mod:`shardrt.optim.settings`."""

    def note_gradients(self) -> None:
        """Remember what the reduction was started with. Views share the counter of the buffer they are of, so one
        number tells whether anybody has written to any gradient since."""
        self.outdated = False
        self.version = -1 if self.buffers.gradients is None else self.buffers.gradients._version

    def gradients_changed(self) -> bool:
        """Whether any gradient has changed since the reduction was started."""
        now = -1 if self.buffers.gradients is None else self.buffers.gradients._version
        return self.outdated or now != self.version

    @present.default
    def _no_gradients_yet(self) -> torch.Tensor:
        return torch.zeros(len(self.buffers.slots) + MARKS, dtype=torch.int8, device=self.buffers.params.device)


# Note [Missing gradients]: without sharding a parameter that got no gradient is not stepped: no weight decay, no
# momentum. One that got a gradient on some ranks only is stepped, the others counting as zero, as under DDP. Owners
# must know which case it is, so each bucket's reduction is followed by one byte per parameter.


def _collect_gradients(buffers: BucketBuffers, adopts: bool) -> list[int]:
    """Bring every gradient of the bucket into its place; says for each slot whether there was one."""
    present = []
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for slot in buffers.slots:
        tensor = slot.param.tensor
        gradient = tensor.grad
        present.append(int(gradient is not None))
        if gradient is slot.gradient and gradient is not None:
            continue
        if gradient is None:
            _zero(buffers, slot)
            continue
        _refuse_sparse(slot.param.name, gradient)
        if slot.gradient is not None:
            targets.append(slot.gradient)
            sources.append(gradient.detach())
            if adopts and not gradient.requires_grad:
                tensor.grad = slot.gradient
        else:
            flat = gradient.detach().reshape(-1)
            assert buffers.gradients is not None
            for offset, shard in slot.offsets:
                targets.append(buffers.gradients[offset : offset + shard.numel])
                sources.append(flat[shard.start : shard.stop])
    if targets:
        torch._foreach_copy_(targets, sources)
    return present


def _zero(buffers: BucketBuffers, slot: Slot) -> None:
    assert buffers.gradients is not None
    for offset, shard in slot.offsets:
        buffers.gradients[offset : offset + shard.numel].zero_()


def _move_gradient_home(
    bucket: _BucketAtWork, slot: Slot, adopts: bool, arrived: Callable[[], None] | None
) -> Callable[[torch.Tensor], None]:
    name, home = slot.param.name, slot.gradient

    def hook(tensor: torch.Tensor) -> None:
        bucket.outdated = True
        gradient = tensor.grad
        if gradient is not home and gradient is not None:
            _refuse_sparse(name, gradient)
            # A gradient that is itself part of a graph (create_graph=True) must stay in it; the step copies it.
            if adopts and home is not None and not gradient.requires_grad:
                check_unchanged(name, home, gradient)
                home.copy_(gradient)
                tensor.grad = home
        if arrived is not None:
            arrived()

    return hook


def _wait_for_reduction(bucket: _BucketAtWork) -> Callable[[torch.Tensor], None]:
    """Before a gradient is added to: the bytes it lies in may still be on their way from an earlier backward."""

    def hook(_: torch.Tensor) -> None:
        if bucket.reduction is not None:
            bucket.reduction.wait()

    return hook


def _part_of_gradient(slot: Slot, shard: Shard) -> torch.Tensor | None:
    """For gradients that are reduced already: the part of ``p.grad`` that belongs to a shard."""
    gradient = slot.param.tensor.grad
    if gradient is None:
        return None
    _refuse_sparse(slot.param.name, gradient)
    if shard.numel == slot.param.tensor.numel():
        return gradient
    return gradient.detach().reshape(-1)[shard.start : shard.stop]


def _refuse_sparse(name: str, gradient: torch.Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise SparseGradientError(
            f"parameter {name!r} received a gradient with layout {gradient.layout}; flat buffers hold dense ones only: "
            "build its module without sparse gradients (torch.nn.Embedding(sparse=False))"
        )


class _Both:
    """Two operations as one."""

    def __init__(self, first: Work, second: Work) -> None:
        self._works: Sequence[Work] = (first, second)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class _Then:
    """An operation followed, once, by a call."""

    def __init__(self, work: Work, call: Callable[[], None]) -> None:
        self._work = work
        self._call: Callable[[], None] | None = call

    def wait(self) -> None:
        self._work.wait()
        if self._call is not None:
            self._call()
            self._call = None
