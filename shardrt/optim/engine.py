"""The buckets of one sharded optimizer: reduce their gradients, step this rank's shards, gather the parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Literal

import torch

from shardrt.comm.waiting import has_arrived, start_and_wait
from shardrt.comm.works import FinishedWork, FollowedWork
from shardrt.errors import OptimizerError
from shardrt.flight.recorder import noted
from shardrt.optim.arrivals import Arrivals
from shardrt.optim.attendance import Attendance
from shardrt.optim.backward import BackwardWatch
from shardrt.optim.buffers import BucketBuffers
from shardrt.optim.carrying import Carried, carried_by, carry_on, forget, forget_some, spread_parameters
from shardrt.optim.gradients import (
    BucketAtWork,
    MoveGradientHome,
    OwnedShard,
    part_of_gradient,
    scale_where_they_are,
    wait_for_reduction,
)
from shardrt.optim.hooked import HookResults
from shardrt.optim.params import NamedParam
from shardrt.optim.placing import place_owned_shards
from shardrt.optim.readers import Reading, UnfinishedBucket, may_be_read_later
from shardrt.optim.reading import ReadingOrder
from shardrt.optim.reducing import Reductions
from shardrt.optim.residence import RESIDENT, PrecisionOf, Residence, own_precision
from shardrt.optim.settings import MARKS, Settings
from shardrt.plan import Plan, Shard
from shardrt.protocols import Communicator, PieceCommunicator, SharedAllocator, Work
from shardrt.timeline import Timeline

_NOT_RECORDED = nullcontext()

Gradients = Literal["average", "sum", "reduced"]


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
        read_failed: Callable[[Exception], None],
        gather_communicator: Communicator | None = None,
        replicas: Communicator | None = None,
        everybody: Communicator | None = None,
        watch: BackwardWatch | None = None,
        hooked: HookResults | None = None,
        adopts_gradients: bool = True,
        residence: Residence = RESIDENT,
        precision: PrecisionOf = own_precision,
        settings: Settings | None = None,
        attendance: Attendance | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """``hooked`` has the reduced gradients where a hook of DDP reduces them. ``replicas`` are the ranks that have
        the same shards, ``everybody`` both these and those that share; None where all ranks share."""
        self.plan = plan
        self.owned = owned
        self.gathers_apart = gather_communicator is not None
        self._communicator = communicator
        self._gather_communicator = gather_communicator or communicator
        self._watch = watch
        self._hooked = hooked
        self._adopts = adopts_gradients
        self._settings = settings
        self._attendance = attendance or Attendance()
        self._timeline = timeline
        self._gradients = gradients
        reduces_here = gradients != "reduced" and hooked is None
        # See Note [Gradients stay].
        stays_apart = (
            reduces_here
            and adopts_gradients
            and residence.gradients
            and communicator.world_size > 1
            and isinstance(communicator, PieceCommunicator)
        )
        self._reductions = Reductions(
            communicator=communicator,
            replicas=replicas,
            everybody=everybody or communicator,
            gradients=gradients,
            adopts=adopts_gradients,
            stay=residence.gradients,
            in_pieces=stays_apart or not residence.gradients,
            attendance=self._attendance,
            settings=settings,
            hooked=hooked,
        )
        self._update = update
        self._read_failed = read_failed
        shared = communicator.allocate if isinstance(communicator, SharedAllocator) else None
        self._buckets = [
            BucketAtWork(
                BucketBuffers(
                    bucket,
                    params,
                    rank=communicator.rank,
                    holds_gradients=reduces_here and not stays_apart,
                    holds_reduced=gradients != "reduced",
                    residence=residence,
                    precision=precision(bucket.params[0]),
                    shared=shared,
                ),
                keeps_gradients=adopts_gradients and reduces_here,
            )
            for bucket in plan.buckets
        ]
        self._residence = residence
        self._still = [
            BucketBuffers(
                bucket,
                params,
                rank=communicator.rank,
                holds_gradients=False,
                holds_reduced=False,
                residence=residence,
                precision=precision(bucket.params[0]),
                shared=shared,
            )
            for bucket in plan.still
        ]
        self._going: list[Work] = []
        self.given_out = False
        """Whether reduced gradients of the step that comes next were lent to somebody who may have changed them."""
        self._unfinished: list[UnfinishedBucket] = []
        self._reading = ReadingOrder(len(self._buckets))
        self.hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._arrivals = Arrivals(self._buckets, take_turns=watch is None and residence.gradients)
        place_owned_shards(owned, params, self._buckets, self._still)
        if gradients != "reduced":
            self._install_hooks()

    @property
    def bucket_count(self) -> int:
        """Number of buckets."""
        return len(self._buckets)

    def reduce(self, bucket: int) -> Work:
        """Start reducing a bucket's gradients onto their owners."""
        at_work = self._buckets[bucket]
        reduction = at_work.reduction
        if reduction is None:
            self._arrivals.take(bucket)
            with self._noting(bucket):
                noted.bucket = bucket
                reduction = at_work.reduction = self._reductions.start(at_work)
                noted.bucket = None
            at_work.note_gradients()
            if not self._residence.gradients:
                self._let_go(reduction)
        else:
            self._refuse_changed(at_work)
        return reduction

    def check_gradients(self) -> None:
        """Raise if gradients were changed since backward, where nobody is going to ask for their reduction again."""
        for bucket in self._buckets:
            if bucket.noted:
                self._refuse_changed(bucket)

    def _refuse_changed(self, at_work: BucketAtWork) -> None:
        if at_work.gradients_changed() and not self._attendance.absent:
            raise OptimizerError(
                "gradients were changed or accumulated after their reduction had started; clip with "
                "rt.clip_grad_norm_, between the last backward and step(), or use schedule='sync'; a "
                "DistributedDataParallel module, which changes them itself, is to be attached: rt.attach(ddp, opt)"
            )

    def _let_go(self, reduction: Work) -> None:
        """Wait for earlier reductions, so that no more than two buckets of gradients are in memory."""
        self._going.append(reduction)
        while len(self._going) > 1:
            self._going.pop(0).wait()

    def carried(self) -> Carried:
        """What was reduced since ``zero_grad``, where that is the only trace of gradients."""
        return carried_by(self._buckets)

    def carry_on(self, earlier: Carried) -> None:
        """Go on from what buckets that were laid out otherwise had reduced."""
        carry_on(self._buckets, earlier)

    def forget_gradients(self, *, keep_zeros: bool = False) -> None:
        """Drop what was reduced, where that is the only trace of gradients."""
        forget(self._buckets, keep_zeros=keep_zeros)

    def forget_some(self, names: Collection[str]) -> None:
        """Drop what was reduced of some parameters."""
        forget_some(self._buckets, names)

    def renew(self, bucket: int) -> None:
        """Another backward has added to the bucket: let the reduction of the one before end, and forget it."""
        at_work = self._buckets[bucket]
        reduction = at_work.reduction
        if reduction is not None:
            reduction.wait()
            at_work.reduction = None
            at_work.forget_noted()
            self.given_out = False
            self._arrivals.give_back([bucket])

    def reduced_gradients(self, wanted: set[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Reduce every bucket, if that has not happened, and return the gradients of this rank's shards."""
        start_and_wait(self.reduce, range(self.bucket_count))
        self._attach_gradients()
        self.given_out = True
        return [
            owned.stepped.grad
            for owned in self.owned.values()
            if owned.stepped.grad is not None
            and (wanted is None or (owned.slot is not None and owned.slot.param.tensor in wanted))
        ]

    def scale_local_gradients(self, factor: torch.Tensor) -> None:
        """The reduced gradients were unscaled: let what ``p.grad`` shows be so too."""
        for bucket in self._buckets:
            whole = bucket.buffers.gradients
            if whole is not None and self._residence.gradients and whole is not bucket.buffers.reduced:
                whole.mul_(factor)
            elif whole is None and self._reductions.stay and self._reductions.in_pieces:
                scale_where_they_are(bucket.buffers.slots, factor)
            bucket.note_gradients()

    def _attach_gradients(self, buckets: Sequence[int] | None = None) -> None:
        """Give owned shards their reduced gradients, or None where no rank had one."""
        for bucket in self._chosen(buckets):
            found = bucket.present.tolist()
            bucket.absent = [not there for there in found[:-MARKS]]
            if self._settings is not None:
                self._settings.compare(found[-MARKS:])
            if self._gradients == "reduced":
                for _, owned in bucket.owned:
                    assert owned.slot is not None
                    owned.stepped.grad = part_of_gradient(owned.slot, owned.shard)
                continue
            present = None if all(found[:-MARKS]) else found
            for index, owned in bucket.owned:
                wanted = owned.gradient if present is None or present[index] else None
                if wanted is not None and wanted.dtype != owned.stepped.dtype:
                    wanted = wanted.to(owned.stepped.dtype)
                if owned.stepped.grad is not wanted:
                    owned.stepped.grad = wanted

    def _chosen(self, buckets: Sequence[int] | None) -> Sequence[BucketAtWork]:
        return self._buckets if buckets is None else [self._buckets[index] for index in buckets]

    def update(self, buckets: Sequence[int] | None = None) -> None:
        """Step the local optimizer over this rank's shards of some buckets, or of all."""
        self._attach_gradients(buckets)
        chosen = self._chosen(buckets)
        for bucket in chosen:
            bucket.buffers.load_staged()
        with self._noting(buckets):
            self._update(None if buckets is None else [owned for bucket in chosen for _, owned in bucket.owned])
        for bucket in chosen:
            bucket.reduction = None
        self.given_out = False
        self._arrivals.give_back(range(self.bucket_count) if buckets is None else buckets)

    def _noting(self, buckets: int | Sequence[int] | None) -> AbstractContextManager[None]:
        """What is issued in this block shows its bucket in the timeline."""
        if self._timeline is None or buckets is None:
            return _NOT_RECORDED
        return self._timeline.noting(bucket=buckets if isinstance(buckets, int) else buckets[0])

    @property
    def reducing(self) -> bool:
        """Whether a bucket has been reduced, or is being reduced, for the step that comes next."""
        return any(bucket.reduction is not None for bucket in self._buckets)

    def forget_reduction(self) -> None:
        """The next step reduces anew, once what is under way has ended: it shares the buffers."""
        for bucket in range(self.bucket_count):
            self.renew(bucket)

    def gather(self, bucket: int) -> Work:
        """Start spreading a bucket's parameters from their owners to everyone."""
        buffers = self._buckets[bucket].buffers
        # Bytes that arrive change parameters as an optimizer's step does: autograd must know.
        torch.autograd.graph.increment_version([slot.param.tensor for slot in buffers.slots])
        if not self._residence.params:
            return FinishedWork()  # whoever computes with them gathers them: see UnitParams
        buffers.load_own_run()
        with self._noting(bucket):
            noted.bucket = bucket
            gathering = self._gather_communicator.all_gather(buffers.params, buffers.bucket.splits)
            noted.bucket = None
        return FollowedWork([gathering], then=buffers.store_staged) if buffers.staged else gathering

    def gather_for_readers(self, bucket: int, started: Work | None = None) -> None:
        """Start a gather, if it is not, that whoever reads one of the bucket's parameters waits for."""
        gathering = self.gather(bucket) if started is None else started
        if not self._residence.params or (started is not None and has_arrived(started)):
            gathering.wait()  # which takes no time
            return
        tensors = [slot.param.tensor for slot in self._buckets[bucket].buffers.slots]
        unfinished = UnfinishedBucket(
            tensors,
            gathering,
            on_read=partial(self._reading.read, bucket),
            on_failure=self._read_failed,
        )
        self._unfinished.append(unfinished)

    def reading_order(self) -> Sequence[int]:
        """The buckets in the order in which forward reads them; the same on all ranks."""
        if not self._buckets:
            return ()
        return self._reading.agreed(self._gather_communicator, self._buckets[0].present.device)

    def step_done(self) -> None:
        """Nothing of this step is needed any more, unless readers are to wait for it."""
        if self._hooked is not None:
            self._hooked.forget()
        for bucket in self._buckets:
            bucket.forget_noted()
        if not may_be_read_later():
            self.finish_reads()

    def finish_reads(self) -> None:
        """Wait for every gather that was left to readers."""
        start_and_wait(Reading, self._unfinished)
        self._unfinished.clear()

    def settle(self) -> None:
        """Let everything under way end, before these buckets are given up for others."""
        self.finish_reads()
        for bucket in range(self.bucket_count):
            self.renew(bucket)

    def idle(self) -> set[torch.Tensor]:
        """Parameters for which no rank had a gradient in the last step."""
        return {
            slot.param.tensor
            for bucket in self._buckets
            for slot, absent in zip(bucket.buffers.slots, bucket.absent, strict=False)
            if absent
        }

    def skip(self, tensors: Collection[torch.Tensor]) -> None:
        """Take these for parameters without a gradient, until told otherwise."""
        self._reductions.skipped = tensors

    def follow_moved_parameters(self) -> None:
        """Notice parameters whose data was replaced since the last step."""
        for bucket in self._buckets:
            bucket.buffers.follow_moved_parameters()

    def spread_parameters(self) -> None:
        """Gather whole parameters that stay from shards that are apart from them."""
        spread_parameters(self.every_buffers(), self._gather_communicator)

    def every_buffers(self) -> list[BucketBuffers]:
        """Of trained and of frozen buckets."""
        return [*(bucket.buffers for bucket in self._buckets), *self._still]

    def buffers_of(self, names: Collection[str]) -> list[BucketBuffers]:
        """The buffers of the buckets that hold these parameters, trained or frozen."""
        return [buffers for buffers in self.every_buffers() if buffers.bucket.params[0] in names]

    @property
    def at_work(self) -> Sequence[BucketAtWork]:
        """The buckets that are trained."""
        return self._buckets

    @property
    def gathers_with(self) -> Communicator:
        """What parameters are gathered with."""
        return self._gather_communicator

    def gradient_counts(self) -> list[int]:
        """How many gradients fill each bucket. One that was frozen a moment ago may be thawed again: a bucket that
        waits for it in vain is handed on when backward ends."""
        return [len(bucket.buffers.slots) for bucket in self._buckets]

    def remove_hooks(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def _install_hooks(self) -> None:
        arrived = None if self._watch is None else self._watch.arrived
        for index, bucket in enumerate(self._buckets):
            wait = wait_for_reduction(bucket)
            for slot in bucket.buffers.slots:
                tensor = slot.param.tensor
                move = MoveGradientHome(bucket, slot, self._adopts, index, arrived)
                with _taken_for_thawed(tensor):
                    self.hooks.append(tensor.register_post_accumulate_grad_hook(move))  # type: ignore[no-untyped-call]
                    if arrived is not None:
                        self.hooks.append(tensor.register_hook(wait))  # type: ignore[no-untyped-call]


@contextmanager
def _taken_for_thawed(tensor: torch.Tensor) -> Iterator[None]:
    """Autograd takes hooks only for what is trained; one that was frozen a moment ago may be thawed again."""
    is_frozen = not tensor.requires_grad
    if is_frozen:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        if is_frozen:
            tensor.requires_grad_(False)
