"""Negotiation: what a backend lacks is replaced by a checked fallback or refused, before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardrt.protocols import Communicator


def negotiate(communicator: Communicator, *, dtypes: Iterable[str], moved: Iterable[str] = ()) -> Communicator:
    """A communicator that does everything for these dtypes: the same one where it can, else one with fallbacks.

    ``dtypes`` are reduced and moved, ``moved`` only moved (flags, float8 weights). What no fallback can do is refused
    here with :class:`~shardrt.errors.CapabilityError`, never in the middle of a step. Every rank must negotiate alike.

    Example:
        >>> from types import SimpleNamespace
        >>> from shardrt.comm import Capabilities, OpSupport, Traffic, negotiate
        >>> even = OpSupport(uneven=False)
        >>> able = Capabilities(average=False, reduce_scatter=None, all_gather=even)
        >>> backend = SimpleNamespace(name="mine", rank=0, world_size=2, capabilities=able, traffic=Traffic())
        >>> for line in negotiate(backend, dtypes=["float32"]).fallbacks:
        ...     print(line)
        average: sum, then divide
        reduce_scatter of float32: all_to_all of the runs, which their owners add in rank order
        all_gather of float32: uneven runs padded to the longest in scratch; even ones as they are
        >>> backend.capabilities = Capabilities()
        >>> negotiate(backend, dtypes=["float32"]) is backend
        True
    """
    # Imported here because this needs torch, and declaring capabilities does not.
    from shardrt.comm.carriers import dtype_named
    from shardrt.comm.negotiated import Negotiated
    from shardrt.comm.routes import RouteChooser
    from shardrt.comm.scratch import ScratchPool

    reduced = tuple(dict.fromkeys(dtypes))
    only_moved = tuple(name for name in dict.fromkeys(moved) if name not in reduced)
    pool = ScratchPool()
    chooser = RouteChooser(communicator, pool)
    routes = {dtype_named(name): chooser.choose(dtype_named(name), reduced=True) for name in reduced}
    routes.update({dtype_named(name): chooser.choose(dtype_named(name), reduced=False) for name in only_moved})
    fallbacks = chooser.descriptions()
    if not fallbacks:
        return communicator
    return Negotiated(communicator, routes, fallbacks, pool)
