"""How gradients get into a bucket's buffers, and how one tells which of them there are.

Note [Missing gradients]: without sharding a parameter that got no gradient is not stepped: no weight decay, no
momentum. One that got a gradient on some ranks only is stepped, the others counting as zero, as under DDP. Owners
must know which case it is, so each bucket's reduction is followed by one byte per parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import attrs
import torch

from shardrt.errors import SparseGradientError
from shardrt.optim.buffers import BucketBuffers
from shardrt.optim.settings import MARKS
from shardrt.optim.slots import Slot, check_unchanged
from shardrt.plan import Shard
from shardrt.protocols import Work

Pieces = list[torch.Tensor]


@attrs.define(eq=False)
class OwnedShard:
    """A shard this rank steps: the parameter object its optimizer holds, and where its gradient arrives."""

    shard: Shard
    stepped: torch.nn.Parameter
    slot: Slot | None = None
    """Its place in a bucket; None while the parameter is frozen."""
    gradient: torch.Tensor | None = None


@attrs.define(eq=False)
class BucketAtWork:
    """A bucket's buffers and what is under way with them."""

    buffers: BucketBuffers
    owned: list[tuple[int, OwnedShard]] = attrs.field(factory=list)
    """This rank's shards, with the index of their slot."""
    reduction: Work | None = None
    outdated: bool = False
    """Gradients have come in since the reduction was started."""
    noted: bool = False
    """Whether this step's gradients have been noted."""
    version: int = -1
    keeps_gradients: bool = True
    """Whether ``p.grad`` is nobody else's to change: DDP writes to gradients when backward has ended."""
    held: list[tuple[torch.Tensor | None, int]] = attrs.field(factory=list)
    accumulated: torch.Tensor | None = None
    """Where whole gradients go: for each slot, whether what was reduced since ``zero_grad`` holds a gradient."""
    absent: list[bool] = attrs.field(factory=list)
    """For each slot, whether no rank had a gradient in the last step."""
    present: torch.Tensor = attrs.field(init=False)
    """For each slot, whether this rank (after the reduction: any rank) has a gradient, see Note [Missing gradients];
    then the marks of the settings it is to be stepped with, see :mod:`shardrt.optim.settings`."""

    def note_gradients(self) -> None:
        """Remember what the reduction was started with. Views share the counter of the buffer they are of, so one
        number tells whether anybody has written to any gradient since; what is not such a view has its own."""
        self.outdated = False
        self.noted = True
        self.version = -1 if self.buffers.gradients is None else self.buffers.gradients._version
        if self.keeps_gradients:
            self.held = [_held(slot) for slot in self.buffers.slots]

    def forget_noted(self) -> None:
        """Nobody compares with them any more, and they may be the last to hold the memory of gradients."""
        self.noted = False
        self.held = []

    def gradients_changed(self) -> bool:
        """Whether any gradient has changed since the reduction was started, or was replaced."""
        if not self.buffers.residence.gradients:
            # They went with the reduction, so whatever is there is new.
            return self.outdated or any(slot.param.tensor.grad is not None for slot in self.buffers.slots)
        if self.buffers.gradients is not None and self.buffers.gradients is self.buffers.reduced:
            # They are the average, and the step takes them as they are: whoever writes to them means the update.
            return self.outdated or any(
                gradient is not slot.param.tensor.grad
                for (gradient, _), slot in zip(self.held, self.buffers.slots, strict=False)
            )
        now = -1 if self.buffers.gradients is None else self.buffers.gradients._version
        if self.outdated or now != self.version:
            return True
        if not self.keeps_gradients:
            return False
        pairs = zip(self.held, self.buffers.slots, strict=True)
        return any(
            gradient is not slot.param.tensor.grad or version != _held(slot)[1] for (gradient, version), slot in pairs
        )

    @present.default
    def _no_gradients_yet(self) -> torch.Tensor:
        return torch.zeros(len(self.buffers.slots) + MARKS, dtype=torch.int8, device=self.buffers.params.device)


def _held(slot: Slot) -> tuple[torch.Tensor | None, int]:
    """What ``p.grad`` is, and its count of changes where that is not the bucket's."""
    gradient = slot.param.tensor.grad
    return gradient, -1 if gradient is None or gradient is slot.gradient else gradient._version


def collect_gradients(buffers: BucketBuffers, adopts: bool, skipped: Collection[torch.Tensor]) -> list[int]:
    """Bring every gradient of the bucket into its place; says for each slot whether there was one.

    ``skipped`` are parameters that count as having none.
    """
    present = []
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for slot in buffers.slots:
        tensor = slot.param.tensor
        gradient = None if skipped and tensor in skipped else tensor.grad
        present.append(int(gradient is not None))
        if gradient is slot.gradient and gradient is not None:
            continue
        if gradient is None:
            if not skipped or tensor.grad is None:
                _zero(buffers, slot)
            continue
        refuse_sparse(slot.param.name, gradient)
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


def bring_nothing(buffers: BucketBuffers) -> list[int]:
    """Take part in a reduction without gradients; says for each slot that there is none."""
    assert buffers.gradients is not None
    buffers.gradients.zero_()
    return [0] * len(buffers.slots)


