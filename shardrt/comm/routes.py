"""Choosing, per dtype, how each operation runs on a given backend: its own way, a checked fallback, or a refusal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

import attrs
import torch

from shardrt.comm.capabilities import OpSupport
from shardrt.comm.carriers import dtype_name, move_carrier, reduce_carrier
from shardrt.comm.moves import (
    BroadcastByGather,
    BroadcastNatively,
    ExchangeByGather,
    ExchangeNatively,
    Gather,
    GatherByBroadcasts,
    GatherByExchange,
    GatherNatively,
)
from shardrt.comm.reductions import (
    AllReduceByExchange,
    AllReduceNatively,
    ScatterByAllReduce,
    ScatterByExchange,
    ScatterNatively,
)
from shardrt.errors import CapabilityError

if TYPE_CHECKING:
    from shardrt.comm.scratch import ScratchPool
    from shardrt.protocols import Communicator

Chosen = TypeVar("Chosen")

ADDABLE = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.complex64, torch.complex128),
    }
)
"""What a rank can add by itself, in the dtype's own arithmetic."""


@attrs.frozen(kw_only=True, eq=False)
class Routes:
    """The way of every operation for one dtype; no reductions for a dtype that is only moved."""

    reduce_scatter: ScatterNatively | ScatterByExchange | ScatterByAllReduce | None
    all_reduce: AllReduceNatively | AllReduceByExchange | None
    all_gather: Gather
    all_to_all: ExchangeNatively | ExchangeByGather
    broadcast: BroadcastNatively | BroadcastByGather


