"""Strict doubles of torch.distributed under vendors' backends: they run on Gloo and refuse what the vendors refuse.

The rules are written down here a second time, from the vendors' documentation (docs/backends.md names the sources) and
not from the plugins' capabilities: a double that asked the plugin what to refuse would prove nothing.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist


class DoubleRefusal(RuntimeError):
    """The real backend would have failed here, or silently got it wrong."""


@attrs.frozen(kw_only=True)
class Rules:
    """What one vendor's collectives take, by function."""

    vendor: str
    dtypes: Mapping[str, frozenset[str]]
    averages: bool
    sizes_refused: Mapping[str, frozenset[int]] = {}
    even_lists: bool = False
    """all_to_all of lists wants pieces of one size."""


class StrictDouble:
    """Has torch.distributed's functions as far as :class:`shardrt.comm.CollectiveCommunicator` may use them.

    ``watchdog`` plays the part of the process group's watchdog, which ends what takes too long although nobody waits
    with a time limit.
    """

    ReduceOp = dist.ReduceOp
    rules: Rules

    def __init__(self, watchdog: float = 60.0) -> None:
        self.watchdog = watchdog
        self.calls: list[str] = []

    def all_reduce(self, tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        self._check("all_reduce", group, tensor)
        self._check_op("all_reduce", op)
        return self._run("all_reduce", dist.all_reduce, tensor, op=op, group=group, async_op=async_op)

    def broadcast(self, tensor: Any, *, group_src: int, group: Any = None, async_op: bool = False) -> Any:
        self._check("broadcast", group, tensor)
        return self._run(
            "broadcast", dist.broadcast, _bytes(tensor), group_src=group_src, group=group, async_op=async_op
        )

    def all_to_all(
        self, outputs: Sequence[Any], inputs: Sequence[Any], group: Any = None, async_op: bool = False
    ) -> Any:
        self._check("all_to_all", group, *outputs, *inputs)
        size = dist.get_world_size(group)
        if len(outputs) != size or len(inputs) != size:
            self._refuse(f"all_to_all wants lists of {size} tensors")
        if self.rules.even_lists and len({tensor.numel() for tensor in (*outputs, *inputs)}) > 1:
            self._refuse("all_to_all of lists wants tensors of one size")
        self._check_disjoint("all_to_all", outputs, inputs)
        # Gloo's own all_to_all of lists is stricter than the vendors': it wants one size. So lists are packed for it.
        incoming = torch.cat([_bytes(tensor) for tensor in outputs])
        outgoing = torch.cat([_bytes(tensor) for tensor in inputs])
        sizes = [[tensor.nbytes for tensor in tensors] for tensors in (outputs, inputs)]
        watched = self._run(
            "all_to_all", dist.all_to_all_single, incoming, outgoing, *sizes, group=group, async_op=async_op
        )
        watched.then = lambda: [
            _bytes(tensor).copy_(part) for tensor, part in zip(outputs, incoming.split(sizes[0]), strict=True)
        ]
        return watched

    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        self._check("all_to_all", group, output, input)
        for tensor, sizes in ((output, output_split_sizes), (input, input_split_sizes)):
            if sizes is not None and sum(sizes) != tensor.numel():
                self._refuse("all_to_all_single wants split sizes that fill its tensors")
        return self._run(
            "all_to_all_single",
            dist.all_to_all_single,
            output,
            input,
            list(output_split_sizes or ()),
            list(input_split_sizes or ()),
            group=group,
            async_op=async_op,
        )

    def _reduce_scatter(self, name: str, output: Any, input: Any, op: Any, group: Any, async_op: bool) -> Any:
        self._check("reduce_scatter", group, output, input)
        self._check_op("reduce_scatter", op)
        size = dist.get_world_size(group)
        if input.numel() != output.numel() * size:
            self._refuse(f"{name} wants {size} even runs, got {input.numel()} elements for {output.numel()}")
        self._check_in_place(name, whole=input, run=output, rank=dist.get_rank(group))
        # Gloo's reduce_scatter is an all_reduce as well, but waits for ever, whatever limit its wait is given.
        whole, rank = input.clone(), dist.get_rank(group)
        watched = self._run(name, dist.all_reduce, whole, op=op, group=group, async_op=async_op)
        watched.then = lambda: output.copy_(whole.narrow(0, rank * output.numel(), output.numel()))
        return watched

    def _all_gather(self, name: str, output: Any, input: Any, group: Any, async_op: bool) -> Any:
        self._check("all_gather", group, output, input)
        size = dist.get_world_size(group)
        if output.numel() != input.numel() * size:
            self._refuse(f"{name} wants {size} even runs, got {input.numel()} elements for {output.numel()}")
        self._check_in_place(name, whole=output, run=input, rank=dist.get_rank(group))
        return self._run(name, dist.all_gather_single, _bytes(output), _bytes(input), group=group, async_op=async_op)

    def _check(self, function: str, group: Any, *tensors: Any) -> None:
        size = dist.get_world_size(group)
        if size in self.rules.sizes_refused.get(function, frozenset()):
            self._refuse(f"{function} does not take a world size of {size}")
        for tensor in tensors:
            if not tensor.is_contiguous():
                self._refuse(f"{function} wants contiguous tensors")
            if str(tensor.dtype).removeprefix("torch.") not in self.rules.dtypes[function]:
                self._refuse(f"{function} does not take {tensor.dtype}")
        if len({tensor.dtype for tensor in tensors}) > 1:
            self._refuse(f"{function} wants one dtype")

    def _check_op(self, function: str, op: Any) -> None:
        allowed = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
        if self.rules.averages:
            allowed.append(dist.ReduceOp.AVG)
        if not any(op == each for each in allowed):
            self._refuse(f"{function} does not take this ReduceOp: {op}")

    def _check_in_place(self, function: str, *, whole: Any, run: Any, rank: int) -> None:
        start = whole.data_ptr() + rank * run.nbytes
        if _overlap(whole, run) and run.data_ptr() != start:
            self._refuse(f"{function} in place wants this rank's own run")

    def _check_disjoint(self, function: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        if any(_overlap(output, other) for output in outputs for other in inputs):
            self._refuse(f"{function} does not run in place")

    def _refuse(self, why: str) -> None:
        raise DoubleRefusal(f"{self.rules.vendor} double: {why}")

    def _run(self, name: str, function: Any, *args: Any, **options: Any) -> Any:
        self.calls.append(name)
        return _Watched(function(*args, **options), self.watchdog)


class NcclDouble(StrictDouble):
    """torch.distributed on a NCCL process group."""

    _REDUCED = frozenset({"float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"})
    _MOVED = _REDUCED | {"bool", "float8_e4m3fn", "float8_e5m2"}
    rules = Rules(
        vendor="NCCL",
        dtypes={
            "all_reduce": _REDUCED,
            "reduce_scatter": _REDUCED,
            "all_gather": _MOVED,
            "broadcast": _MOVED,
            "all_to_all": _MOVED,
        },
        averages=True,
    )

    def reduce_scatter_single(
        self,
        output: Any,
        input: Any,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return self._reduce_scatter("reduce_scatter_single", output, input, op, group, async_op)

    def all_gather_single(
        self, output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        return self._all_gather("all_gather_single", output_tensor, input_tensor, group, async_op)


class HabanaDouble(NcclDouble):
    """torch.distributed on Habana's HCCL process group; what it would convert through float32 counts as refused."""

    _REDUCED = frozenset({"float16", "bfloat16", "float32"})
    _MOVED = _REDUCED | {"int32"}
    rules = Rules(
        vendor="Habana HCCL",
        dtypes={
            "all_reduce": _REDUCED,
            "reduce_scatter": _REDUCED,
            "all_gather": _MOVED,
            "broadcast": _MOVED,
            "all_to_all": _MOVED,
        },
        averages=False,
        even_lists=True,
    )


class AscendDouble(StrictDouble):
    """torch.distributed on Ascend's HCCL process group. Has the names that torch_npu documents, the older ones."""

    rules = Rules(
        vendor="Ascend HCCL",
        dtypes={
            "all_reduce": frozenset({"bfloat16", "float16", "float32", "int32", "int64"}),
            "reduce_scatter": frozenset({"bfloat16", "float16", "float32", "int8", "int32"}),
            "all_gather": frozenset({"bfloat16", "float16", "float32", "int8", "int32", "bool"}),
            "broadcast": frozenset(
                {"bfloat16", "float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool"}
            ),
            "all_to_all": frozenset({"float32"}),
        },
        averages=False,
        sizes_refused={"reduce_scatter": frozenset({3, 5, 6, 7}), "all_gather": frozenset({3, 5, 6, 7})},
    )

    def reduce_scatter_tensor(
        self,
        output: Any,
        input: Any,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        return self._reduce_scatter("reduce_scatter_tensor", output, input, op, group, async_op)

    def all_gather_into_tensor(
        self, output_tensor: Any, input_tensor: Any, group: Any = None, async_op: bool = False
    ) -> Any:
        return self._all_gather("all_gather_into_tensor", output_tensor, input_tensor, group, async_op)


class _Watched:
    def __init__(self, handle: Any, limit: float) -> None:
        self.handle, self.limit = handle, limit
        self.then: Any = lambda: None

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        self.handle.wait(timeout or datetime.timedelta(seconds=self.limit))
        self.then()


def _bytes(tensor: Any) -> Any:
    # Gloo itself lacks some dtypes that the vendors move.
    return tensor.view(torch.uint8)


def _overlap(one: Any, other: Any) -> bool:
    if not one.numel() or not other.numel():
        return False
    first, second = one.data_ptr(), other.data_ptr()
    return bool(first < second + other.nbytes and second < first + one.nbytes)
