"""A portable state as a directory that ``torch.distributed.checkpoint.load`` reads, on any number of ranks."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

from shardrt.errors import CheckpointError, StateError
from shardrt.interchange.backed import FileBacked
from shardrt.interchange.naming import few
from shardrt.interchange.optimizers import dict_from_optimizer, flattened
from shardrt.state.portable import PortableState


def write_dcp(state: PortableState, path: str | Path, *, prefix: str = "", flatten: bool = False) -> None:
    """Write a directory with the layout that torch's guides use: ``{"model": ..., "optim": ...}``.

    An FSDP2 run loads it with ``get_state_dict``, ``dcp.load`` and ``set_state_dict``. ``prefix="app"`` puts all of it
    under ``app``, as a ``Stateful`` of that name does; ``flatten`` is ``flatten_optimizer_state_dict`` of torch's
    ``StateDictOptions``. What the trainer saved beside them goes under ``extra``. The directory must not exist, and is
    there wholly or not at all.

    Example:
        >>> import pathlib, torch
        >>> from shardrt.interchange import write_dcp
        >>> from shardrt.state.portable import LazyTensor, PortableState
        >>> state = PortableState(models={"model": {"w": LazyTensor.of(torch.ones(2))}}, optimizers={})
        >>> write_dcp(state, "run")
        >>> sorted(path.name for path in pathlib.Path("run").iterdir())
        ['.metadata', '__0_0.distcp']
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    target = Path(path)
    if target.exists():
        raise CheckpointError(f"{target} exists; name a directory that does not, and it is made")
    unfinished = target.absolute().with_name(f".{target.name}.unfinished-{os.getpid()}")
    try:
        unfinished.mkdir(parents=True)
        tree = _tree(state, FileBacked(unfinished), flatten=flatten)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about process groups, which are not used
            save({prefix: tree} if prefix else tree, checkpoint_id=unfinished, no_dist=True)
        unfinished.rename(target)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _tree(state: PortableState, backed: FileBacked, *, flatten: bool) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, model in state.models.items():
        tree[name] = {each: backed.whole(lazy) for each, lazy in model.items()}
    for name, optimizer in state.optimizers.items():
        key = "optim" if name == "optimizer" else name
        if key in tree:
            raise StateError(f"the state has a model and an optimizer that would both be {key!r}; there is {few(tree)}")
        nested = dict_from_optimizer(optimizer, backed.tree, numbered=False)
        tree[key] = flattened(nested) if flatten else nested
    if state.extra is not None:
        if "extra" in tree:
            raise StateError("the state has a model or an optimizer called 'extra', which is where the rest belongs")
        tree["extra"] = backed.tree(state.extra)
    return tree
