"""Directories of ``torch.distributed.checkpoint``, as FSDP2 runs leave them, as a portable state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from shardrt.errors import CheckpointError
from shardrt.interchange.archives import open_tensor
from shardrt.interchange.boxes import Box, Words, lazy_boxes
from shardrt.interchange.dcp_metadata import Chunk, Directory, StoredItem, TensorEntry, read_directory
from shardrt.interchange.naming import bare_names, few
from shardrt.interchange.optimizers import optimizer_from_dict
from shardrt.interchange.torch_serial import load_weights_from
from shardrt.state.portable import LazyTensor, PortableState

KeyPath = tuple[str | int, ...]
_MODELS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZERS = ("optim", "optimizer", "optimizer_state_dict")
_MOST_VALUE_BYTES = 256 << 20
"""Bytes of one entry that is no tensor."""


def read_dcp(
    path: str | Path,
    *,
    model: str | None = None,
    optimizer: str | None = None,
    names: Sequence[str] | None = None,
    extra: bool = True,
) -> PortableState:
    """What a directory of ``torch.distributed.checkpoint`` holds, at whatever number of ranks it was saved.

    Its metadata is a pickle, and is read without unpickling. Tensors are mapped and put together from their chunks by
    range. Where the model and the optimizer are is found by what they look like; ``model="app.model"`` and
    ``optimizer="app.optim"`` say it where several could be meant. Everything else is read into ``extra``, whole, unless
    that is switched off. ``names`` are the parameters of an optimizer that numbers them, in its order.

    Example:
        >>> import torch
        >>> from shardrt.interchange import read_dcp, write_dcp
        >>> from shardrt.state.portable import LazyTensor, PortableState
        >>> weights = {"layer.weight": LazyTensor.of(torch.arange(6).view(2, 3))}
        >>> write_dcp(PortableState(models={"model": weights}, optimizers={}), "run")
        >>> found = read_dcp("run").models["model"]["layer.weight"]
        >>> found.shape, found.read(2, 5)
        ((2, 3), tensor([2, 3, 4]))
    """
    directory = read_directory(Path(path))
    where = str(directory.path)
    paths = directory.paths
    optimizer_at = _choose(_optimizers(paths.values()), optimizer, _OPTIMIZERS, "optimizer", where)
    rest = {key: parts for key, parts in paths.items() if not _under_optimizer(parts, optimizer_at)}
    tensor_homes = {parts[:-1]: None for key, parts in rest.items() if isinstance(directory.entries[key], TensorEntry)}
    others = _optimizers(rest.values())
    homes = [home for home in tensor_homes if not any(_under_optimizer((*home, ""), other) for other in others)]
    model_at = _choose(_likely_models(homes, model), model, _MODELS, "model", where)

    weights = None
    if model_at is not None:
        of_model = {parts[-1]: key for key, parts in rest.items() if parts[:-1] == model_at}
        weights = _weights(directory, of_model)
        rest = {key: parts for key, parts in rest.items() if parts[:-1] != model_at}
    optimizers = {}
    if optimizer_at is not None:
        inside = {
            key: parts[len(optimizer_at) :] for key, parts in paths.items() if _under_optimizer(parts, optimizer_at)
        }
        raw = _nested({parts: _value(directory, key) for key, parts in inside.items()})
        called = ".".join(map(str, optimizer_at)) or "the optimizer"
        optimizers["optimizer"] = optimizer_from_dict(
            _with_groups(raw), model=weights, names=names, where=f"{where}: {called}"
        )
    return PortableState(
        models={} if weights is None else {"model": weights},
        optimizers=optimizers,
        extra=_extra(directory, rest, model_at or optimizer_at or ()) if extra and rest else None,
    )


def _optimizers(paths: Iterable[KeyPath]) -> list[KeyPath]:
    """Where something has parameter groups, nested or flattened."""
    found: dict[KeyPath, None] = {}
    for parts in paths:
        if "param_groups" in parts[:-1]:
            found[parts[: parts.index("param_groups")]] = None
        elif isinstance(parts[-1], str) and parts[-1].startswith("param_groups."):
            found[parts[:-1]] = None
    return list(found)


def _under_optimizer(parts: KeyPath, home: KeyPath | None) -> bool:
    if home is None or parts[: len(home)] != home or len(parts) == len(home):
        return False
    below = parts[len(home)]
    return isinstance(below, str) and below.partition(".")[0] in ("state", "param_groups")


def _likely_models(homes: Sequence[KeyPath], wanted: str | None) -> list[KeyPath]:
    if wanted is not None:
        return list(homes)
    return [home for home in homes if all(isinstance(part, str) and part != "extra" for part in home)]


def _choose(
    candidates: Sequence[KeyPath], wanted: str | None, usual: Sequence[str], what: str, where: str
) -> KeyPath | None:
    shown = {".".join(map(str, home)): home for home in candidates}
    if wanted is not None:
        if wanted not in shown:
            raise CheckpointError(f"{where} has no {what} at {wanted!r}; there is {few(map(repr, shown)) or 'none'}")
        return shown[wanted]
    named = [home for home in candidates if home and home[-1] in usual]
    for fitting in (candidates, named):
        if len(fitting) == 1:
            return fitting[0]
    if candidates:
        raise CheckpointError(
            f"{where} has several things that may be the {what}: {few(map(repr, shown))}; say which, as in "
            f"{what}={next(iter(shown))!r}"
        )
    return None


def _weights(directory: Directory, keys: Mapping[str | int, str]) -> dict[str, LazyTensor]:
    where = str(directory.path)
    found: dict[str, LazyTensor] = {}
    values = []
    for name, key in keys.items():
        entry = directory.entries[key]
        if isinstance(entry, TensorEntry) and isinstance(name, str):
            found[name] = _lazy(directory, key, entry)
        else:
            values.append(key)
    # A home at the top of the directory has the trainer's values beside the weights; elsewhere they are the model's.
    if values and any(key.endswith("_extra_state") for key in values):
        raise CheckpointError(
            f"{where} has entries that are no tensors among the model's: {few(values)}. A model here is tensors by name"
        )
    bare = bare_names(list(found), where=where)
    return {bare[name]: lazy for name, lazy in found.items()}


def _lazy(directory: Directory, key: str, entry: TensorEntry) -> LazyTensor:
    return lazy_boxes(entry.dtype, entry.shape, [_box(directory, key, entry.dtype, chunk) for chunk in entry.chunks])


def _box(directory: Directory, key: str, dtype: str, chunk: Chunk) -> Box:
    item = chunk.item

    @cache
    def opened() -> Words:
        where = f"{item.file.path} at {item.offset}: {key!r}"
        return open_tensor(item.file, item.offset, item.length, dtype=dtype, shape=chunk.sizes, where=where)

    return Box(offsets=chunk.offsets, sizes=chunk.sizes, open=opened)


def _value(directory: Directory, key: str) -> Any:
    entry = directory.entries[key]
    if isinstance(entry, TensorEntry):
        return _lazy(directory, key, entry)
    return _load(entry, key)


def _load(item: StoredItem, key: str) -> Any:
    where = f"{item.file.path} at {item.offset}: {key!r}"
    if item.length > _MOST_VALUE_BYTES:
        raise CheckpointError(f"{where} has {item.length} bytes; values of up to {_MOST_VALUE_BYTES} are read")
    return load_weights_from(item.file.map()[item.offset : item.offset + item.length], where=where)


def _extra(directory: Directory, rest: Mapping[str, KeyPath], home: KeyPath) -> Any:
    above = home[:-1]  # what a Stateful of the trainer's put over the model and everything else
    if all(parts[: len(above)] == above for parts in rest.values()):
        rest = {key: parts[len(above) :] for key, parts in rest.items()}
    values = {}
    for key, parts in rest.items():
        value = _value(directory, key)
        values[parts] = value.whole() if isinstance(value, LazyTensor) else value
    nested = _listed(_nested(values))
    return nested["extra"] if isinstance(nested, dict) and set(nested) == {"extra"} else nested


def _nested(values: Mapping[KeyPath, Any]) -> dict[Any, Any]:
    tree: dict[Any, Any] = {}
    for parts, value in values.items():
        at = tree
        for part in parts[:-1]:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise CheckpointError(
                    f"the state dict has a value and something below it at {'.'.join(map(str, parts))}"
                )
        at[parts[-1]] = value
    return tree


def _listed(tree: Any) -> Any:
    """Lists again where keys are the numbers 0, 1, 2, ...: those of dicts are texts in a path."""
    if not isinstance(tree, dict):
        return tree
    if tree and set(tree) == set(range(len(tree))):
        return [_listed(tree[index]) for index in range(len(tree))]
    return {key: _listed(value) for key, value in tree.items()}


def _with_groups(raw: dict[Any, Any]) -> dict[Any, Any]:
    """The state dict of an optimizer with its groups as a list, and options that are tensors whole."""
    if not isinstance(raw.get("param_groups"), dict):
        return {key: _whole_option(key, value) for key, value in raw.items()}
    groups = _listed(raw["param_groups"])
    if not isinstance(groups, list):
        raise CheckpointError(f"the parameter groups are numbered {few(raw['param_groups'])}: some are missing")
    whole = [
        {option: _whole_option("param_groups.", value) for option, value in group.items()}
        if isinstance(group, dict)
        else group
        for group in groups
    ]
    state = raw.get("state", {})
    if isinstance(state, dict) and any(isinstance(group, dict) and _numbers(group.get("params")) for group in whole):
        # An optimizer's own state dict was saved: torch made texts of the numbers of its parameters, as of all keys.
        state = {int(key) if isinstance(key, str) and key.isdecimal() else key: each for key, each in state.items()}
    if isinstance(state, dict):
        state = {key: _entry(entry) if isinstance(entry, dict) else entry for key, entry in state.items()}
    return {"state": state, "param_groups": whole}


def _entry(entry: dict[Any, Any]) -> dict[Any, Any]:
    """One parameter's state: tensors stay lazy, those inside of lists and dicts are read."""
    return {key: _listed(_whole_tree(value)) if isinstance(value, dict) else value for key, value in entry.items()}


def _whole_tree(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _whole_tree(each) for key, each in value.items()}
    return value.whole() if isinstance(value, LazyTensor) else value


def _numbers(listed: Any) -> bool:
    return isinstance(listed, (list, tuple)) and any(isinstance(each, int) for each in listed)


def _whole_option(key: Any, value: Any) -> Any:
    is_option = isinstance(key, str) and key.startswith("param_groups.")
    return value.whole() if is_option and isinstance(value, LazyTensor) else value
