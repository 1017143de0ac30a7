"""The whole state of a sharded optimizer in torch's own format, brought together or handed out in bounded windows."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch

from shardrt.errors import StateError
from shardrt.optim.managed import ManagedOptimizer
from shardrt.protocols import Communicator, ControlChannel
from shardrt.state.layout import Giving, StateLayout, describe, lay_out
from shardrt.state.optimizers import group_options, own_state
from shardrt.state.portable import dtype_called
from shardrt.state.streams import gather_streams
from shardrt.state.tree import unpack

_MADE_UP = re.compile(r"param\.\d+\Z")
"""What a parameter is called that was given without a name; torch's format then has no names either."""


def full_optimizer_state(
    optimizer: ManagedOptimizer,
    communicator: Communicator,
    control: ControlChannel,
    *,
    to: int | None,
    device: torch.device,
    on_cpu: bool,
) -> dict[str, Any]:
    """What ``torch.optim.Optimizer.state_dict`` of the unsharded optimizer would give, with tensors of its own.

    Every rank calls it; with ``to`` only that rank gets the state, and the others an empty mapping.
    """
    names = {name: name for name in optimizer.named()}
    state = own_state(optimizer, names)
    layout = lay_out(control.exchange("full state dict", describe(state)))
    wanted = to is None or to == control.rank
    gathered = _Gathered(layout, torch.device("cpu") if on_cpu else device)
    gather_streams(
        communicator,
        [layout.stream(rank) for rank in range(control.world_size)],
        Giving(layout, state, control.rank),
        gathered.place if wanted else lambda rank, number: None,
        to=to,
        device=device,
    )
    if not wanted:
        return {}
    numbers = {name: number for number, name in enumerate(names)}
    found = gathered.by_param()
    return {
        "state": {numbers[name]: found[name] for name in names if found.get(name)},
        "param_groups": torch_groups(optimizer),
    }


class _Gathered:
    """The tensors that arrive, made when the first byte of each does."""

    def __init__(self, layout: StateLayout, where: torch.device) -> None:
        self._layout = layout
        self._where = where
        self._whole: dict[tuple[str, str, str | None], torch.Tensor] = {}

    def place(self, rank: int, number: int) -> torch.Tensor:
        part = self._layout.parts[rank][number]
        whole = self._whole.get((part.param, part.key, part.name))
        if whole is None:
            shape = part.spec.shape if part.name is not None else self._layout.shapes[part.param]
            whole = torch.empty(shape, dtype=dtype_called(part.spec.dtype), device=self._where)
            self._whole[part.param, part.key, part.name] = whole
        return whole if part.name is not None else whole.view(-1)[part.start : part.stop]

    def by_param(self) -> dict[str, dict[str, Any]]:
        layout = self._layout
        found: dict[str, dict[str, Any]] = {}
        for param, keys in layout.keys.items():
            values: dict[str, Any] = {}
            for key in keys:
                dtype = layout.sliced[param].get(key)
                if dtype is None:
                    values[key] = unpack(
                        layout.trees[param][key],
                        lambda name, param=param, key=key: self._tensor(param, key, name),  # type: ignore[misc]
                        where=f"optimizer state {key!r} of {param!r}",
                    )
                else:
                    values[key] = self._tensor(param, key, None)
            found[param] = values
        return found

    def _tensor(self, param: str, key: str, name: str | None) -> torch.Tensor:
        whole = self._whole.get((param, key, name))
        if whole is None:  # no byte of it travelled: it has no elements
            part = next(
                p for parts in self._layout.parts for p in parts if (p.param, p.key, p.name) == (param, key, name)
            )
            shape = self._layout.shapes[param] if name is None else part.spec.shape
            whole = torch.empty(shape, dtype=dtype_called(part.spec.dtype), device=self._where)
        return whole


def torch_groups(optimizer: ManagedOptimizer) -> list[dict[str, Any]]:
    """The groups as torch's state dicts have them: options, parameters by number, and their names if they have any."""
    numbers = {name: number for number, name in enumerate(optimizer.named())}
    by_tensor = {tensor: name for name, tensor in optimizer.named().items()}
    named = not any(_MADE_UP.match(name) for name in by_tensor.values())
    groups = []
    for group, options in zip(optimizer.param_groups, group_options(optimizer), strict=True):
        names = [by_tensor[param] for param in group["params"]]
        with_names = {"param_names": names} if named else {}
        groups.append({**copy.deepcopy(options), "params": [numbers[name] for name in names], **with_names})
    return groups


