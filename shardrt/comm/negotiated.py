"""A communicator with fallbacks: looks up the route of the dtype and follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from shardrt.comm.capabilities import OpSupport
from shardrt.comm.carriers import dtype_name
from shardrt.comm.checks import check_all_to_all, check_flat, check_reduction, check_runs, check_source
from shardrt.comm.routes import Routes, backend_name
from shardrt.errors import CapabilityError
from shardrt.protocols import RunView, RunViewer, SharedAllocator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardrt.comm.scratch import ScratchPool
    from shardrt.protocols import Communicator, ReduceOp, Work


class Negotiated:
    """A communicator with fallbacks. Made by :func:`~shardrt.comm.negotiate`.

    ``fallbacks`` says, a line each, what is not native; ``inner`` is the backend's own communicator.

    Example:
        >>> from types import SimpleNamespace
        >>> from shardrt.comm import Capabilities, Traffic, negotiate
        >>> sums_only = Capabilities(average=False)
        >>> backend = SimpleNamespace(name="mine", rank=0, world_size=2, capabilities=sums_only, traffic=Traffic())
        >>> negotiate(backend, dtypes=["float32"]).fallbacks
        ('average: sum, then divide',)
    """

    def __init__(
        self,
        inner: Communicator,
        routes: dict[torch.dtype, Routes],
        fallbacks: tuple[str, ...],
        scratch: ScratchPool,
    ) -> None:
        self.inner = inner
        self.name = backend_name(inner)
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.traffic = inner.traffic
        self.fallbacks = fallbacks
        self.scratch = scratch
        self._routes = routes
        moves = OpSupport(dtypes=frozenset(dtype_name(dtype) for dtype in routes))
        reductions = OpSupport(
            dtypes=frozenset(dtype_name(dtype) for dtype, way in routes.items() if way.reduce_scatter is not None)
        )
        self.capabilities = attrs.evolve(
            inner.capabilities,
            average=True,
            reduce_scatter=reductions,
            all_reduce=reductions,
            all_gather=moves,
            all_to_all=moves,
            broadcast=moves,
        )

    def reduce_scatter(
        self, buffer: Tensor, splits: Sequence[int], *, output: Tensor | None = None, average: bool = False
    ) -> Work:
        """See :class:`shardrt.protocols.Communicator`."""
        route = self._route("reduce_scatter", buffer).reduce_scatter
        if route is None:
            raise self._only_moved("reduce_scatter", buffer)
        check_runs("reduce_scatter", buffer, splits, self.world_size, self.rank, output=output)
        check_reduction("reduce_scatter", buffer, "sum", average, self.rank)
        return route.start(buffer, splits, output=output, average=average)

    def all_gather(self, buffer: Tensor, splits: Sequence[int]) -> Work:
        """See :class:`shardrt.protocols.Communicator`."""
        route = self._route("all_gather", buffer).all_gather
        check_runs("all_gather", buffer, splits, self.world_size, self.rank)
        return route.start(buffer, splits)

    def all_reduce(self, buffer: Tensor, *, op: ReduceOp = "sum", average: bool = False) -> Work:
        """See :class:`shardrt.protocols.Communicator`."""
        route = self._route("all_reduce", buffer).all_reduce
        if route is None:
            raise self._only_moved("all_reduce", buffer)
        check_flat("all_reduce", buffer, self.rank)
        check_reduction("all_reduce", buffer, op, average, self.rank)
        return route.start(buffer, op=op, average=average)

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        """See :class:`shardrt.protocols.Communicator`."""
        check_all_to_all(received, sent, self.world_size, self.rank)
        return self._route("all_to_all", sent[0]).all_to_all.start(received, sent)

    def broadcast(self, buffer: Tensor, source: int) -> Work:
        """See :class:`shardrt.protocols.Communicator`."""
        check_flat("broadcast", buffer, self.rank)
        check_source("broadcast", source, self.world_size, self.rank)
        return self._route("broadcast", buffer).broadcast.start(buffer, source)

    def barrier(self) -> None:
        """See :class:`shardrt.protocols.Communicator`."""
        self.inner.barrier()

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """See :class:`shardrt.protocols.Communicator`."""
        return self.inner.exchange(topic, value)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """See :class:`shardrt.protocols.SharedAllocator`."""
        return self.inner.allocate(numel, dtype) if isinstance(self.inner, SharedAllocator) else None

    def view_runs(self, asked: Sequence[tuple[Tensor, Sequence[int]]]) -> list[RunView | None]:
        """See :class:`shardrt.protocols.RunViewer`."""
        return self.inner.view_runs(asked) if isinstance(self.inner, RunViewer) else [None] * len(asked)

    def close(self) -> None:
        """Give the scratch back and close the backend's communicator."""
        self.scratch.clear()
        self.inner.close()

    def _route(self, operation: str, buffer: Tensor) -> Routes:
        route = self._routes.get(buffer.dtype)
        if route is None:
            raise CapabilityError(
                f"{operation} of {dtype_name(buffer.dtype)} was not negotiated with backend {self.name!r}; "
                f"negotiated: {', '.join(dtype_name(dtype) for dtype in self._routes)}; "
                f"fix: name every dtype that will travel in negotiate(..., dtypes=...)"
            )
        return route

    def _only_moved(self, operation: str, buffer: Tensor) -> CapabilityError:
        return CapabilityError(
            f"{operation} of {dtype_name(buffer.dtype)} was not negotiated with backend {self.name!r}: that dtype was "
            "named as one that is only moved; fix: name it in dtypes=... instead of moved=..."
        )
