"""Who holds the optimizer state, and the ways to save and load it: torch's as they come, and ours as they come."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

import shardrt
from shardrt.bench.state import BEHIND, CONSOLIDATE, DCP, DCP_LOAD, LAYERS, LOAD, SAVE, TORCH_ZERO, StateSettings
from shardrt.demo.model import ByteTransformer

_LR = 3e-4
_CONTEXT = 32
_HEADS = 8


@attrs.frozen(kw_only=True, eq=False)
class Holder:
    """Optimizer state on all ranks, filled by a real step."""

    folder: Path
    ways: Mapping[str, Callable[[], Any]]
    step: Callable[[], None]
    about: Mapping[str, Any] = attrs.field(factory=dict)


def make_holder(name: str, settings: StateSettings, folder: Path, cleanup: ExitStack) -> Holder:
    """A holder by its name; what is put on the stack is closed when it is done."""
    torch.manual_seed(0)
    model = ByteTransformer(width=settings.width, layers=LAYERS, heads=_HEADS, context=_CONTEXT)
    makers = {"zero": _zero, "dtensors": _dtensors, "shardrt": _ours}
    return makers[name](model, folder, cleanup)


def _backward(model: torch.nn.Module) -> None:
    model(torch.randint(256, (1, _CONTEXT + 1))).backward()


def _zero(model: torch.nn.Module, folder: Path, cleanup: ExitStack) -> Holder:
    del cleanup
    with warnings.catch_warnings():
        # Importing it compiles functions with an interface that torch itself has deprecated.
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.", category=DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=_LR)

    def step() -> None:
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()

    def consolidate() -> None:
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")

    step()
    return Holder(folder=folder, ways={TORCH_ZERO: consolidate}, step=step)


def _dtensors(model: torch.nn.Module, folder: Path, cleanup: ExitStack) -> Holder:
    """As FSDP2 keeps it: every tensor cut along its first dim, which is what DCP is made for."""
    del cleanup
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        # A copy: what is kept must not be a view of the whole.
        return distribute_tensor(tensor.detach().clone(), mesh, [Shard(0)], src_data_rank=None)

    _backward(model)
    params = {}
    for name, param in model.named_parameters():
        params[name] = torch.nn.Parameter(cut(param))
        assert param.grad is not None
        params[name].grad = cut(param.grad)
    optimizer = torch.optim.AdamW(params.values(), lr=_LR)
    optimizer.step()
    optimizer.zero_grad()
    state = {f"{name}.{key}": value for name, p in params.items() for key, value in optimizer.state[p].items()}
    return Holder(
        folder=folder,
        ways={
            DCP: lambda: save(dict(state), checkpoint_id=folder / "dcp"),
            DCP_LOAD: lambda: load(dict(state), checkpoint_id=folder / "dcp"),
        },
        step=lambda: None,
    )


def _ours(model: torch.nn.Module, folder: Path, cleanup: ExitStack) -> Holder:
    rt = cleanup.enter_context(shardrt.Runtime(backend="gloo", device="cpu", timeout=300))
    optimizer = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=_LR)

    def step() -> None:
        _backward(model)
        optimizer.step()
        optimizer.zero_grad()

    def consolidate() -> None:
        state = rt.full_state_dict(optimizer, rank0_only=True, offload_to_cpu=True)
        if rt.rank == 0:
            torch.save(state, folder / "optimizer.pt")

    step()
    path = os.fspath(folder / "checkpoints")
    return Holder(
        folder=folder,
        ways={
            SAVE: lambda: rt.save(path, optimizer=optimizer),
            LOAD: lambda: rt.load(path, optimizer=optimizer),
            CONSOLIDATE: consolidate,
            BEHIND: lambda: rt.save(path, optimizer=optimizer, asynchronous=True),
        },
        step=step,
        about={
            "parameters": sum(param.numel() for param in model.parameters()),
            "state_bytes": optimizer.state_bytes(),
        },
    )
