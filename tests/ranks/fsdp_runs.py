"""Runs of FSDP2 and of torch's ZeroRedundancyOptimizer that leave checkpoints behind, or start from some."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

LAYOUTS = ("nested", "flattened", "stateful")
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Uneven(torch.nn.Module):
    """Sizes that no number of ranks divides, one row that only one rank has, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before a normalisation has a gradient of nothing but rounding, which Adam would make much of.
        self.first = torch.nn.Linear(7, 13, bias=False)
        self.norm = torch.nn.BatchNorm1d(13)
        self.narrow = torch.nn.Linear(13, 1)
        self.last = torch.nn.Linear(1, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.narrow(self.norm(self.first(x)))))  # type: ignore[no-any-return]


def groups(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Biases without weight decay: two groups, in another order than the model's."""
    named = dict(module.named_parameters())
    return [
        {"params": [param for name, param in named.items() if "bias" in name], "weight_decay": 0.0},
        {"params": [param for name, param in named.items() if "bias" not in name]},
    ]


def build(seed: int, optimizer: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = Uneven()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.first, model.norm, model.narrow, model.last, model):
        fully_shard(part, mesh=mesh)
    if optimizer == "adamw":
        return model, torch.optim.AdamW(groups(model), lr=1e-2)
    return model, torch.optim.SGD(groups(model), lr=1e-2, momentum=0.9, weight_decay=1e-3)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The same batch on every rank, so that the number of ranks changes nothing but rounding."""
    for step in steps:
        data = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
        model(data).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class App:
    """As in torch's guide: model and optimizer as one Stateful."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.epoch = 0

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim, "extra": {"epoch": self.epoch}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.epoch = state["extra"]["epoch"]


def layout_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, layout: str
) -> tuple[dict[str, Any], StateDictOptions]:
    options = StateDictOptions(flatten_optimizer_state_dict=layout == "flattened")
    if layout == "stateful":
        return {"app": App(model, optimizer)}, options
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    return {"model": of_model, "optim": of_optimizer, "extra": {"epoch": 3}}, options


def keep_whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """The whole state dicts as one torch file, written by the first rank: what tests compare with."""
    of_model, of_optimizer = get_state_dict(model, optimizer, options=WHOLE)
    if dist.get_rank() == 0:
        torch.save({"model": of_model, "optim": of_optimizer}, path)
    dist.barrier()


def quiet() -> None:
    """Torch's own advice about its own code."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def leave_checkpoints(directory: str, optimizer: str) -> None:
    """Train three steps, save in every layout, train three more; whole state dicts of both moments beside them."""
    quiet()
    root = Path(directory)
    model, optim = build(5, optimizer)
    train(model, optim, range(3))
    for layout in LAYOUTS:
        tree, _ = layout_of(model, optim, layout)
        if layout == "stateful":
            tree["app"].epoch = 3
        dcp.save(tree, checkpoint_id=root / layout)
    keep_whole(model, optim, root / "then.pt")
    train(model, optim, range(3, 6))
    keep_whole(model, optim, root / "later.pt")


def start_from(directory: str, checkpoint: str, layout: str, optimizer: str) -> int:
    """Load a directory into a fresh run, and leave its whole state dicts now and three steps later."""
    quiet()
    root = Path(directory)
    model, optim = build(6, optimizer)
    tree, options = layout_of(model, optim, layout)
    dcp.load(tree, checkpoint_id=root / checkpoint)
    if layout == "stateful":
        epoch = tree["app"].epoch
    else:
        set_state_dict(model, optim, model_state_dict=tree["model"], optim_state_dict=tree["optim"], options=options)
        epoch = tree["extra"]["epoch"]
    keep_whole(model, optim, root / f"{checkpoint}-then.pt")
    train(model, optim, range(3, 6))
    keep_whole(model, optim, root / f"{checkpoint}-later.pt")
    return int(epoch)


def consolidate_zero(directory: str, optimizer: str) -> None:
    """Train with torch's ZeroRedundancyOptimizer, and leave the dict that the first rank consolidates."""
    quiet()
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    from tests.ranks.twins import OPTIMIZERS, Odd, batch

    cls, defaults = OPTIMIZERS[optimizer]
    torch.manual_seed(1)
    model = DistributedDataParallel(Odd(matrices_only=optimizer == "muon"), find_unused_parameters=True)
    trained = [param for param in model.parameters() if param.requires_grad]
    zero = ZeroRedundancyOptimizer(trained, cls, **defaults)
    for step in range(3):
        model(batch(step, int(os.environ["RANK"]))).pow(2).mean().backward()
        zero.step()
        zero.zero_grad()
    zero.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        names = [name.removeprefix("module.") for name, param in model.named_parameters() if param.requires_grad]
        torch.save(
            {"model": model.state_dict(), "optimizer": zero.state_dict(), "names": names}, Path(directory) / "zero.pt"
        )
    dist.barrier()


def leave_grid(directory: str) -> None:
    """Tensors that four ranks hold in every way a mesh of two axes offers, saved as a model."""
    quiet()
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    ways: dict[str, list[Any]] = {
        "columns": [Replicate(), Shard(1)],
        "grid": [Shard(0), Shard(1)],
        "twice": [Shard(0), Shard(0)],
        "inner": [Shard(2), Shard(1)],
        "everywhere": [Replicate(), Replicate()],
    }
    torch.manual_seed(0)
    whole = {name: torch.randn(5, 7, 3) for name in ways}
    model: dict[str, DTensor] = {name: distribute_tensor(whole[name], mesh, how) for name, how in ways.items()}
    dcp.save({"model": model}, checkpoint_id=Path(directory) / "grid")
    if dist.get_rank() == 0:
        torch.save(whole, Path(directory) / "grid.pt")