def check_torch_state(optimizer: ManagedOptimizer, state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The state of each of the optimizer's parameters, by our name, from a dict in torch's format.

    Parameters are matched by their names where both sides name all of them alike, else by their order, as torch does.
    """
    groups = state.get("param_groups")
    entries = state.get("state")
    if not isinstance(groups, (list, tuple)) or not isinstance(entries, Mapping):
        raise StateError(
            "a state dict of an optimizer has 'state' and 'param_groups', this has "
            f"{', '.join(map(repr, state)) or 'nothing'}; pass what torch.optim's or our state_dict() gave"
        )
    if len(groups) != len(optimizer.param_groups):
        raise StateError(
            f"the state dict has {len(groups)} parameter groups, this optimizer {len(optimizer.param_groups)}; build "
            "the optimizer with the same groups, add_param_group included, before loading"
        )
    by_tensor = {tensor: name for name, tensor in optimizer.named().items()}
    found: dict[str, Mapping[str, Any]] = {}
    for index, (saved, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        ours = [by_tensor[param] for param in group["params"]]
        if not isinstance(saved, Mapping) or not isinstance(saved.get("params"), (list, tuple)):
            raise StateError(
                f"parameter group {index} of the state dict has no list of 'params'; it is not torch's format"
            )
        lacking = [key for key, value in optimizer.defaults.items() if key not in saved and not _is_switch(value)]
        if lacking:
            raise StateError(
                f"parameter group {index} of the state dict has no {lacking[0]!r}, which this optimizer needs: it is "
                "of another class; load the state of the same optimizer"
            )
        if len(saved["params"]) != len(ours):
            raise StateError(
                f"parameter group {index} has {len(saved['params'])} parameters in the state dict and {len(ours)} in "
                "this optimizer; build it from the same model with the same groups"
            )
        theirs = saved.get("param_names")
        same_names = theirs is not None and set(theirs) == set(ours) and len(set(theirs)) == len(ours)
        for number, name in zip(saved["params"], list(theirs or ()) if same_names else ours, strict=True):
            value = entries.get(number, {})
            if not isinstance(value, Mapping):
                raise StateError(
                    f"the state of parameter {name!r} is a {type(value).__name__}, not a mapping of values"
                )
            found[name] = value
    return found


def _is_switch(value: object) -> bool:
    """Options that a newer version of a class may have got: they are off, or nothing, where nobody names them."""
    return value is None or isinstance(value, bool)


def slice_torch_state(optimizer: ManagedOptimizer, state: Mapping[str, Mapping[str, Any]]) -> dict[torch.Tensor, Any]:
    """For each tensor that this rank steps, its part of a state by parameter, copied, in the dtypes torch uses."""
    whole = optimizer.named()
    flags = {param: group for group in optimizer.param_groups for param in group["params"]}
    elementwise = optimizer.is_elementwise
    taken: dict[torch.Tensor, Any] = {}
    for shard, stepped in optimizer.owned():
        param = whole[shard.param]
        values = {}
        for key, value in state.get(shard.param, {}).items():
            values[key] = _part(
                value, key, shard.param, (shard.start, shard.stop), param, stepped, flags[param], elementwise
            )
        if values:
            taken[stepped] = values
    return taken


def _part(
    value: Any,
    key: str,
    name: str,
    run: tuple[int, int],
    param: torch.Tensor,
    stepped: torch.Tensor,
    group: Mapping[str, Any],
    elementwise: bool,
) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if value.shape != param.shape:
        if elementwise and value.numel() != 1:
            raise StateError(
                f"optimizer state {key!r} of {name!r} has shape {list(value.shape)}, and the parameter "
                f"{list(param.shape)}; load the state of the same model"
            )
        part = value.detach()
    else:
        part = value.detach().reshape(-1)[run[0] : run[1]].view(stepped.shape)
    if key == "step":  # counts stay where and what they are, unless a kernel on the device reads them
        on_device = group.get("capturable") or group.get("fused")
        return part.to(dtype=torch.float32, device=stepped.device, copy=True) if on_device else part.clone()
    dtype = stepped.dtype if stepped.is_floating_point() else part.dtype
    if part.shape != stepped.shape:
        return part.to(dtype=dtype, device=stepped.device, copy=True)
    placed = torch.empty_like(stepped, dtype=dtype, requires_grad=False)  # in the parameter's own order of elements
    placed.copy_(part)
    return placed


def steps_in(state: Mapping[str, Mapping[str, Any]]) -> int | None:
    """How many updates the optimizer had made, where its state tells."""
    counts = [values["step"] for values in state.values() if "step" in values]
    found = [int(count) for count in counts if isinstance(count, (int, float, torch.Tensor))]
    return max(found, default=None)
