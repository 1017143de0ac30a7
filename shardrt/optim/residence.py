"""What of a bucket stays in memory, and in which precision."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch


@attrs.frozen(kw_only=True)
class Residence:
    """Which buffers of a bucket stay in memory between their uses; the rest is given back and obtained again.

    See Note [Coming and going].
    """

    params: bool = True
    """The whole parameters. If they go, each rank keeps its own run apart."""
    gradients: bool = True
    """The whole gradients of this rank. If they go, what was reduced is kept, and later reductions add to it."""
    offload: bool = False
    """Whether shards, reduced gradients and so the optimizer's state live in the CPU's memory."""
    pins: bool = False
    """Whether that memory is locked for an accelerator's copies."""


@attrs.frozen(kw_only=True)
class Precision:
    """In which dtypes floating-point parameters are computed with and reduced; None is their own.

    Where they are computed with in another dtype, this rank's run is kept apart in their own, and stepped in it.
    """

    params: torch.dtype | None = None
    reduce: torch.dtype | None = None
    """None is what they are computed with in."""
    keeps_low_gradients: bool = False
    """Whether reduced gradients stay in the dtype they were reduced in until they are stepped with."""


RESIDENT = Residence()
"""Everything stays."""
OWN_PRECISION = Precision()
"""Everything is what it is."""
PrecisionOf = Callable[[str], Precision]
"""The precision of a parameter, by its name."""


def own_precision(name: str) -> Precision:
    """Every parameter is what it is."""
    del name
    return OWN_PRECISION