def take_pieces(
    buffers: BucketBuffers, absent: bool, skipped: Collection[torch.Tensor], *, stay: bool
) -> tuple[Pieces, list[int]]:
    """The gradients of the bucket as they lie in memory, in the order of its buffers, and for each slot whether there
    was one. ``p.grad`` shows them no more, unless they ``stay``. ``absent``: this rank has none, whatever is in
    ``p.grad``.
    """
    pieces: list[tuple[int, torch.Tensor]] = []
    present = []
    zeros: torch.Tensor | None = None
    for slot in buffers.slots:
        tensor = slot.param.tensor
        gradient = None if absent or (skipped and tensor in skipped) else tensor.grad
        present.append(int(gradient is not None))
        if gradient is None:
            if zeros is None:
                longest = max(shard.numel for other in buffers.slots for _, shard in other.offsets)
                zeros = torch.zeros(longest, dtype=buffers.reduce_dtype, device=buffers.params.device)
            pieces += [(offset, zeros[: shard.numel]) for offset, shard in slot.offsets]
        else:
            refuse_sparse(slot.param.name, gradient)
            flat = _flat(slot, gradient, buffers.reduce_dtype)
            whole = len(slot.offsets) == 1 and slot.offsets[0][1].numel == flat.numel()
            if whole:
                pieces.append((slot.offsets[0][0], flat))
            else:
                pieces += [(offset, flat[shard.start : shard.stop]) for offset, shard in slot.offsets]
        if not stay:
            tensor.grad = None
    return [piece for _, piece in sorted(pieces, key=lambda placed: placed[0])], present


def _flat(slot: Slot, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Flat, in the order in which the bucket has the parameter's elements, with bytes that mean what they say: of most
    gradients, which there may be thousands of, a view or the tensor itself."""
    home = slot.home
    as_it_is = (
        gradient.dtype == dtype
        and not gradient.requires_grad
        and not gradient.is_conj()
        and not gradient.is_neg()
        and gradient.is_contiguous()
        and (home is None or home.is_contiguous())
    )
    if as_it_is:
        return gradient if gradient.dim() == 1 else gradient.view(-1)
    return _in_order(slot, gradient.detach().resolve_conj().resolve_neg()).to(dtype)


def _in_order(slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
    """Flat, in the order in which the bucket has the parameter's elements; a view where that is how they lie."""
    home = slot.home
    if home is None or home.is_contiguous():
        return gradient.reshape(-1).contiguous()
    if gradient.stride() != home.stride():
        gradient = torch.empty_strided(home.shape, home.stride(), dtype=gradient.dtype, device=gradient.device).copy_(
            gradient
        )
    return gradient.as_strided((gradient.numel(),), (1,))


def scale_where_they_are(slots: Sequence[Slot], factor: torch.Tensor) -> None:
    """Multiply what ``p.grad`` shows. One tensor may be that of several parameters, or show one element many times."""
    scaled: dict[int, torch.Tensor] = {}
    for slot in slots:
        gradient = slot.param.tensor.grad
        if gradient is None:
            continue
        if id(gradient) not in scaled:
            overlaps = any(
                stride == 0 and size > 1 for stride, size in zip(gradient.stride(), gradient.shape, strict=True)
            )
            scaled[id(gradient)] = gradient * factor if overlaps else gradient.mul_(factor)
        if scaled[id(gradient)] is not gradient:
            slot.param.tensor.grad = scaled[id(gradient)]


def _zero(buffers: BucketBuffers, slot: Slot) -> None:
    assert buffers.gradients is not None
    for offset, shard in slot.offsets:
        buffers.gradients[offset : offset + shard.numel].zero_()


class MoveGradientHome:
    """What is called when a parameter's gradient was accumulated. Models have many parameters: this is kept small."""

    __slots__ = ("_adopts", "_arrived", "_bucket", "_index", "_slot")

    def __init__(
        self, bucket: BucketAtWork, slot: Slot, adopts: bool, index: int, arrived: Callable[[int, int], None] | None
    ) -> None:
        """``arrived`` is told the index of the bucket, and of which parameter the gradient is."""
        self._bucket = bucket
        self._slot = slot
        self._adopts = adopts
        self._index = index
        self._arrived = arrived

    def __call__(self, tensor: torch.Tensor) -> None:
        """See :meth:`torch.Tensor.register_post_accumulate_grad_hook`."""
        self._bucket.outdated = True
        gradient, home = tensor.grad, self._slot.gradient
        if gradient is not home and gradient is not None:
            refuse_sparse(self._slot.param.name, gradient)
            # A gradient that is itself part of a graph (create_graph=True) must stay in it; the step copies it.
            if self._adopts and home is not None and not gradient.requires_grad:
                check_unchanged(self._slot.param.name, home, gradient)
                home.copy_(gradient)
                tensor.grad = home
        if self._arrived is not None:
            self._arrived(self._index, id(tensor))


def wait_for_reduction(bucket: BucketAtWork) -> Callable[[torch.Tensor], None]:
    """Before a gradient is added to: the bytes it lies in may still be on their way from an earlier backward."""

    def hook(_: torch.Tensor) -> None:
        reduction = bucket.reduction  # another thread may take it away
        if reduction is not None:
            reduction.wait()

    return hook


def part_of_gradient(slot: Slot, shard: Shard) -> torch.Tensor | None:
    """For gradients that are reduced already: the part of ``p.grad`` that belongs to a shard."""
    gradient = slot.param.tensor.grad
    if gradient is None:
        return None
    refuse_sparse(slot.param.name, gradient)
    if shard.numel == slot.param.tensor.numel():
        return gradient
    return gradient.detach().reshape(-1)[shard.start : shard.stop]


def refuse_sparse(name: str, gradient: torch.Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise SparseGradientError(
            f"parameter {name!r} received a gradient with layout {gradient.layout}; flat buffers hold dense ones only: "
            "build its module without sparse gradients (torch.nn.Embedding(sparse=False))"
        )