class RouteChooser:
    """Finds the routes of one communicator and collects what is not native about them."""

    def __init__(self, inner: Communicator, pool: ScratchPool) -> None:
        self.inner = inner
        self.pool = pool
        self.notes: dict[tuple[str, str], list[str]] = {}
        """What is done instead, by operation and deed, with the dtypes it is done for."""
        self._size = inner.world_size

    def choose(self, dtype: torch.dtype, *, reduced: bool) -> Routes:
        """The routes of one dtype; :class:`~shardrt.errors.CapabilityError` where there is none."""
        return Routes(
            reduce_scatter=self._reduce_scatter(dtype) if reduced else None,
            all_reduce=self._all_reduce(dtype) if reduced else None,
            all_gather=self._gather(dtype),
            all_to_all=self._all_to_all(dtype),
            broadcast=self._broadcast(dtype),
        )

    def descriptions(self) -> tuple[str, ...]:
        """One line for each thing that is done instead."""
        lines = [f"{operation} of {', '.join(names)}: {deed}" for (operation, deed), names in self.notes.items()]
        if not self.inner.capabilities.average:
            lines.insert(0, "average: sum, then divide")
        return tuple(lines)

    def _reduce_scatter(self, dtype: torch.dtype) -> ScatterNatively | ScatterByExchange | ScatterByAllReduce:
        able = self.inner.capabilities
        native = self._native_scatter(dtype)
        if native is not None:
            self._note_carrier("reduce_scatter", dtype, native.carrier)
            self._note_padding("reduce_scatter", dtype, uneven=native.uneven)
            return native
        exchange = self._scatter_by_exchange(dtype)
        if exchange is not None:
            self._note("reduce_scatter", dtype, "all_to_all of the runs, which their owners add in rank order")
            return exchange
        carrier = reduce_carrier(able.all_reduce, dtype, self._size)
        if carrier is not None:
            self._note("reduce_scatter", dtype, "all_reduce of everything, which moves up to twice the bytes")
            return ScatterByAllReduce(
                inner=self.inner, pool=self.pool, dtype=dtype, carrier=carrier, uneven=True, averages=able.average
            )
        raise self._refusal("reduce_scatter", dtype, ("reduce_scatter", "all_to_all", "all_reduce"))

    def _native_scatter(self, dtype: torch.dtype) -> ScatterNatively | None:
        able = self.inner.capabilities
        carrier = reduce_carrier(able.reduce_scatter, dtype, self._size)
        if carrier is None:
            return None
        return ScatterNatively(
            inner=self.inner,
            pool=self.pool,
            dtype=dtype,
            carrier=carrier,
            uneven=self._takes_uneven(able.reduce_scatter),
            averages=able.average,
        )

    def _scatter_by_exchange(self, dtype: torch.dtype) -> ScatterByExchange | None:
        support = self.inner.capabilities.all_to_all
        carrier = move_carrier(support, dtype, self._size)
        if carrier is None or dtype not in ADDABLE:
            return None
        return ScatterByExchange(
            inner=self.inner, pool=self.pool, dtype=dtype, carrier=carrier, uneven=self._takes_uneven(support)
        )

    def _all_reduce(self, dtype: torch.dtype) -> AllReduceNatively | AllReduceByExchange:
        able = self.inner.capabilities
        carrier = reduce_carrier(able.all_reduce, dtype, self._size)
        if carrier is not None:
            self._note_carrier("all_reduce", dtype, carrier)
            return AllReduceNatively(
                inner=self.inner, pool=self.pool, dtype=dtype, carrier=carrier, uneven=True, averages=able.average
            )
        scatter = self._scatter_by_exchange(dtype)
        if scatter is not None:
            self._note("all_reduce", dtype, "all_to_all, add in rank order, then all_gather; blocks for the first half")
            return AllReduceByExchange(scatter=scatter, gather=self._gather(dtype, note=False))
        raise self._refusal("all_reduce", dtype, ("all_reduce", "all_to_all"))

    def _gather(self, dtype: torch.dtype, *, note: bool = True) -> Gather:
        able = self.inner.capabilities
        native, exchange = self._gather_natively(dtype), self._gather_by_exchange(dtype)
        if native is not None:
            if note:
                self._note_carrier("all_gather", dtype, native.carrier)
                self._note_padding("all_gather", dtype, uneven=native.uneven)
            return native
        if exchange is not None:
            if note:
                self._note("all_gather", dtype, "all_to_all of the own run to everyone")
            return exchange
        carrier = move_carrier(able.broadcast, dtype, self._size)
        if carrier is None:
            raise self._refusal("all_gather", dtype, ("all_gather", "all_to_all", "broadcast"))
        if note:
            self._note("all_gather", dtype, "one broadcast per owner")
        return GatherByBroadcasts(inner=self.inner, pool=self.pool, dtype=dtype, carrier=carrier, uneven=True)

    def _gather_natively(self, dtype: torch.dtype) -> GatherNatively | None:
        support = self.inner.capabilities.all_gather
        carrier = move_carrier(support, dtype, self._size)
        if carrier is None:
            return None
        uneven = self._takes_uneven(support)
        return GatherNatively(inner=self.inner, pool=self.pool, dtype=dtype, carrier=carrier, uneven=uneven)

    def _gather_by_exchange(self, dtype: torch.dtype) -> GatherByExchange | None:
        support = self.inner.capabilities.all_to_all
        carrier = move_carrier(support, dtype, self._size)
        if carrier is None:
            return None
        uneven = self._takes_uneven(support)
        return GatherByExchange(inner=self.inner, pool=self.pool, dtype=dtype, carrier=carrier, uneven=uneven)

    def _broadcast(self, dtype: torch.dtype) -> BroadcastNatively | BroadcastByGather:
        carrier = move_carrier(self.inner.capabilities.broadcast, dtype, self._size)
        if carrier is not None:
            self._note_carrier("broadcast", dtype, carrier)
            return BroadcastNatively(inner=self.inner, pool=self.pool, dtype=dtype, carrier=carrier, uneven=True)
        exchange, native = self._gather_by_exchange(dtype), self._gather_natively(dtype)
        # An uneven exchange moves the bytes once; a padded one, or a padded gather, moves them once per rank.
        gather = exchange if exchange is not None and (exchange.uneven or native is None) else native
        if gather is None:
            raise self._refusal("broadcast", dtype, ("broadcast", "all_to_all", "all_gather"))
        how = "all_to_all" if gather is exchange else "all_gather"
        self._note("broadcast", dtype, f"{how} in which only the source has anything")
        return BroadcastByGather(inner=self.inner, gather=gather)

    def _all_to_all(self, dtype: torch.dtype) -> ExchangeNatively | ExchangeByGather:
        able = self.inner.capabilities
        carrier = move_carrier(able.all_to_all, dtype, self._size)
        if carrier is not None:
            self._note_carrier("all_to_all", dtype, carrier)
            uneven = self._takes_uneven(able.all_to_all)
            if not uneven:
                self._note("all_to_all", dtype, "sizes agreed beforehand, uneven pieces padded to the longest")
            return ExchangeNatively(inner=self.inner, pool=self.pool, dtype=dtype, carrier=carrier, uneven=uneven)
        gather: GatherNatively | GatherByBroadcasts | None = self._gather_natively(dtype)
        if gather is None:
            carrier = move_carrier(able.broadcast, dtype, self._size)
            if carrier is None:
                raise self._refusal("all_to_all", dtype, ("all_to_all", "all_gather", "broadcast"))
            gather = GatherByBroadcasts(inner=self.inner, pool=self.pool, dtype=dtype, carrier=carrier, uneven=True)
        self._note("all_to_all", dtype, "all_gather of everything sent, of which each rank keeps its own")
        return ExchangeByGather(inner=self.inner, pool=self.pool, dtype=dtype, gather=gather)

    def _takes_uneven(self, support: OpSupport | None) -> bool:
        return support is not None and (support.uneven or self._size == 1)

    def _note(self, operation: str, dtype: torch.dtype, deed: str) -> None:
        self.notes.setdefault((operation, deed), []).append(dtype_name(dtype))

    def _note_carrier(self, operation: str, dtype: torch.dtype, carrier: torch.dtype) -> None:
        if carrier == dtype:
            return
        staged = ", staged in scratch" if carrier.itemsize > dtype.itemsize else ""
        self._note(operation, dtype, f"the same bytes seen as {dtype_name(carrier)}{staged}")

    def _note_padding(self, operation: str, dtype: torch.dtype, *, uneven: bool) -> None:
        if not uneven:
            self._note(operation, dtype, "uneven runs padded to the longest in scratch; even ones as they are")

    def _refusal(self, operation: str, dtype: torch.dtype, looked_at: Iterable[str]) -> CapabilityError:
        able = self.inner.capabilities
        takes = "; ".join(f"its {name} {_describe(getattr(able, name))}" for name in looked_at)
        return CapabilityError(
            f"backend {backend_name(self.inner)!r} cannot {operation} {dtype_name(dtype)} with {self._size} "
            f"rank{'s' if self._size > 1 else ''}, and no fallback can: {takes}; "
            f"fix: keep what travels in a dtype it takes, or choose another backend ('shardrt plugins' lists them)"
        )


def backend_name(communicator: Communicator) -> str:
    """What messages call a communicator: its ``name`` where it has one.

    Example:
        >>> from types import SimpleNamespace
        >>> from shardrt.comm.routes import backend_name
        >>> backend_name(SimpleNamespace(name="nccl"))
        'nccl'
    """
    return str(getattr(communicator, "name", type(communicator).__name__))


def _describe(support: OpSupport | None) -> str:
    if support is None:
        return "does not exist"
    dtypes = "every dtype" if support.dtypes is None else ", ".join(sorted(support.dtypes)) or "no dtype"
    refused = ", ".join(str(size) for size in sorted(support.world_sizes_refused))
    return f"takes {dtypes}" + (f" but not {refused} ranks" if refused else "")
