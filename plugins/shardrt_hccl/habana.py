"""Intel Gaudi: what its HCCL takes through habana_frameworks, whether it can run here, and how it is loaded.

docs/backends.md says where each fact comes from.
"""

from __future__ import annotations

import importlib.util
import os

from shardrt import Availability
from shardrt.comm import Capabilities, OpSupport
from shardrt.errors import BackendUnavailableError
from shardrt_hccl.loading import load, require_registered

PACKAGE = "habana_frameworks"
MODULE = "habana_frameworks.torch.distributed.hccl"

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_MPIRUN = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")

# Other dtypes are converted to float32 and back on the way: right for float16, lossy for the wide ones. One-byte
# dtypes are resized in place when their number is odd, which a view of a larger buffer does not survive.
_REDUCED = frozenset({"bfloat16", "float16", "float32"})
_MOVED = _REDUCED | {"int32"}

CAPABILITIES = Capabilities(
    average=False,
    reduce_scatter=OpSupport(uneven=False, dtypes=_REDUCED),
    all_gather=OpSupport(uneven=False, dtypes=_MOVED),
    all_reduce=OpSupport(dtypes=_REDUCED),
    all_to_all=OpSupport(dtypes=_MOVED),
    broadcast=OpSupport(dtypes=_MOVED),
    concurrent=False,
    needs_streams=True,
)


def probe() -> Availability:
    """Looks for the package and imports nothing, not even its parents: importing it sets environment variables.

    Example:
        >>> from shardrt_hccl import habana
        >>> habana.probe().ok or bool(habana.probe().fix)
        True
    """
    if importlib.util.find_spec(PACKAGE) is None:
        return Availability.no(
            f"the package {PACKAGE} is not installed",
            fix="install the Intel Gaudi software with its PyTorch, or use its container",
        )
    return Availability.yes(f"{PACKAGE} is there; devices are counted once it is loaded")


def prepare() -> None:
    """Import Habana's hccl module, which registers the backend; its import reads the launcher's variables."""
    answer = probe()
    if not answer.ok:
        raise BackendUnavailableError(f"backend 'hccl' (device hpu) is unavailable: {answer.reason}; fix: {answer.fix}")
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if missing and any(name not in os.environ for name in _MPIRUN):
        raise BackendUnavailableError(
            f"backend 'hccl' (device hpu) is unavailable: importing {MODULE} reads the launcher's variables, and "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; "
            "fix: start with torchrun or mpirun, or set RANK, WORLD_SIZE and LOCAL_RANK first"
        )
    load(MODULE, device_type="hpu")
    require_registered(device_type="hpu", package=MODULE)
