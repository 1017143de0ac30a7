"""Many small shards that lie side by side are stepped as one; large ones piece by piece.

Note [Flat runs]: torch's optimizers spend a dozen operations on each tensor, whatever its size, so a step over
thousands of small shards is mostly overhead. Shards of a bucket lie side by side, and so do their gradients. Where the
update looks at one element at a time it does not matter where one shard ends: a run of them is handed to the optimizer
as one flat parameter, with flat state. That state is shown shard by shard, as views, to whoever looks (checkpoints,
``opt.state``); what an optimizer counts per parameter (``step``) is an entry of a vector there. So nothing is to be
undone when shards must be stepped one by one, as they are when one of them has no gradient or their counts differ:
each has its own state at all times, and a run is joined again from whatever it finds.

Only what has been proved to give the same bits is joined, see ``tests/unit/test_flat_runs.py``: single and double
precision on the CPU, not fused (a fused kernel rounds the last elements of a tensor otherwise than those before, and so
does arithmetic in half precision). Accelerators have kernels for many tensors at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from operator import is_, itemgetter
from typing import Any

import attrs
import torch

from shardrt.optim.cutting import CutShard, is_large, may_cut

LONGEST = 1 << 16
"""Elements of a run at most: what the update reads and writes should stay in a processor's cache."""

State = dict[torch.Tensor, dict[str, Any]]
_DTYPES = (torch.float32, torch.float64)


class FlatSteps:
    """Steps an optimizer, with runs of shards joined, and large ones cut. See Note [Flat runs] and Note [Pieces for the
    cache]."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._layouts: dict[tuple[int, int], _Layout] = {}
        """By what is stepped together: its first shard, and how many."""

    def forget(self) -> None:
        """Shards are about to live elsewhere."""
        self._layouts.clear()

    def step(self, step: Callable[[], Any], shards: Sequence[torch.nn.Parameter] | None) -> None:
        """Call the optimizer's own ``step`` for some shards, or for all."""
        groups = self._optimizer.param_groups
        everything = [group["params"] for group in groups]
        layout = self._layout_of(everything, list(chain(*everything)) if shards is None else list(shards))
        state: State = self._optimizer.state
        stepped = [list(loose) for loose in layout.loose]
        joined = []
        cut = []
        for run in layout.runs:
            if _may_join(groups[run.group]) and run.join(state):
                joined.append(run)
                stepped[run.group].append(run.flat)
            else:
                stepped[run.group] += run.shards
        for index, large in layout.large:
            if may_cut(groups[index]) and large.cut(state):
                cut.append(large)
                stepped[index] += large.pieces
            else:
                stepped[index].append(large.shard)
        try:
            for group, params in zip(groups, stepped, strict=True):
                group["params"] = params
            step()
        finally:
            for run in joined:
                run.part(state)
            for large in cut:
                large.join(state)
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params

    def _layout_of(self, groups: Sequence[Sequence[torch.nn.Parameter]], shards: list[torch.nn.Parameter]) -> _Layout:
        key = (id(shards[0]) if shards else 0, len(shards))
        places = [shard.data_ptr() for shard in shards]
        layout = self._layouts.get(key)
        if layout is None or layout.places != places or not _same(layout.shards, shards):
            self._layouts.pop(key, None)
            layout = self._layouts[key] = _lay_out(groups, shards, places)
        return layout


@attrs.frozen(kw_only=True, eq=False)
class _Layout:
    """What is stepped together: in runs, in pieces (with the number of its group), and by group what is neither."""

    shards: list[torch.nn.Parameter]
    places: list[int]
    runs: list[_Run]
    large: list[tuple[int, CutShard]]
    loose: list[list[torch.nn.Parameter]]


def _lay_out(
    groups: Sequence[Sequence[torch.nn.Parameter]], shards: list[torch.nn.Parameter], places: list[int]
) -> _Layout:
    wanted = set(map(id, shards))
    runs: list[_Run] = []
    large: list[tuple[int, CutShard]] = []
    loose = []
    for index, group in enumerate(groups):
        chosen = [shard for shard in group if id(shard) in wanted]
        found = [_Run(index, run) for run in _runs(chosen)]
        in_runs = {id(shard) for run in found for shard in run.shards}
        runs += found
        large += [(index, CutShard(shard)) for shard in chosen if is_large(shard)]
        loose.append([shard for shard in chosen if id(shard) not in in_runs and not is_large(shard)])
    return _Layout(shards=shards, places=places, runs=runs, large=large, loose=loose)


