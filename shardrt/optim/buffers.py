"""The memory of one bucket: parameters and gradients laid out as they travel, and the views that make copies needless.

Note [Homes]: a parameter whose shards lie side by side in its bucket lives there: ``p.data`` becomes a view of the
bucket's buffer, so gathering writes straight into the model. Where that is not possible (its storage is shared with
something else, or its strides are not row-major while it is cut) it stays where it is and is *staged*: copied into the
buffer before the step and out of it after the gather.

Note [Gradients stay]: a communicator that takes pieces sends gradients from where autograd left them, and ``p.grad`` is
autograd's own tensor. Nothing is copied, and the memory goes with ``zero_grad``, to be used by the next forward. For
other communicators an autograd hook moves a fresh gradient into the bucket, as parameters are, and leaves ``p.grad`` as
a view of it, so that it exists once.

Note [Local gradients stay]: reductions write to a buffer of their own. ``p.grad`` is this rank's own gradient before
and after the step, so accumulating on, stepping twice or never zeroing mean what they mean without sharding.

Note [Coming and going]: under strategies that shard parameters or gradients too, the whole ones are there only while
somebody computes with them. The memory of parameters is given back by resizing the storage to nothing, and obtained
again by resizing it back: views of it (``p.data``, what autograd has saved) then show what is gathered into it, so a
forward need not know that the memory went and came again in between. Gradients stay where autograd left them, are sent
from there, and go when they have arrived: see Note [In pieces]. What stays is this rank's run of the parameters, which
is stepped, and of the reduced gradients, to which every further backward adds until ``zero_grad``.

Note [Shards apart]: this rank's run of the parameters is a view of the whole buffer where that stays and has the
parameters' own dtype. Where the whole goes, or is of a lower precision, the run is kept apart, in their own dtype: it
is the one that counts, and each gather begins with a copy of it.

Note [Shared memory]: what stays where it is lies in memory that the communicator's peers can read, where it offers such
(:class:`shardrt.protocols.SharedAllocator`): they then reduce and gather straight from it.

Note [Shown where they are]: where it can also show all ranks' shards side by side without a copy
(:class:`shardrt.protocols.RunViewer`), the whole parameters are such a view. It takes no memory, so there is nothing to
give back or to obtain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardrt.comm.viewed import allocate_run
from shardrt.optim.kept import note_kept_apart
from shardrt.optim.params import NamedParam
from shardrt.optim.readers import is_watched
from shardrt.optim.residence import OWN_PRECISION, RESIDENT, Precision, Residence
from shardrt.optim.slots import Slot, check_unchanged, may_move, shaped, slots_of
from shardrt.plan import Bucket, Shard
from shardrt.protocols import RunView

Allocate = Callable[[int, torch.dtype], "torch.Tensor | None"]


class BucketBuffers:
    """The buffers of one bucket on this rank."""

    def __init__(
        self,
        bucket: Bucket,
        params: Mapping[str, NamedParam],
        *,
        rank: int,
        holds_gradients: bool,
        holds_reduced: bool,
        residence: Residence = RESIDENT,
        precision: Precision = OWN_PRECISION,
        shared: Allocate | None = None,
    ) -> None:
        """``holds_gradients``: this rank's own; ``holds_reduced``: the reduced ones of this rank's run. ``shared``: see
        Note [Shared memory]."""
        self.bucket = bucket
        self.rank = rank
        self.residence = residence
        device = params[bucket.params[0]].tensor.device
        own: torch.dtype = getattr(torch, bucket.dtype)
        lower = precision if own.is_floating_point else OWN_PRECISION
        self.reduce_dtype = lower.reduce or lower.params or own
        self._shared = shared if device.type == "cpu" else None
        self.params = self._lasting(
            bucket.numel, lower.params or own, {"device": device}, shares=residence.params and not residence.offload
        )
        self.view: RunView | None = None
        self.own_start = sum(bucket.splits[:rank])
        count = bucket.splits[rank]
        self._own_run = self.params[self.own_start : self.own_start + count]
        self.shard_is_apart = not residence.params or residence.offload or self.params.dtype != own
        self.at_rest = resting_memory(device, residence)
        self.shard = self._kept_apart(count, own) if self.shard_is_apart else self._own_run
        """This rank's run of the parameters: what is stepped. See Note [Shards apart]."""
        self.slots = slots_of(bucket, params)
        for slot in self.slots:
            self._settle(slot)
        self.staged = [slot for slot in self.slots if slot.home is None]
        if not residence.params:
            self.give_back_params()
        self.gradients: torch.Tensor | None = None
        self.reduced: torch.Tensor | None = None
        """Where reduced gradients arrive, once :mod:`shardrt.optim.arrivals` has given it a place."""
        self.holds_reduced = holds_reduced
        self.run = count
        self.reduced_kind = (self.reduce_dtype if lower.keeps_low_gradients else own, self.at_rest["device"])
        if holds_gradients and residence.gradients:
            self.gradients = self._lasting(bucket.numel, self.params.dtype, {"device": device}).zero_()
            for slot in self.slots:
                if slot.in_one_piece:
                    slot.gradient = shaped(self.gradients, slot.offsets[0][0], slot.param.tensor, slot.home is not None)
        note_kept_apart([slot.param.tensor for slot in self.slots], own if self.shard_is_apart else None)

    def _kept_apart(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """As peers can show it in their buckets. See Note [Shown where they are]."""
        shared = self._shared
        run = allocate_run(shared, count, dtype, self.own_start) if shared is not None and count else None
        return torch.empty(count, dtype=dtype, **self.at_rest) if run is None else run

    def look_through(self, view: RunView) -> None:
        """From now on whole parameters are this view. They must be away. See Note [Shown where they are]."""
        self.view = view
        with torch._C.DisableTorchFunctionSubclass():
            self._live_in(view.whole)

    def _live_in(self, memory: torch.Tensor) -> None:
        """Whole parameters are in this memory from now on. What they had counts no more."""
        self.params = memory
        self._own_run = memory[self.own_start : self.own_start + self.run]
        for slot in self.slots:
            if slot.home is not None:
                home = shaped(memory, slot.offsets[0][0], slot.home, keep_strides=True)
                slot.move_to(home, shows=self.view is not None)

    def _lasting(
        self, numel: int, dtype: torch.dtype, where: Mapping[str, Any], *, shares: bool = True
    ) -> torch.Tensor:
        memory = self._shared(numel, dtype) if self._shared is not None and shares else None
        return torch.empty(numel, dtype=dtype, **where) if memory is None else memory

    def _settle(self, slot: Slot) -> None:
        tensor = slot.param.tensor
        if not self.residence.params or is_watched(tensor):
            self._settle_away(slot)
            return
        if self.params.dtype != tensor.dtype:
            tensor.data = tensor.detach().to(self.params.dtype, copy=True)
        if slot.in_one_piece and may_move(tensor, cut=len(slot.offsets) > 1):
            home = shaped(self.params, slot.offsets[0][0], tensor, keep_strides=True)
            home.copy_(tensor.detach())
            slot.move_to(home)
        else:
            self._load(slot)

    def _settle_away(self, slot: Slot) -> None:
        """Its values are in shards only, which are put in place by whoever has them: it gets a place without any, and
        what it had goes before the next bucket is made."""
        with torch._C.DisableTorchFunctionSubclass():
            tensor = slot.param.tensor
            like = torch.empty_like(tensor.detach(), dtype=self.params.dtype, device="meta")
            if slot.in_one_piece and (like.is_contiguous() or len(slot.offsets) == 1):
                slot.move_to(shaped(self.params, slot.offsets[0][0], like, keep_strides=True))
            else:
                tensor.data = torch.empty_like(like, device=self.params.device)

    @property
    def reduces_in_place(self) -> bool:
        """See Note [Reduced in place]."""
        whole = self.gradients
        fits = whole is not None and (whole.dtype, whole.device) == self.reduced_kind and whole.numel() == self.run
        return fits and self.holds_reduced and self.residence.gradients and len(self.bucket.splits) == 1

    def put_reduced(self, memory: torch.Tensor | None) -> None:
        """Reduced gradients arrive here from now on."""
        self.reduced = memory

    def follow_moved_parameters(self) -> None:
        """A parameter whose data was replaced (``p.data = ...``) is brought home, with its new values."""
        if not self.residence.params:
            return
        moved = False
        for slot in self.slots:
            tensor = slot.param.tensor
            home = slot.home
            if home is None or tensor.data_ptr() == home.data_ptr() or not tensor.numel():
                continue
            check_unchanged(slot.param.name, home, tensor)
            home.copy_(tensor.detach())
            tensor.data = home
            moved = True
        if moved and self.shard_is_apart:
            self.take_shard()

    def load_staged(self) -> None:
        """Copy staged parameters into the buffer, where their shards are stepped."""
        if not self.shard_is_apart:
            self.load_all()

    def load_all(self) -> None:
        """Copy every parameter that is not at home into the buffer."""
        for slot in self.staged:
            self._load(slot)

    def store_staged(self) -> None:
        """Copy staged parameters out of the buffer after the gather."""
        for slot in self.staged:
            # Not detach: who gathers tells autograd if these are new values, and not if they only come back.
            whole = slot.param.tensor.data
            if slot.in_one_piece:
                whole.copy_(shaped(self.params, slot.offsets[0][0], whole, keep_strides=False))
                continue
            flat = torch.empty(whole.numel(), dtype=whole.dtype, device=whole.device)
            for offset, shard in slot.offsets:
                flat[shard.start : shard.stop].copy_(self.params[offset : offset + shard.numel])
            whole.copy_(flat.view(whole.shape))

    def _load(self, slot: Slot) -> None:
        flat = slot.param.tensor.detach().reshape(-1)
        for offset, shard in slot.offsets:
            self.params[offset : offset + shard.numel].copy_(flat[shard.start : shard.stop])

    @property
    def sends_shard(self) -> bool:
        """Whether this rank's run can be sent from where it is kept."""
        kept, whole = self.shard, self._own_run
        return self.shard_is_apart and (kept.dtype, kept.device) == (whole.dtype, whole.device)

    def load_own_run(self) -> None:
        """What is about to be gathered begins with this rank's run as it is kept."""
        if self.shard_is_apart:
            self._own_run.copy_(self.shard)

    def take_shard(self) -> None:
        """The whole parameters have new values: this rank's run follows."""
        if self.shard_is_apart:
            self.load_all()
            self.shard.copy_(self._own_run)

    def give_back_params(self) -> None:
        """The whole parameters are needed no more: only this rank's run stays.

        One whose data was replaced meanwhile (``p.data = ...`` in a forward) is a view of the bucket again.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for slot in self.slots:
                tensor = slot.param.tensor
                if slot.home is not None and tensor.data_ptr() != slot.home.data_ptr():
                    tensor.data = slot.home
            if not all(memory.untyped_storage().resizable() for memory in self._whole_memory()):
                self._leave_memory()
            for memory in self._whole_memory():
                memory.untyped_storage().resize_(0)

    def _leave_memory(self) -> None:
        """Memory that NumPy or another process has seen cannot be given back by us: it goes when they are done with it,
        and the whole parameters get other memory."""
        if self.view is None:
            self._live_in(torch.empty_like(self.params))
        for slot in self.staged:
            slot.param.tensor.data = torch.empty_like(slot.param.tensor.detach())

    def obtain_params(self) -> None:
        """Memory for the whole parameters, to be gathered."""
        for memory in self._whole_memory():
            _obtain(memory)

    def _whole_memory(self) -> list[torch.Tensor]:
        with torch._C.DisableTorchFunctionSubclass():
            staged = [slot.param.tensor.detach() for slot in self.staged]
            return staged if self.view is not None else [self.params, *staged]

    def shard_of(self, slot: Slot, offset: int, shard: Shard) -> torch.Tensor:
        """What the local optimizer steps: the whole parameter in its shape, or a flat range of it."""
        return self._part(self.shard, slot, offset, shard)

    def reduced_gradient_of(self, slot: Slot, offset: int, shard: Shard) -> torch.Tensor:
        """Where the reduction of one owned shard's gradient arrives, shaped like the shard."""
        assert self.reduced is not None
        return self._part(self.reduced, slot, offset, shard)

    def reduced_gradient_of_shard(self, slot: Slot | None, shard: Shard) -> torch.Tensor:
        """The same, by the shard alone."""
        assert slot is not None
        offset = next(offset for offset, other in slot.offsets if other == shard)
        return self.reduced_gradient_of(slot, offset, shard)

    def _part(self, run: torch.Tensor, slot: Slot, offset: int, shard: Shard) -> torch.Tensor:
        start = offset - self.own_start
        if shard.numel == slot.param.tensor.numel():
            return shaped(run, start, slot.param.tensor, keep_strides=slot.home is not None)
        return run[start : start + shard.numel]


def resting_memory(device: torch.device, residence: Residence) -> dict[str, Any]:
    """Where what stays between steps is allocated, as arguments of torch's functions.

    Example:
        >>> import torch
        >>> from shardrt.optim.buffers import resting_memory
        >>> from shardrt.optim.residence import Residence
        >>> resting_memory(torch.device("cuda"), Residence(offload=True, pins=True))
        {'device': device(type='cpu'), 'pin_memory': True}
        >>> resting_memory(torch.device("cpu"), Residence(offload=True, pins=True))
        {'device': device(type='cpu')}
    """
    if not residence.offload:
        return {"device": device}
    pinned = {"pin_memory": True} if residence.pins and device.type != "cpu" else {}
    return {"device": torch.device("cpu"), **pinned}


def _obtain(memory: torch.Tensor) -> None:
    storage, nbytes = memory.untyped_storage(), memory.numel() * memory.element_size()
    if storage.nbytes() != nbytes:
        storage.resize_(nbytes)
