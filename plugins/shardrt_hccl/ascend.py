"""Huawei Ascend: what its HCCL takes through torch_npu, whether it can run here, and how it is loaded.

docs/backends.md says where each fact comes from.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
from pathlib import Path

from shardrt import Availability
from shardrt.comm import Capabilities, OpSupport
from shardrt.errors import BackendUnavailableError
from shardrt_hccl.loading import load, require_registered

PACKAGE = "torch_npu"
LIBRARY = "libhccl.so"

_REFUSED_SIZES = frozenset({3, 5, 6, 7})

CAPABILITIES = Capabilities(
    average=False,
    reduce_scatter=OpSupport(
        uneven=False,
        dtypes=frozenset({"bfloat16", "float16", "float32", "int8", "int32"}),
        world_sizes_refused=_REFUSED_SIZES,
    ),
    all_gather=OpSupport(
        uneven=False,
        dtypes=frozenset({"bfloat16", "float16", "float32", "int8", "int32", "bool"}),
        world_sizes_refused=_REFUSED_SIZES,
    ),
    # A "sum" of bool is a maximum there: left out, so that nobody gets one unawares.
    all_reduce=OpSupport(dtypes=frozenset({"bfloat16", "float16", "float32", "int32", "int64"})),
    all_to_all=OpSupport(dtypes=frozenset({"float32"})),
    broadcast=OpSupport(
        dtypes=frozenset(
            {"bfloat16", "float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool"}
        )
    ),
    concurrent=False,
    needs_streams=True,
)


def probe() -> Availability:
    """Looks for the package and for the library it loads, and imports neither.

    Example:
        >>> from shardrt_hccl import ascend
        >>> ascend.probe().ok or bool(ascend.probe().fix)
        True
    """
    if importlib.util.find_spec(PACKAGE) is None:
        return Availability.no(
            f"the package {PACKAGE} is not installed",
            fix="install CANN and the torch-npu release that matches this torch",
        )
    if not _library_is_found():
        return Availability.no(
            f"{PACKAGE} is installed but {LIBRARY} is not found, without which importing it may end the process",
            fix="install CANN and source its set_env.sh, which sets ASCEND_HOME_PATH and LD_LIBRARY_PATH",
        )
    return Availability.yes(f"{PACKAGE} and {LIBRARY} are there; devices are counted once they are loaded")


def prepare() -> None:
    """Import torch_npu, which registers device and backend; refuses first where that could not end well."""
    answer = probe()
    if not answer.ok:
        raise BackendUnavailableError(f"backend 'hccl' (device npu) is unavailable: {answer.reason}; fix: {answer.fix}")
    import torch

    # The name of torch's one slot for out-of-tree devices. It can be given once per process.
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", "npu"):
        raise BackendUnavailableError(
            f"backend 'hccl' (device npu) is unavailable: torch's PrivateUse1 device is already named {taken!r} "
            "by another package; fix: do not load that package in the same process, or set "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 if torch loads it by itself"
        )
    load(PACKAGE, device_type="npu")
    require_registered(device_type="npu", package=PACKAGE)


def _library_is_found() -> bool:
    folders = [Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        if os.environ.get(variable):
            folders.append(Path(os.environ[variable]) / "lib64")
    return any((folder / LIBRARY).exists() for folder in folders) or ctypes.util.find_library("hccl") is not None