def _runs(shards: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    run: list[torch.nn.Parameter] = []
    length = 0
    for shard in sorted(filter(_fits, shards), key=torch.Tensor.data_ptr):
        if run and not (length + shard.numel() <= LONGEST and _side_by_side(run[-1], shard)):
            yield from _if_worth_it(run)
            run, length = [], 0
        run.append(shard)
        length += shard.numel()
    yield from _if_worth_it(run)


def _if_worth_it(run: list[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    # Where every shard is a scalar, what is kept per element cannot be told from what is kept per parameter.
    if len(run) > 1 and any(shard.dim() for shard in run):
        yield run


def _fits(shard: torch.nn.Parameter) -> bool:
    right_kind = shard.dtype in _DTYPES and shard.device.type == "cpu" and type(shard) is torch.nn.Parameter
    return right_kind and 0 < shard.numel() < LONGEST and shard.is_contiguous() and shard.grad is not None


def _side_by_side(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.data_ptr() + one.numel() * one.element_size() == other.data_ptr()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def _may_join(group: Mapping[str, Any]) -> bool:
    return not group.get("fused") and not group.get("differentiable")


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether these are the same objects."""
    return all(map(is_, some, others))


def _flat(parts: Sequence[torch.Tensor], numel: int) -> torch.Tensor:
    first = parts[0].detach()
    return first.as_strided((numel,), (1,), first.storage_offset())


class _Run:
    """Shards of one group that lie side by side."""

    def __init__(self, group: int, shards: list[torch.nn.Parameter]) -> None:
        self.group = group
        self.shards = shards
        self._sizes = [shard.numel() for shard in shards]
        self.flat = torch.nn.Parameter(_flat(shards, sum(self._sizes)))
        self._grad_places: list[int] = []
        self._shown: list[dict[str, Any]] = []
        """The shards' states, as the optimizer's ``state`` has them."""
        self._kept: dict[str, Any] = {}
        """The flat state, as of the last step."""
        self._parts: dict[str, Sequence[Any]] = {}
        """What each shard's state shows of it."""
        self._counts: dict[str, torch.Tensor] = {}
        """Those entries that are one number for each shard."""

    def join(self, state: State) -> bool:
        """Let the flat parameter stand for the shards in the optimizer's state, if it can in this step."""
        gradients = [shard.grad for shard in self.shards]
        states = [state.get(shard) for shard in self.shards]
        if not self._join_gradients(gradients):
            return False
        if not any(states):
            self._kept, self._parts, self._counts = {}, {}, {}
        elif not self._shows(states) and not self._take(states):
            return False
        for key, count in self._counts.items():
            if not bool((count == count[0]).all()):
                return False
            self._kept[key].copy_(count[0])
        if self._kept:
            state[self.flat] = dict(self._kept)
        return True

    def part(self, state: State) -> None:
        """Show the state after the step shard by shard."""
        now = state.pop(self.flat, None)
        if not now:
            return
        if not self._kept:
            self._shown = [state[shard] for shard in self.shards]
        for key, value in now.items():
            if key in self._counts and isinstance(value, torch.Tensor):
                self._counts[key].fill_(value)
            elif key not in self._parts or value is not self._kept[key]:
                self._show(key, value)
        self._kept = now

    def _join_gradients(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        there = [gradient for gradient in gradients if gradient is not None]
        if len(there) < len(gradients):
            return False
        places = [gradient.data_ptr() for gradient in there]
        if places != self._grad_places or self.flat.grad is None:
            alike = all(
                gradient.is_contiguous() and gradient.dtype == self.flat.dtype and gradient.shape == shard.shape
                for gradient, shard in zip(there, self.shards, strict=True)
            )
            if not alike or not all(_side_by_side(one, other) for one, other in pairwise(there)):
                return False
            self.flat.grad = _flat(there, self.flat.numel())
            self._grad_places = places
        return True

    def _shows(self, states: Sequence[dict[str, Any] | None]) -> bool:
        """Whether the shards' states are what was shown last."""
        if not self._kept or not _same(states, self._shown):
            return False
        entries = len(self._parts)
        return all(len(one) == entries and one.keys() == self._parts.keys() for one in self._shown) and all(
            _same(list(map(itemgetter(key), self._shown)), parts) for key, parts in self._parts.items()
        )

    def _take(self, states: Sequence[dict[str, Any] | None]) -> bool:
        """Make flat state of what the shards have, and show them that; nothing is changed where that cannot be."""
        first = states[0]
        if first is None or any(one is None or one.keys() != first.keys() for one in states):
            return False
        own = [one for one in states if one is not None]
        found = {key: [one[key] for one in own] for key in first}
        per_element = {key for key, values in found.items() if self._is_per_element(values)}
        if not all(key in per_element or _is_one_value(values) for key, values in found.items()):
            return False
        self._shown, self._kept, self._parts, self._counts = own, {}, {}, {}
        for key, values in found.items():
            if key in per_element:
                value = torch.empty(self.flat.numel(), dtype=values[0].dtype, device=values[0].device)
                torch._foreach_copy_(list(self._split(value)), values)
            else:
                value = values[0].clone() if isinstance(values[0], torch.Tensor) else values[0]
            self._show(key, value)
            self._kept[key] = value
        return True

    def _is_per_element(self, values: Sequence[Any]) -> bool:
        return all(
            isinstance(value, torch.Tensor) and value.shape == shard.shape and value.dtype == values[0].dtype
            for value, shard in zip(values, self.shards, strict=True)
        )

    def _show(self, key: str, value: Any) -> None:
        self._counts.pop(key, None)
        parts: Sequence[Any]
        if isinstance(value, torch.Tensor) and value.dim():
            parts = self._split(value)
        elif isinstance(value, torch.Tensor):
            self._counts[key] = value.expand(len(self.shards)).clone()
            parts = self._counts[key].unbind()
        else:
            parts = [value] * len(self.shards)
        self._parts[key] = parts
        for one, part in zip(self._shown, parts, strict=True):
            one[key] = part

    def _split(self, value: torch.Tensor) -> list[torch.Tensor]:
        pieces = value.detach().split_with_sizes(self._sizes)
        return [piece.view(shard.shape) for piece, shard in zip(pieces, self.shards, strict=True)]


def _is_one_value(values: Sequence[Any]) -> bool:
    """Whether shards have a number in common: of Python's, or in a tensor of its own."""
    first = values[0]
    if isinstance(first, torch.Tensor):
        alike = all(
            isinstance(value, torch.Tensor) and not value.dim() and value.dtype == first.dtype for value in values
        )
        return alike and bool((torch.stack(list(values)) == first).all())
    return isinstance(first, int | float | None) and all(
        type(value) is type(first) and value == first for value in values
    )
