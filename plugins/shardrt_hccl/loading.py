"""Importing a vendor's package, whose failures must not become the user's."""

from __future__ import annotations

import importlib

from shardrt.errors import BackendUnavailableError


def load(module: str, *, device_type: str) -> None:
    """Import it; whatever goes wrong, an exit included, becomes an error that says where it came from.

    Example:
        >>> from shardrt_hccl.loading import load
        >>> load("no_such_vendor", device_type="npu")
        Traceback (most recent call last):
        shardrt.errors.BackendUnavailableError: backend 'hccl' (device npu) is unavailable: importing no_such_vendor failed with ModuleNotFoundError: No module named 'no_such_vendor'; fix: make `python -c "import no_such_vendor"` work first
    """  # noqa: E501
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise BackendUnavailableError(
            f"backend 'hccl' (device {device_type}) is unavailable: importing {module} failed with "
            f'{type(error).__name__}: {error}; fix: make `python -c "import {module}"` work first'
        ) from error


def require_registered(*, device_type: str, package: str) -> None:
    """Check that torch now knows ``hccl`` for the device: the other vendor may have taken the name."""
    from torch.distributed import Backend

    devices = Backend.backend_capability.get("hccl", [])
    if device_type not in devices:
        raise BackendUnavailableError(
            f"backend 'hccl' (device {device_type}) is unavailable: after importing {package}, torch has 'hccl' "
            f"for {', '.join(devices) or 'no device'}; fix: use a release of {package} that matches this torch, and "
            "load only one vendor's package in a process"
        )
