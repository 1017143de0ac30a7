"""What two backends can do together: what both can."""

from __future__ import annotations

from shardrt.comm import Capabilities, OpSupport


def combined(inside: Capabilities, across: Capabilities, *, ranks: int, hosts: int) -> Capabilities:
    """The capabilities of hierarchical operations over ``hosts`` hosts of ``ranks`` ranks each.

    Example:
        >>> from shardrt.comm import Capabilities, OpSupport
        >>> from shardrt_hosts.combining import combined
        >>> few = OpSupport(dtypes=frozenset({"float32"}))
        >>> made = combined(Capabilities(average=False), Capabilities(all_gather=few), ranks=2, hosts=2)
        >>> made.average, sorted(made.all_gather.dtypes), made.all_reduce
        (False, ['float32'], OpSupport(uneven=True, dtypes=None, world_sizes_refused=frozenset()))
    """

    def both(operation: str) -> OpSupport | None:
        one = _at(getattr(inside, operation), ranks)
        return _join(one, _at(getattr(across, operation), hosts))

    return Capabilities(
        average=inside.average and across.average,
        reduce_scatter=both("reduce_scatter"),
        all_gather=both("all_gather"),
        all_reduce=both("all_reduce"),
        all_to_all=_at(across.all_to_all, ranks * hosts),
        broadcast=both("broadcast"),
        concurrent=inside.concurrent and across.concurrent,
        needs_streams=inside.needs_streams or across.needs_streams,
    )


def _at(support: OpSupport | None, world_size: int) -> OpSupport | None:
    if support is None or world_size in support.world_sizes_refused:
        return None
    return OpSupport(uneven=support.uneven, dtypes=support.dtypes)


def _join(one: OpSupport | None, other: OpSupport | None) -> OpSupport | None:
    if one is None or other is None:
        return None
    if one.dtypes is None or other.dtypes is None:
        dtypes = one.dtypes if other.dtypes is None else other.dtypes
    else:
        dtypes = one.dtypes & other.dtypes
    return OpSupport(uneven=one.uneven and other.uneven, dtypes=dtypes)


def takes_any_runs(capabilities: Capabilities) -> bool:
    """Whether reductions and gathers take runs of any sizes and every dtype, so that an all_reduce can be made of them.

    Example:
        >>> from shardrt.comm import Capabilities
        >>> from shardrt_hosts.combining import takes_any_runs
        >>> takes_any_runs(Capabilities()), takes_any_runs(Capabilities(all_gather=None))
        (True, False)
    """
    needed = (capabilities.reduce_scatter, capabilities.all_gather)
    return all(support is not None and support.uneven and support.dtypes is None for support in needed)
