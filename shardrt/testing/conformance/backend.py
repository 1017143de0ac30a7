"""What every backend must get right, on 1, 2 and 3 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from shardrt.protocols import Communicator, Group
from shardrt.testing.conformance import data_checks, declared, order_checks, piece_checks, view_checks
from shardrt.testing.conformance.bench import run_check
from shardrt.testing.functions import import_path
from shardrt.testing.pool import RankPool

WORLD_SIZES = (1, 2, 3)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "complex64")
_each_dtype = pytest.mark.parametrize("dtype", DTYPES)
_each_kind = pytest.mark.parametrize("kind", ["even", "uneven", "empty", "last", "none"])
_each_average = pytest.mark.parametrize("average", [False, True], ids=["sum", "average"])
_each_operation = pytest.mark.parametrize(
    "operation", ["reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast", "barrier", "exchange"]
)
_SUBGROUP = (1, 2)
_OF_SEVERAL_RANKS = ("test_different_topics", "test_late_rank", "test_missing_rank", "test_subgroup")
"""Checks that mean nothing on one rank."""


class BackendConformance:
    """Subclass it in a test module as ``class TestMine(BackendConformance)`` and say how to make yours.

    ``make`` runs on worker ranks, so the class must stand at the top of a module. Every check runs twice: on the
    backend's own communicator, where what its ``capabilities`` declare unsupported is noted instead of run, and on the
    negotiated one, where everything must work through a fallback or be refused by the negotiation.

    Needs the fixture ``ranks`` of :mod:`shardrt.testing.pytest_plugin`.

    Example:
        >>> from shardrt.testing import BackendConformance
        >>> class TestNull(BackendConformance):
        ...     name = "null"
        ...     world_sizes = (1,)
        ...     process_group = None
        ...     @classmethod
        ...     def make(cls, group):
        ...         from shardrt_null import make
        ...         return make(group)
    """

    name: ClassVar[str] = ""
    """For the table of what is declared unsupported; the class's name by default."""
    world_sizes: ClassVar[tuple[int, ...]] = WORLD_SIZES
    """Those of 1, 2 and 3 on which the backend runs; others for one that needs more ranks."""
    ways: ClassVar[tuple[str, ...]] = ("direct", "negotiated")
    """How it is checked. One that lacks nothing, so that nothing is negotiated, may do with ``direct``."""
    process_group: ClassVar[str | None] = "gloo"
    """The process group that ``make`` gets, or None for none."""
    device_type: ClassVar[str] = "cpu"

    def __init_subclass__(cls) -> None:
        """Note the world sizes it does without, and leave out the checks that mean nothing on those it has."""
        super().__init_subclass__()
        for size in set(WORLD_SIZES) - set(cls.world_sizes):
            declared.record(cls.name or cls.__name__, f"world size {size}")
        if max(cls.world_sizes) == 1:
            for name in _OF_SEVERAL_RANKS:
                setattr(cls, name, None)

    @classmethod
    def make(cls, group: Group) -> Communicator:
        """A communicator of the backend under test, on a worker rank."""
        raise NotImplementedError("a conformance class must say how to make its communicator: override make(group)")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Each check on each world size, directly and negotiated; those of several ranks on several only."""
        if "world_size" in metafunc.fixturenames:
            alone = metafunc.function.__name__ not in _OF_SEVERAL_RANKS
            sizes = [size for size in self.world_sizes if size > 1 or alone]
            metafunc.parametrize("world_size", sizes, ids=[f"{size}-ranks" for size in sizes])
        if "via" in metafunc.fixturenames:
            metafunc.parametrize("via", self.ways)

    def test_is_a_communicator(self, ranks: RankPool) -> None:
        """It has the attributes and methods of the protocol."""
        self._check(ranks, order_checks.shape, self.world_sizes[0], "direct")

    @_each_dtype
    @_each_average
    def test_reduce_scatter_dtypes(self, ranks: RankPool, world_size: int, via: str, dtype: str, average: bool) -> None:
        """Sum and average in every dtype; whole numbers are summed only."""
        average = average and dtype != "int64"
        options = {"kind": "uneven", "dtype": dtype, "average": average}
        self._check(ranks, data_checks.reduce_scatter, world_size, via, dtypes=[dtype], **options)

    @_each_kind
    def test_reduce_scatter_runs(self, ranks: RankPool, world_size: int, via: str, kind: str) -> None:
        """Even, uneven and empty runs."""
        self._check(ranks, data_checks.reduce_scatter, world_size, via, kind=kind, dtype="float32", average=True)

    @_each_average
    @_each_kind
    def test_reduce_scatter_output(self, ranks: RankPool, world_size: int, via: str, kind: str, average: bool) -> None:
        """Into an output: the buffer stays as it was."""
        options = {"kind": kind, "dtype": "float32", "average": average}
        self._check(ranks, data_checks.reduce_scatter_output, world_size, via, **options)

    @_each_average
    @_each_kind
    def test_reduce_scatter_pieces(self, ranks: RankPool, world_size: int, via: str, kind: str, average: bool) -> None:
        """From pieces that lie apart, which stay as they were."""
        options = {"kind": kind, "dtype": "float32", "average": average}
        self._check(ranks, piece_checks.reduce_scatter_pieces, world_size, via, **options)

    def test_pieces_are_let_go(self, ranks: RankPool, world_size: int, via: str) -> None:
        """Their memory goes when the operation is over, without a collector."""
        self._check(ranks, piece_checks.pieces_are_let_go, world_size, via)

    @_each_kind
    def test_all_gather_from(self, ranks: RankPool, world_size: int, via: str, kind: str) -> None:
        """Of runs that are elsewhere before."""
        self._check(ranks, piece_checks.all_gather_from, world_size, via, kind=kind, dtype="float32")

    @_each_kind
    def test_view_runs(self, ranks: RankPool, world_size: int, via: str, kind: str) -> None:
        """Shown where they are, where a communicator offers it."""
        self._check(ranks, view_checks.view_runs, world_size, via, kind=kind, dtype="float32")

    @_each_dtype
    def test_all_gather_dtypes(self, ranks: RankPool, world_size: int, via: str, dtype: str) -> None:
        """Every dtype."""
        self._check(ranks, data_checks.all_gather, world_size, via, dtypes=[dtype], kind="uneven", dtype=dtype)

    @_each_kind
    def test_all_gather_runs(self, ranks: RankPool, world_size: int, via: str, kind: str) -> None:
        """Even, uneven and empty runs."""
        self._check(ranks, data_checks.all_gather, world_size, via, kind=kind, dtype="float32")

    @_each_dtype
    def test_all_reduce_dtypes(self, ranks: RankPool, world_size: int, via: str, dtype: str) -> None:
        """Sums in every dtype."""
        options = {"op": "sum", "average": False, "dtype": dtype}
        self._check(ranks, data_checks.all_reduce, world_size, via, dtypes=[dtype], **options)

    @pytest.mark.parametrize(("op", "average"), [("sum", True), ("max", False), ("min", False)])
    def test_all_reduce_operations(self, ranks: RankPool, world_size: int, via: str, op: str, average: bool) -> None:
        """Average, maximum and minimum."""
        self._check(ranks, data_checks.all_reduce, world_size, via, op=op, average=average, dtype="float32")

    @_each_average
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_all_reduce_same_bits(self, ranks: RankPool, world_size: int, via: str, dtype: str, average: bool) -> None:
        """Rounding is the same on all ranks."""
        options = {"dtype": dtype, "average": average}
        self._check(ranks, data_checks.all_reduce_same_bits, world_size, via, dtypes=[dtype], **options)

    @_each_dtype
    def test_all_to_all(self, ranks: RankPool, world_size: int, via: str, dtype: str) -> None:
        """Sizes that differ pairwise and may be zero."""
        for even in (True, False):
            self._check(ranks, data_checks.all_to_all, world_size, via, dtypes=[dtype], even=even, dtype=dtype)

    @_each_dtype
    def test_broadcast(self, ranks: RankPool, world_size: int, via: str, dtype: str) -> None:
        """From each source."""
        self._check(ranks, data_checks.broadcast, world_size, via, dtypes=[dtype], dtype=dtype)

    def test_barrier(self, ranks: RankPool, world_size: int, via: str) -> None:
        """It really waits."""
        self._check(ranks, data_checks.barrier, world_size, via)

    def test_exchange(self, ranks: RankPool, world_size: int, via: str) -> None:
        """JSON values, in rank order."""
        self._check(ranks, data_checks.exchange, world_size, via)

    def test_different_topics(self, ranks: RankPool, world_size: int, via: str) -> None:
        """An error on every rank."""
        self._check(ranks, order_checks.different_topics, world_size, via)

    @pytest.mark.parametrize("count", [0, 1, 1 << 20])
    def test_sizes(self, ranks: RankPool, world_size: int, via: str, count: int) -> None:
        """Nothing, one element, and 4 MB."""
        self._check(ranks, data_checks.sizes, world_size, via, count=count)

    def test_many_small_operations(self, ranks: RankPool, world_size: int, via: str) -> None:
        """Two hundred in a row."""
        self._check(ranks, data_checks.many_small, world_size, via, operations=200)

    def test_wait_twice(self, ranks: RankPool, world_size: int, via: str) -> None:
        """Returns at once."""
        self._check(ranks, order_checks.wait_twice, world_size, via)

    @pytest.mark.parametrize("backwards", [False, True], ids=["in-order", "backwards"])
    def test_several_outstanding(self, ranks: RankPool, world_size: int, via: str, backwards: bool) -> None:
        """Issued in order, waited for later."""
        self._check(ranks, order_checks.several_outstanding, world_size, via, backwards=backwards)

    def test_late_rank(self, ranks: RankPool, world_size: int, via: str) -> None:
        """It is waited for."""
        self._check(ranks, order_checks.late_rank, world_size, via)

    def test_bad_arguments(self, ranks: RankPool, world_size: int) -> None:
        """Refused before anything moves."""
        self._check(ranks, order_checks.bad_arguments, world_size, "direct")

    @_each_operation
    def test_missing_rank(self, ranks: RankPool, world_size: int, operation: str) -> None:
        """An error on the others within the timeout, never a hang."""
        limit = order_checks.MISSING_LIMIT
        self._check(ranks, order_checks.missing_rank, world_size, "direct", wait_limit=limit, operation=operation)

    def test_traffic(self, ranks: RankPool, world_size: int, via: str) -> None:
        """At least what must travel is counted."""
        self._check(ranks, order_checks.traffic, world_size, via)

    def test_close_twice(self, ranks: RankPool, world_size: int, via: str) -> None:
        """Harmless."""
        self._check(ranks, order_checks.close_twice, world_size, via)

    @pytest.mark.parametrize("check", ["reduce_scatter", "all_gather", "broadcast", "all_to_all"])
    def test_subgroup(self, ranks: RankPool, via: str, check: str) -> None:
        """Group ranks count where they differ from global ones."""
        options: dict[str, dict[str, Any]] = {
            "reduce_scatter": {"kind": "uneven", "average": True},
            "all_gather": {"kind": "uneven"},
            "all_to_all": {"even": False},
        }
        more = options.get(check, {})
        function = getattr(data_checks, check)
        self._check(ranks, function, 3, via, members=list(_SUBGROUP), dtype="float32", **more)

    def _check(self, ranks: RankPool, check: Callable[..., None], world_size: int, via: str, **options: Any) -> None:
        found = ranks.run(
            run_check,
            ranks=world_size,
            init="gloo" if self.process_group is not None else None,
            kit=import_path(type(self)),
            check=import_path(check),
            via=via,
            **options,
        )
        for what in sorted({what for said in found for what in said}):
            declared.record(self.name or type(self).__name__, what)
