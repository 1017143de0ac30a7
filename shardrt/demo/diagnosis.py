"""What ``shardrt doctor`` finds out, as plain JSON values. Each part stands alone: one that fails is a finding."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import shardrt
from shardrt.comm.availability import choose_backend
from shardrt.errors import ShardrtError
from shardrt.launch import launch_ranks
from shardrt.registry import Registry

_DISTRIBUTIONS = ("pluggy", "attrs", "structlog", "rich", "click", "numpy")
_PREFIXES = ("SHARDRT_", "GLOO_", "NCCL_", "HCCL_", "TORCH_", "PYTORCH_", "TORCHELASTIC_", "OMP_", "MKL_", "HABANA_")
_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "TMPDIR"),
    }
)
_SHARED_MEMORY = Path("/dev/shm")
SMOKE_RANKS = 2
SMOKE_STEPS = 3


def versions() -> dict[str, str]:
    """What is installed, and how torch was built.

    Example:
        >>> from shardrt.demo.diagnosis import versions
        >>> versions()["pluggy"].split(".")[0]
        '1'
    """
    import torch

    build = "CUDA " + torch.version.cuda if torch.version.cuda else "CPU only"
    return {
        "shardrt": shardrt.__version__,
        "hooks": ".".join(map(str, shardrt.HOOK_VERSION)),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch build": f"{build}, commit {torch.version.git_version[:12]}",
        **{name: _version(name) for name in _DISTRIBUTIONS},
    }


def devices() -> list[dict[str, Any]]:
    """The CPU and what torch sees beside it.

    Example:
        >>> from shardrt.demo.diagnosis import devices
        >>> devices()[0]["type"]
        'cpu'
    """
    import torch

    found: list[dict[str, Any]] = [{"type": "cpu", "count": 1, "name": platform.processor() or platform.machine()}]
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        ask = getattr(getattr(torch, accelerator.type, None), "get_device_name", None)
        name = accelerator.type if ask is None else str(ask(0))
        found.append({"type": accelerator.type, "count": torch.accelerator.device_count(), "name": name})
    return found


def threads() -> dict[str, int]:
    """Cores of this process and threads that torch would use."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "cores": cores,
        "torch": torch.get_num_threads(),
        "torch between operations": torch.get_num_interop_threads(),
    }


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that are set and that matter to distributed training.

    Example:
        >>> from shardrt.demo.diagnosis import environment
        >>> environment({"WORLD_SIZE": "2", "NCCL_DEBUG": "INFO", "EDITOR": "vi"})
        {'NCCL_DEBUG': 'INFO', 'WORLD_SIZE': '2'}
    """
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in sorted(environ) if name in _VARIABLES or name.startswith(_PREFIXES)}


def shared_memory(folder: Path = _SHARED_MEMORY) -> dict[str, Any]:
    """How much shared memory ranks of this machine could use; zero where there is none.

    Example:
        >>> from pathlib import Path
        >>> from shardrt.demo.diagnosis import shared_memory
        >>> shared_memory(Path("no-such-folder"))
        {'folder': 'no-such-folder', 'total': 0, 'free': 0}
    """
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return {"folder": str(folder), "total": 0, "free": 0}
    return {"folder": str(folder), "total": usage.total, "free": usage.free}


def automatic(registry: Registry, device_type: str, world_size: int) -> dict[str, Any]:
    """What ``backend="auto"`` takes here, and why.

    Example:
        >>> import shardrt
        >>> from shardrt.demo.diagnosis import automatic
        >>> automatic(shardrt.load_registry(), "cpu", 1)["backend"]
        'null'
    """
    records = [entry.record for entry in registry.backends]
    try:
        record, reason = choose_backend(records, device_type, world_size)
    # A probe of somebody's plugin may raise anything; that auto cannot choose here is then the finding.
    except Exception as error:
        told = str(error) if isinstance(error, ShardrtError) else f"{type(error).__name__}: {error}"
        return {"device_type": device_type, "ranks": world_size, "backend": None, "reason": told}
    return {"device_type": device_type, "ranks": world_size, "backend": record.name, "reason": reason}


def smoke_test(*, patience: float = 120.0) -> dict[str, Any]:
    """Two ranks on the CPU train a few steps: equal to each other and to the unsharded twin, or failed and why."""
    started = time.monotonic()
    outcome: dict[str, Any] = {"ok": False, "ranks": SMOKE_RANKS, "steps": SMOKE_STEPS, "error": ""}
    try:
        answers = launch_ranks("shardrt.demo.smoke", {"steps": SMOKE_STEPS}, ranks=SMOKE_RANKS, patience=patience)
    except ShardrtError as error:
        return {**outcome, "error": str(error), "seconds": time.monotonic() - started}
    return {**outcome, **judge(answers), "seconds": time.monotonic() - started}


def judge(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether what the ranks of the smoke test brought home is right.

    Example:
        >>> from shardrt.demo.diagnosis import judge
        >>> alike = {"digest": "a1", "largest_parameter_difference": 0.0, "backend": "gloo", "seconds": 0.1}
        >>> judge([alike, {**alike, "digest": "b2"}])["error"]
        'the ranks ended with different parameters'
    """
    difference = max(answer["largest_parameter_difference"] for answer in answers)
    problems = []
    if len({answer["digest"] for answer in answers}) > 1:
        problems.append("the ranks ended with different parameters")
    if difference != 0:
        problems.append(f"parameters differ by {difference:.3g} from those of the unsharded twin")
    return {
        "ok": not problems,
        "error": "; ".join(problems),
        "backend": answers[0]["backend"],
        "largest_parameter_difference": difference,
        "training_seconds": max(answer["seconds"] for answer in answers),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"
