"""State dicts in files of ``torch.save``: a model's, an optimizer's, or both in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from shardrt.errors import CheckpointError, StateError
from shardrt.interchange.backed import FileBacked
from shardrt.interchange.boxes import Box, lazy_boxes, word_of
from shardrt.interchange.naming import bare_names, few
from shardrt.interchange.optimizers import dict_from_optimizer, looks_like_optimizer, optimizer_from_dict
from shardrt.interchange.torch_serial import load_weights, save_weights
from shardrt.plan.params import ITEM_SIZES
from shardrt.state.portable import LazyTensor, PortableOptimizer, PortableState

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optim", "optimizer_state", "optimizer_states")
_MOST_REPEATED = 1 << 30
"""Bytes up to which a tensor may say its few stored elements many times over (a stride of 0)."""


def read_torch(
    model: str | Path | None = None, optimizer: str | Path | None = None, *, names: Sequence[str] | None = None
) -> PortableState:
    """What files of ``torch.save`` hold: state dicts of a model and of an optimizer, in one file or in two.

    Nothing is unpickled that is not a tensor or a plain value. Tensors are mapped, not read. A model file may be a bare
    state dict or hold it under ``model`` or ``state_dict``, and an optimizer's beside it under ``optimizer``,
    ``optimizer_state_dict`` or ``optim``. The consolidated dict of torch's ``ZeroRedundancyOptimizer`` is an
    optimizer's state dict like any other. ``names`` are the optimizer's parameters in its order, where the file does
    not name them and the model's order does not tell.

    Example:
        >>> import torch
        >>> from shardrt.interchange import read_torch
        >>> torch.save({"state_dict": torch.nn.Linear(2, 1).state_dict(), "epoch": 3}, "last.pt")
        >>> state = read_torch("last.pt")
        >>> sorted(state.models["model"]), state.extra
        (['bias', 'weight'], {'epoch': 3})
    """
    if model is None and optimizer is None:
        raise StateError("read_torch needs a file: model=, optimizer= or both")
    if model is not None:
        found = _open(Path(model))
        if found.model is None:
            raise CheckpointError(
                f"{model} holds an optimizer's state dict and no model; pass it as optimizer= (--optimizer)"
            )
    else:
        found = _Found(where="", model=None, optimizer=None, extra={})
    tensors = _Tensors()
    weights = None if found.model is None else _weights(found.model, tensors, found.where)
    extra, raw, where = found.extra, found.optimizer, found.where
    if optimizer is not None:
        other = _open(Path(optimizer))
        if other.optimizer is None:
            raise CheckpointError(f"{optimizer} holds no optimizer's state dict ('state' and 'param_groups')")
        extra, raw, where = {**other.extra, **extra}, other.optimizer, other.where
    read: PortableOptimizer | None = None
    if raw is not None:
        read = optimizer_from_dict(
            raw, model=weights, names=names, where=where, lazily=lambda t: tensors.lazy(t, where)
        )
    elif names is not None:
        raise StateError(f"{model} holds no optimizer, so names= has nothing to name")
    return PortableState(
        models={} if weights is None else {"model": weights},
        optimizers={} if read is None else {"optimizer": read},
        extra=extra or None,
    )


def write_torch(
    state: PortableState,
    model_path: str | Path | None = None,
    optimizer_path: str | Path | None = None,
    *,
    named: bool = True,
) -> None:
    """Write state dicts that ``torch.load(..., weights_only=True)`` and ``load_state_dict`` take.

    ``named`` writes ``param_names`` into the optimizer's groups, so that it can be read without the model. An optimizer
    without names that loads them has names from then on. ``extra`` is not written: there is no usual place for it.

    Example:
        >>> import torch
        >>> from shardrt.interchange import write_torch
        >>> from shardrt.state.portable import LazyTensor, PortableState
        >>> state = PortableState(models={"model": {"w": LazyTensor.of(torch.ones(2))}}, optimizers={})
        >>> write_torch(state, "model.pt")
        >>> torch.load("model.pt", weights_only=True)
        {'w': tensor([1., 1.])}
    """
    if model_path is None and optimizer_path is None:
        raise StateError("write_torch needs a path: model_path, optimizer_path or both")
    # Both are looked up first: a state that lacks one must not leave half of it written.
    model = None if model_path is None else the_only(state.models, "model")
    optimizer = None if optimizer_path is None else the_only(state.optimizers, "optimizer")
    if model is not None and model_path is not None:
        backed = FileBacked(Path(model_path).absolute().parent)
        save_weights({name: backed.whole(lazy) for name, lazy in model.items()}, Path(model_path))
    if optimizer is not None and optimizer_path is not None:
        backed = FileBacked(Path(optimizer_path).absolute().parent)
        raw = dict_from_optimizer(optimizer, backed.tree, numbered=True, named=named)
        save_weights(raw, Path(optimizer_path))


def the_only(held: Mapping[str, Any], kind: str) -> Any:
    """The one model or optimizer of a state, for files that have room for one."""
    if len(held) != 1:
        raise StateError(
            f"the file has room for one {kind}, but the state has {len(held)}: {few(held) or 'none'}. "
            "Hand over a PortableState with the one that is meant"
        )
    [value] = held.values()
    return value


@attrs.frozen(kw_only=True)
class _Found:
    where: str
    model: Mapping[str, Any] | None
    optimizer: Mapping[str, Any] | None
    extra: Mapping[str, Any]


def _open(path: Path) -> _Found:
    value, where = load_weights(path), str(path)
    if isinstance(value, torch.Tensor) or not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
        raise CheckpointError(
            f"{where} holds a {type(value).__name__}; expected a state dict, or a dict of state dicts"
        )
    if looks_like_optimizer(value):
        return _Found(where=where, model=None, optimizer=value, extra={})
    model_key = _one_of(value, _MODEL_KEYS, where)
    optimizer_key = _one_of(value, _OPTIMIZER_KEYS, where)
    if model_key is None and optimizer_key is None:
        return _Found(where=where, model=value, optimizer=None, extra={})
    optimizer = None if optimizer_key is None else value[optimizer_key]
    if isinstance(optimizer, (list, tuple)):
        if len(optimizer) != 1:
            raise CheckpointError(f"{where} holds {len(optimizer)} optimizers under {optimizer_key!r}; one is read")
        optimizer = optimizer[0]
    return _Found(
        where=where,
        model=None if model_key is None else value[model_key],
        optimizer=optimizer,
        extra={key: each for key, each in value.items() if key not in (model_key, optimizer_key)},
    )


def _one_of(value: Mapping[str, Any], keys: Sequence[str], where: str) -> str | None:
    # A tensor under such a key is a parameter of that name in a bare state dict.
    present = [key for key in keys if isinstance(value.get(key), (Mapping, list, tuple))]
    if len(present) > 1:
        raise CheckpointError(f"{where} has both {' and '.join(map(repr, present))}: cannot tell which is meant")
    return present[0] if present else None


def _weights(raw: Mapping[str, Any], tensors: _Tensors, where: str) -> dict[str, LazyTensor]:
    if not isinstance(raw, Mapping):
        raise CheckpointError(f"{where} holds a {type(raw).__name__} where a model's state dict is expected")
    if strangers := [str(name) for name, value in raw.items() if not isinstance(value, torch.Tensor)]:
        raise CheckpointError(
            f"{where} has entries that are no tensors among the model's: {few(strangers)}. A model here is tensors by "
            "name; keep what get_extra_state returns elsewhere, or return tensors from it"
        )
    bare = bare_names(list(raw), where=where)
    return {bare[name]: tensors.lazy(value, f"{where}: {name}") for name, value in raw.items()}


@attrs.define
class _Tensors:
    """Mapped tensors as lazy ones. Two names of one tensor get one lazy tensor: that is how ties are told."""

    known: dict[tuple[Any, ...], LazyTensor] = attrs.field(factory=dict)

    def lazy(self, tensor: torch.Tensor, where: str) -> LazyTensor:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout is not torch.strided or tensor.is_quantized or type(tensor) not in _PLAIN_TENSORS:
            raise StateError(
                f"{where} is a {type(tensor).__name__} of layout {tensor.layout}; only dense ones are read"
            )
        if dtype not in ITEM_SIZES:
            raise StateError(f"{where} has the dtype {dtype}; known dtypes: {', '.join(ITEM_SIZES)}")
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes > max(_MOST_REPEATED, tensor.untyped_storage().nbytes()):
            raise CheckpointError(
                f"{where} claims {nbytes} bytes, but the file holds {tensor.untyped_storage().nbytes()} for it"
            )
        shape = tuple(tensor.shape)
        same = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), shape, tensor.stride(), dtype)
        if tensor.numel() == 0 or same not in self.known:
            self.known[same] = _lazy(tensor.detach(), dtype, shape)
        return self.known[same]


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _lazy(tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> LazyTensor:
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        # A copy: whoever keeps what was read must not depend on the file being there.
        return LazyTensor(dtype=dtype, shape=shape, read=lambda start, stop: flat[start:stop].clone())
    # Other strides: elements are picked by range, since bringing all of them in order would take memory for all.
    words = tensor.resolve_conj().resolve_neg()
    item = ITEM_SIZES[dtype]
    if item == 16:
        return LazyTensor(dtype=dtype, shape=shape, read=lambda start, stop: tensor.reshape(-1)[start:stop])
    array = words.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item]).numpy()
    box = Box(offsets=(0,) * len(shape), sizes=shape, open=lambda: array.view(word_of(dtype)))
    return lazy_boxes(dtype, shape, [box])
