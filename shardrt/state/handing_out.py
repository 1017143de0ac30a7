"""A whole state that one rank alone has, handed out in windows to those who need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardrt.optim.managed import ManagedOptimizer
from shardrt.protocols import Communicator, ControlChannel
from shardrt.state.full import slice_torch_state
from shardrt.state.optimizers import Tree, as_tree
from shardrt.state.streams import Stream, gather_streams


def hand_out_model(
    tensors: Mapping[str, torch.Tensor], communicator: Communicator, control: ControlChannel, device: torch.device
) -> None:
    """Everybody gets the first rank's values, in place."""
    names = list(tensors)
    apart = {name: tensor.detach().contiguous() for name, tensor in tensors.items() if not tensor.is_contiguous()}

    def tensor(number: int) -> torch.Tensor:
        return apart.get(names[number], tensors[names[number]]).detach()

    sizes = [tensors[name].nbytes for name in names]
    streams = [Stream(sizes if rank == 0 else []) for rank in range(control.world_size)]
    gather_streams(communicator, streams, tensor, lambda _, number: tensor(number), to=None, device=device)
    with torch.no_grad():
        for name, values in apart.items():
            tensors[name].detach().copy_(values)


def hand_out_optimizer(
    optimizer: ManagedOptimizer,
    state: Mapping[str, Mapping[str, Any]] | None,
    options: Sequence[Mapping[str, Any]] | None,
    steps: int | None,
    communicator: Communicator,
    control: ControlChannel,
    device: torch.device,
) -> tuple[dict[torch.Tensor, Any], list[dict[str, Any]], int | None]:
    """What this rank's shards start from, of a state by parameter that the first rank has; and the group options.

    One parameter after the other: no rank holds more than its share and the largest parameter's state.
    """
    first = control.rank == 0
    trees: dict[str, dict[str, Tree]] = {}
    packed = as_tree(list(options or ()), "options", where="group options")
    if first:
        assert state is not None
        trees = {
            name: {
                key: as_tree(value, key, where=f"optimizer state {key!r} of {name!r}") for key, value in values.items()
            }
            for name, values in state.items()
        }
    about = {
        "options": [packed.tree, _specs(packed)],
        "steps": steps,
        "state": {
            name: {key: [tree.tree, _specs(tree)] for key, tree in values.items()} for name, values in trees.items()
        },
    }
    told = control.exchange("state of the first rank", about if first else None)[0]
    taken: dict[torch.Tensor, Any] = {}
    for name, values in told["state"].items():
        whole = {
            key: _spread(trees[name][key] if first else None, row, communicator, control, device)
            for key, row in values.items()
        }
        taken |= slice_torch_state(optimizer, {name: whole})
    shared = _spread(packed if first else None, told["options"], communicator, control, device)
    return taken, list(shared), told["steps"]


def _specs(tree: Tree) -> dict[str, list[Any]]:
    return {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tree.tensors.items()}


def _spread(
    mine: Tree | None, row: Sequence[Any], communicator: Communicator, control: ControlChannel, device: torch.device
) -> Any:
    tree, specs = row
    if mine is None:
        tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in specs.items()}
    else:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in mine.tensors.items()}
    listed = list(tensors.values())
    streams = [Stream([t.nbytes for t in listed] if rank == 0 else []) for rank in range(control.world_size)]
    gather_streams(
        communicator, streams, lambda number: listed[number], lambda _, number: listed[number], to=None, device=device
    )
    return Tree(tree=tree, tensors=tensors).value()
