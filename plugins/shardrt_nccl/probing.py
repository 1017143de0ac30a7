"""Whether NCCL can run here, answered without loading torch wherever its installed metadata settles it."""

from __future__ import annotations

import importlib.metadata
import sys

from shardrt import Availability

_FIX_BUILD = "install a CUDA (or ROCm) build of torch, or choose backend='gloo' for the CPU"


def probe() -> Availability:
    """Asks the cheapest question first: the platform, the installed version, and only then torch itself.

    Example:
        >>> from shardrt_nccl import probe
        >>> probe().ok or bool(probe().fix)
        True
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Availability.no("torch is not installed", fix=_FIX_BUILD)
    if version.endswith("+cpu"):
        return Availability.no(f"this torch build ({version}) has no NCCL", fix=_FIX_BUILD)
    if not sys.platform.startswith("linux"):
        return Availability.no(f"NCCL runs on Linux only, this is {sys.platform}", fix="choose backend='gloo'")
    # Only torch knows the rest. Whoever has a build with CUDA is about to load it anyway.
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return Availability.no(f"this torch build ({version}) has no NCCL", fix=_FIX_BUILD)
    if not torch.cuda.is_available():
        return Availability.no(
            "torch has NCCL but sees no GPU",
            fix="check the driver (nvidia-smi), CUDA_VISIBLE_DEVICES and, in a container, that GPUs are passed in",
        )
    return Availability.yes(f"{torch.cuda.device_count()} GPU(s)")
