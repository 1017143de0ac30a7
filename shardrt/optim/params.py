"""Whatever a user hands to an optimizer, as named parameter groups and as the specifications planning works on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import attrs
import torch

from shardrt.errors import ConfigError, UnsupportedError
from shardrt.optim.readers import KeptByModule, watched_by
from shardrt.plan import ITEM_SIZES, ParamSpec, Shard


@attrs.frozen(kw_only=True, eq=False)
class NamedParam:
    """A parameter tensor with its name and the index of its group."""

    name: str
    tensor: torch.Tensor
    group: int
    dtype: str = attrs.field(init=False)
    """Its own, in which it is stepped and stored, whatever it is computed with in."""

    @dtype.default
    def _own_dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    def spec(self, *, trainable: bool | None = None) -> ParamSpec:
        """What planning needs to know of it."""
        return ParamSpec(
            name=self.name,
            shape=tuple(self.tensor.shape),
            dtype=self.dtype,
            trainable=self.tensor.requires_grad if trainable is None else trainable,
            group=self.group,
        )


@attrs.frozen(kw_only=True)
class NamedGroup:
    """One parameter group: its parameters and the options the user gave for it."""

    params: tuple[NamedParam, ...]
    options: Mapping[str, Any]

    def as_torch(self) -> dict[str, Any]:
        """The group as ``torch.optim.Optimizer`` takes it."""
        tensors = [param.tensor for param in self.params]
        return {**self.options, "params": tensors, "param_names": [param.name for param in self.params]}


def read_groups(
    params: Any, *, first_group: int = 0, taken: Iterable[NamedParam] = (), deferred: bool = False
) -> list[NamedGroup]:
    """Named groups from tensors, ``(name, tensor)`` tuples, a mapping of names, or dicts with ``params``.

    Parameters without a name are called ``param.0``, ``param.1`` and so on. One that is listed twice in a group (tied
    weights) counts once, under its first name. ``deferred`` lets them be on the meta device.

    Example:
        >>> import torch
        >>> from shardrt.optim.params import read_groups
        >>> groups = read_groups([{"params": torch.nn.Linear(2, 1).named_parameters(), "lr": 0.1}])
        >>> [param.name for param in groups[0].params], groups[0].options
        (['weight', 'bias'], {'lr': 0.1})
    """
    known = {param.tensor: param for param in taken}
    names = {param.name for param in known.values()}
    groups: list[NamedGroup] = []
    for offset, (entries, options) in enumerate(_split_groups(params)):
        found: list[NamedParam] = []
        for name, tensor in _entries(entries):
            _check_tensor(name, tensor, deferred=deferred)
            earlier = known.get(tensor)
            if earlier is not None:
                if earlier.group != first_group + offset:
                    raise ConfigError(
                        f"parameter {earlier.name!r} is in group {earlier.group} and again in group "
                        f"{first_group + offset}; give each parameter to one group"
                    )
                continue
            name = f"param.{len(known)}" if name is None else name
            if name in names:
                raise ConfigError(
                    f"two parameters are called {name!r}; names must be unique: pass named_parameters() of one root "
                    "module, or add a prefix: (f'critic.{name}', p) for name, p in critic.named_parameters()"
                )
            param = NamedParam(name=name, tensor=tensor, group=first_group + offset)
            known[tensor] = param
            names.add(name)
            found.append(param)
        groups.append(NamedGroup(params=tuple(found), options=options))
    if not any(group.params for group in groups):
        raise ConfigError(
            "the optimizer got an empty parameter list; pass module.named_parameters() of a module that has parameters"
        )
    return groups


def check_no_aliases(params: Iterable[NamedParam]) -> None:
    """Refuse parameters that are different objects in the same memory: sharded, each would be updated on its own."""
    present = [param for param in params if param.tensor.numel() and not param.tensor.is_meta]
    spans = sorted((*_span(param.tensor), param.name) for param in present)
    for (_, end, name), (start, _, following) in pairwise(spans):
        if start < end:
            raise UnsupportedError(
                f"parameters {name!r} and {following!r} are different objects that share memory; "
                "tie weights by assigning the same Parameter to both modules"
            )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _split_groups(params: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    if isinstance(params, torch.Tensor):
        raise ConfigError("params must be an iterable of parameters, got one tensor; pass [tensor]")
    if isinstance(params, torch.nn.Module):
        raise ConfigError(
            f"params must be parameters, got the module {type(params).__name__}; pass module.named_parameters()"
        )
    if isinstance(params, Mapping):
        yield from [_one_group(params)] if "params" in params else [(list(params.items()), {})]
        return
    if not isinstance(params, Iterable):
        raise ConfigError(f"params must be an iterable of parameters, named parameters or dicts, got {params!r}")
    listed = list(params)
    if not any(isinstance(entry, Mapping) for entry in listed):
        yield listed, {}
        return
    for entry in listed:
        if not isinstance(entry, Mapping) or "params" not in entry:
            raise ConfigError(f"every parameter group must be a dict with 'params', got {_kind(entry)}")
        yield _one_group(entry)


def _one_group(group: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    entries = group["params"]
    if isinstance(entries, (set, frozenset)):
        raise ConfigError("parameters must come in an order that is the same on all ranks, got a set; pass a list")
    if isinstance(entries, torch.Tensor):
        entries = [entries]
    elif isinstance(entries, Mapping):
        entries = list(entries.items())
    names: Sequence[str] | None = group.get("param_names")
    return (list(zip(names, entries, strict=True)) if names is not None else entries), options


def _entries(entries: Iterable[Any]) -> Iterator[tuple[str | None, torch.Tensor]]:
    if isinstance(entries, (set, frozenset)):
        raise ConfigError("parameters must come in an order that is the same on all ranks, got a set; pass a list")
    named: bool | None = None
    for entry in entries:
        has_name = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
        if named is not None and has_name != named:
            raise ConfigError("a group mixes named and unnamed parameters; name all of them or none")
        named = has_name
        name, tensor = entry if has_name else (None, entry)
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"an optimizer takes parameters or (name, parameter) tuples, got {_kind(tensor)}: {tensor!r:.80}"
            )
        yield name, tensor


def _check_tensor(name: str | None, tensor: torch.Tensor, *, deferred: bool) -> None:
    called = f"parameter {name!r}" if name else "a parameter"
    if isinstance(watched_by(tensor), KeptByModule):
        raise ConfigError(
            f"{called} is of a module that is sharded; step the optimizer that came with it: model, opt = rt.shard(...)"
        )
    if torch.nn.parameter.is_lazy(tensor):
        raise UnsupportedError(f"{called} has no shape yet; run a lazy module once before you build its optimizer")
    if tensor.layout is not torch.strided:
        raise UnsupportedError(f"{called} has layout {tensor.layout}; only dense parameters can be sharded")
    if tensor.is_meta and not deferred:
        raise UnsupportedError(f"{called} is on the meta device; materialise it first (module.to_empty(device=...))")
    if type(tensor.data) is not torch.Tensor:
        raise UnsupportedError(
            f"{called} is a {type(tensor.data).__name__}; parameters that another library lays out cannot be sharded "
            "again: pass plain parameters"
        )
    if str(tensor.dtype).removeprefix("torch.") not in ITEM_SIZES:
        raise UnsupportedError(f"{called} has dtype {tensor.dtype}; known dtypes: {', '.join(ITEM_SIZES)}")
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise UnsupportedError(f"{called} has elements that share memory with each other; pass parameter.contiguous()")
    if not tensor.is_leaf:
        raise ConfigError(f"{called} is not a leaf: it was computed from other tensors; pass the leaves instead")


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def parameter_for(
    param: NamedParam, shard: Shard, *, apart: bool = False, values: torch.Tensor | None = None
) -> torch.nn.Parameter:
    """The object the local optimizer holds. Its data is put in place when the buckets are laid out.

    ``apart``: in memory of its own, so that the whole parameter's can go. ``values``: where nobody has the whole.
    """
    if values is None:
        tensor = param.tensor.detach()
        part = tensor if shard.numel == tensor.numel() else tensor.reshape(-1)[shard.start : shard.stop]
        values = part.clone() if apart else part
    stepped = torch.nn.Parameter(values, requires_grad=param.tensor.requires_grad)
    # Marks that users and libraries put on parameters ("no decay", "is a head") are for the optimizer to see.
    vars(stepped).update(vars(param.tensor))
    return stepped
